"""From a client's request to the last byte of its answer."""
