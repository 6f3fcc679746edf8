"""What a rank's agent runs on: its transport, its thread's device, and the device's events.

Imports no vLLM, so that `kvferry selftest` runs the very pieces that an engine runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvferry.agent.agent import Agent
from kvferry.agent.links import Identity
from kvferry.host import agents
from kvferry.host.devices import recorder_of
from kvferry.host.settings import Settings
from kvferry.layout.spec import CacheSpec


def make_agent(identity: Identity, cache: CacheSpec, settings: Settings) -> Agent:
    """An agent over NIXL that reads other engines' directories; not started yet."""

    def choose_device() -> None:
        # A new thread starts on the first device, whatever the rank's is.
        if cache.regions[0].kind == "VRAM":
            torch.cuda.set_device(cache.regions[0].device)

    return agents.make_agent(identity, cache, settings, choose_device)


def recorder(tensor: Any) -> Callable[[], Callable[[], bool]] | None:
    """How to mark the end of a forward pass on the caches' device; None on a CPU, where it has ended.

    What it returns marks the current stream, and gives a function that says, on any thread, whether the
    device has passed the mark.
    """
    emulated = recorder_of(tensor)
    if emulated is not None:
        return emulated
    if tensor.device.type != "cuda":
        return None

    def record() -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record()
        ready: Callable[[], bool] = event.query
        return ready

    return record
