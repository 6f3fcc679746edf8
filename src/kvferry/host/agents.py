"""What a rank's agent runs on, whoever its host is: NIXL, and a client of other engines' directories."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvferry.agent.agent import Agent
from kvferry.agent.directory_client import DirectoryClient
from kvferry.agent.links import Identity
from kvferry.host.settings import Settings
from kvferry.ids import PeerName
from kvferry.layout.spec import CacheSpec
from kvferry.transport.base import Transport
from kvferry.transport.nixl import NixlTransport


def make_agent(
    identity: Identity, cache: CacheSpec, settings: Settings, on_thread: Callable[[], None] | None = None
) -> Agent:
    """An agent over NIXL that reads other engines' directories; not started yet.

    `on_thread` is called on the agent's thread before its transport is made there.
    """
    _share_interpreter(settings)

    def make_transport(name: PeerName) -> Transport:
        if on_thread is not None:
            on_thread()
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


def _share_interpreter(settings: Settings) -> None:
    """Let no thread of this process hold the interpreter for longer than `switch_seconds` while others wait.

    The agent's thread needs it for a moment between any two slices, and an engine's thread that computes in
    Python gives it up only after Python's switch interval: 5 ms, in which two slices could travel.
    """
    if 0 < settings.switch_seconds < sys.getswitchinterval():
        sys.setswitchinterval(settings.switch_seconds)
