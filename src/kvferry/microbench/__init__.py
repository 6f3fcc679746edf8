"""Measures hand-overs from agent to agent, without an engine, beside NIXL driven by hand.

From the inside out: `cells` says what is measured, `placement` which blocks a transfer has, `memory` what is
in them; `rank` is one engine's part without the engine, `raw` NIXL by hand; `consumer` is the second
process, `producer` this one's part in a hand-over, `outstanding` the cost of transfers that wait; `handover`
measures all, and `figures` makes medians, ratios and a verdict of it.
"""
