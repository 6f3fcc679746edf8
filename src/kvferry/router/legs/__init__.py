"""One request to one engine, and the ways in which it ends."""
