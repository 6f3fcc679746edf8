"""A deterministic simulator: production cores, hosts and agent loops on virtual time, one seed a history.

`run.simulate` is the door: one history from one seed. Its rooms, from the top down; each knows only those
below it, and in most of them the module with the room's own name, or the first one named, is where to begin:

- `play`: one history, put together and played to its end (`history`, `probes`).
- `faults`: what goes wrong, by chance and with an aim, and the `levers` that both pull.
- `world`: engines, network, directories and router on one ground, and how they are drawn from the seed.
- `show`: one transfer's life as a picture, and what many seeds have visited as a table.
- `engine`: one engine around the production host and agents: scheduler, blocks, steps, ranks.
- `watch`: who looks on: a checker per promise, the grid of stages and faults, coverage, traces.
- `trials`: many histories: batches over processes, shrinking, planted faults.
- `ground`: what all stand on: time, memory, content, events, options and outcomes.
"""
