"""What goes wrong: `chance` and `plots` by chance, `aims` and `strikes` on purpose, all of it by `levers`."""
