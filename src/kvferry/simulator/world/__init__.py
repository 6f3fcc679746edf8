"""The world of a history, drawn from its seed. Begin with `world`, which holds the others together."""
