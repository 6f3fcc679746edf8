"""What a rank's agent runs on: its transport, its thread's device, and the device's events.

Imports no vLLM, so that `kvferry selftest` runs the very pieces that an engine runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvferry.agent.agent import Agent
from kvferry.agent.directory_client import DirectoryClient
from kvferry.agent.links import Identity
from kvferry.connector.settings import Settings
from kvferry.host.devices import recorder_of
from kvferry.ids import PeerName
from kvferry.layout.spec import CacheSpec
from kvferry.transport.base import Transport
from kvferry.transport.nixl import NixlTransport


def make_agent(identity: Identity, cache: CacheSpec, settings: Settings) -> Agent:
    """An agent over NIXL that reads other engines' directories; not started yet."""

    def make_transport(name: PeerName) -> Transport:
        # Called on the agent's thread, and a new thread starts on the first device, whatever the rank's is.
        if cache.regions[0].kind == "VRAM":
            torch.cuda.set_device(cache.regions[0].device)
        return NixlTransport(
            name,
            backends=settings.backends,
            progress_thread=settings.progress_thread,
            retry_bound_seconds=settings.retry_bound_seconds,
            allow_untested=settings.allow_untested_nixl,
            num_threads=settings.num_threads,
        )

    resolver = DirectoryClient(
        secret=settings.side_channel_secret, deadline_seconds=settings.limits.handshake_seconds
    )
    return Agent(identity, cache, make_transport, settings.limits, resolver)


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
