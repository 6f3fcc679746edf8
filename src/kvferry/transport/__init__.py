"""How bytes and messages move between ranks: one interface, an in-process one and NIXL."""
