"""Real agents with their threads that share a fabric in memory, for `kvferry bench hooks`' engines."""

from __future__ import annotations

import time
from random import Random

from kvferry.agent.agent import Agent
from kvferry.agent.directory_client import DirectoryClient
from kvferry.connector.hook_engine import MakeAgent
from kvferry.transport.memory import MemoryFabric, MemoryTransport


def agents_in_memory() -> MakeAgent:
    """What makes them; each call has a fabric of its own."""
    fabric = MemoryFabric(random=Random(0), clock=time.monotonic)
    return lambda identity, cache, settings: Agent(
        identity, cache, lambda peer: MemoryTransport(fabric, peer), settings.limits, DirectoryClient()
    )
