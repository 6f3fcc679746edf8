"""What an engine is in all its lives."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.ids import EngineId
from kvferry.protocol.limits import Limits
from kvferry.simulator.ground.arena import CacheShape


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast an engine is. `depth` steps are under way at once."""

    token_budget: int
    running_max: int
    depth: int
    step_seconds: float
    token_seconds: float
    device_lag_seconds: float
    """How far the device may be behind the thread that launches its work; 0 where launching waits."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Where an engine is, what it does, how large and how fast it is."""

    engine: EngineId
    host: str
    port: int
    produces: bool
    consumes: bool
    cache: CacheShape
    pace: Pace
    limits: Limits
    waiting_blocks_share: float
    quarantine_share: float
    agent_lag_seconds: float
    start_seconds: float
    """From its start until its directory answers, but for the first life."""
    hold_seconds: float = 0.0
    """How long it keeps a turn for the next one; 0 for an engine that keeps none."""
    held_blocks_share: float = 0.25
