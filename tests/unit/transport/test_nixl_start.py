"""The start of a NIXL transport: what is checked, and in which order things come up."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.errors import TransportError, UsageError
from kvferry.ids import PeerName
from kvferry.layout.runs import Region
from kvferry.transport.nixl import NixlTransport


class NativeAgent:
    """Records what it is asked for; refuses to register when told so."""

    def __init__(self, calls: list[str], *, memory: bool = True) -> None:
        self.calls, self.memory = calls, memory
        calls.append("agent")

    def get_plugin_list(self) -> list[str]:
        return ["UCX", "LIBFABRIC"]

    def create_backend(self, backend: str, params: dict[str, str]) -> None:
        self.calls.append(f"backend {backend}")

    def register_memory(self, rows: list[Any], kind: str) -> str:
        self.calls.append(f"memory {kind}")
        if not self.memory:
            raise MemoryError("cannot pin")
        return kind

    def deregister_memory(self, registration: str) -> None:
        self.calls.append(f"forget {registration}")


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a version of nixl is installed; its native agent notes its calls."""

    def install(version: str, *, memory: bool = True) -> list[str]:
        calls: list[str] = []
        api = ModuleType("nixl._api")
        api.nixl_agent = lambda name, config: NativeAgent(calls, memory=memory)  # type: ignore[attr-defined]
        api.nixl_agent_config = SimpleNamespace  # type: ignore[attr-defined]
        package = ModuleType("nixl")
        package._api = api  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nixl", package)
        monkeypatch.setitem(sys.modules, "nixl._api", api)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        return calls

    return install


@pytest.mark.parametrize("version", ["0.10.0", "0.10.1", "1.3.0", "1.3.1", "2.0.0"])
def test_a_version_that_is_known_to_break_starts_nothing_unless_told_to(installed, version):
    """A18, A19: the transport itself refuses, before an agent exists; the override is the operator's word."""
    calls = installed(version)
    with pytest.raises(UsageError, match=rf"NIXL {version} .*install nixl==.*allow_untested"):
        NixlTransport(PeerName("we"))
    assert calls == []
    NixlTransport(PeerName("we"), allow_untested=True)
    assert calls == ["agent", "backend UCX"]


def test_a_missing_nixl_is_told_with_what_to_install(monkeypatch):
    """A19."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UsageError, match="nixl is not installed; install nixl=="):
        NixlTransport(PeerName("we"))


def test_backends_are_up_before_any_memory_is_pinned(installed):
    """A24: a backend that starts after a large pinning finds no contiguous memory left."""
    calls = installed("1.5.1")
    transport = NixlTransport(PeerName("we"), backends=["LIBFABRIC", "UCX"])
    assert calls == ["agent", "backend LIBFABRIC", "backend UCX"]
    transport.register([Region(1000, 1000), Region(5000, 1000, device=0, kind="VRAM")])
    assert calls[3:] == ["memory DRAM", "memory VRAM"]


def test_memory_that_cannot_be_pinned_ends_the_start_with_the_reason(installed):
    """A24: it names what was being registered; nothing goes on half registered."""
    calls = installed("1.5.1", memory=False)
    transport = NixlTransport(PeerName("we"))
    with pytest.raises(TransportError, match=r"registering 2 regions of DRAM: MemoryError: cannot pin"):
        transport.register([Region(1000, 1000), Region(5000, 1000)])
    transport.close()
    assert calls == ["agent", "backend UCX", "memory DRAM"]
