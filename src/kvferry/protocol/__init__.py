"""The sans-I/O cores: no clock, no thread, no socket, no log."""
