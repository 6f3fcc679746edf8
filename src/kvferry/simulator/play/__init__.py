"""One history, put together and played to its end. Begin with `history`."""
