"""For people: `timeline` and `picture` of one transfer's life, `table` of what many seeds have visited."""
