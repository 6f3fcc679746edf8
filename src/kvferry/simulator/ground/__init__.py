"""What all rooms stand on: time, memory, content, events and options. Begin with `ground`."""
