"""The NIXL transport's own decisions, against a native agent whose answers the test writes."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.errors import PeerLostError, TransportError, UsageError
from kvferry.ids import PeerName
from kvferry.layout.runs import Region, Runs
from kvferry.transport import nixl
from kvferry.transport.base import PostState, Transport
from kvferry.transport.nixl import NixlTransport, mapped_error
from kvferry.transport.regions import Envelope

PEER = PeerName("peer")


def native_error(name: str) -> Exception:
    error: Exception = type(name, (Exception,), {})("NIXL_ERR")
    return error


class NativeHandle:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


class NativeAgent:
    """Records calls; `errors` are raised by the next calls of that method, `states` are what polls answer."""

    def __init__(self, name: str, config: Any) -> None:
        self.name = name
        self.config = config
        self.calls: list[tuple[str, Any]] = []
        self.errors: dict[str, list[Exception]] = {}
        self.states: list[str] = []
        self.handles: list[NativeHandle] = []

    def _called(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, arguments))
        if self.errors.get(method):
            raise self.errors[method].pop(0)

    def named(self, method: str) -> list[Any]:
        return [arguments for called, arguments in self.calls if called == method]

    def get_plugin_list(self) -> list[str]:
        return ["UCX", "LIBFABRIC", "POSIX"]

    def create_backend(self, backend: str, params: dict[str, str]) -> None:
        self._called("create_backend", backend, params)

    def register_memory(self, rows: list[Any], kind: str) -> tuple[str, int]:
        self._called("register_memory", rows, kind)
        return kind, len(rows)

    def deregister_memory(self, registration: Any) -> None:
        self._called("deregister_memory", registration)

    def get_agent_metadata(self) -> bytes:
        return b"native"

    def add_remote_agent(self, blob: bytes) -> bytes:
        self._called("add_remote_agent", blob)
        return PEER.encode()

    def remove_remote_agent(self, peer: str) -> None:
        self._called("remove_remote_agent", peer)

    def send_notif(self, peer: str, payload: bytes) -> None:
        self._called("send_notif", peer, payload)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self._called("get_new_notifs")
        return {"peer": [b"one", b"two"]}

    def get_xfer_descs(self, rows: Any, kind: str) -> Any:
        return rows.tolist(), kind

    def initialize_xfer(
        self, operation: str, local: Any, remote: Any, peer: str, notify: bytes
    ) -> NativeHandle:
        self._called("initialize_xfer", operation, local, remote, peer, notify)
        self.handles.append(NativeHandle())
        return self.handles[-1]

    def transfer(self, handle: NativeHandle) -> str:
        self._called("transfer", handle)
        return "PROC"

    def check_xfer_state(self, handle: NativeHandle) -> str:
        self._called("check_xfer_state", handle)
        return self.states.pop(0) if self.states else "PROC"


@pytest.fixture
def native(monkeypatch) -> list[NativeAgent]:
    made: list[NativeAgent] = []

    def agent(name: str, config: Any) -> NativeAgent:
        made.append(NativeAgent(name, config))
        return made[-1]

    api = SimpleNamespace(nixl_agent=agent, nixl_agent_config=lambda **options: options)
    monkeypatch.setattr(nixl, "_load_nixl", lambda *, allow_untested: api)
    return made


@pytest.fixture
def transport(native) -> NixlTransport:
    transport = NixlTransport(PeerName("we"))
    transport.register([Region(1000, 1000), Region(5000, 1000, device=2, kind="VRAM")])
    transport.connect(PEER, metadata())
    return transport


def metadata(blob: bytes = b"theirs") -> bytes:
    regions = (Region(20_000, 1000, device=1), Region(30_000, 1000, device=3, kind="VRAM"))
    return Envelope(transport="nixl", name=PEER, regions=regions, blob=blob).encoded()


def runs(*triples: tuple[int, int, int]) -> Runs:
    columns = np.array(triples, dtype=np.uint64).reshape(-1, 3)
    return Runs(columns[:, 0], columns[:, 1], columns[:, 2])


RUN = runs((1000, 20_000, 10))


def test_importing_the_module_loads_no_nixl():
    code = (
        "import sys, kvferry.transport.nixl; sys.exit(any(name.startswith('nixl') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_implements_the_interface(transport):
    as_interface: Transport = transport
    assert as_interface.name == "we"
    assert as_interface.notification_bytes_max == nixl.NOTIFICATION_BYTES_MAX
    assert as_interface.retry_bound_seconds == nixl.RETRY_BOUND_SECONDS


def test_the_progress_thread_is_off_unless_asked_for(native):
    """G09: no core spins by default."""
    NixlTransport(PeerName("we"))
    NixlTransport(PeerName("we"), progress_thread=True)
    assert [agent.config["enable_prog_thread"] for agent in native] == [False, True]


def test_backends_and_their_parameters_are_passed_on(native):
    NixlTransport(
        PeerName("we"),
        backends=["LIBFABRIC", "UCX", "POSIX"],
        backend_params={"UCX": {"ucx_devices": "x"}},
        num_threads=4,
    )
    assert native[0].named("create_backend") == [
        ("LIBFABRIC", {"num_threads": "4"}),
        ("UCX", {"ucx_devices": "x", "num_threads": "4"}),
        ("POSIX", {}),
    ]


def test_an_unknown_backend_is_refused_with_the_list_of_known_ones(native):
    """O09: the error lists what is available."""
    with pytest.raises(UsageError, match="'ucx' is unknown; available are LIBFABRIC, POSIX, UCX"):
        NixlTransport(PeerName("we"), backends=["ucx"])
    with pytest.raises(UsageError, match="at least one"):
        NixlTransport(PeerName("we"), backends=[])


def test_memory_is_registered_by_kind_and_freed_at_close(transport, native):
    assert native[0].named("register_memory") == [
        ([(1000, 1000, 0, "")], "DRAM"),
        ([(5000, 1000, 2, "")], "VRAM"),
    ]
    transport.close()
    transport.close()
    assert native[0].named("deregister_memory") == [(("DRAM", 1),), (("VRAM", 1),)]
    assert native[0].named("remove_remote_agent") == [("peer",)]


def test_descriptors_carry_the_device_of_the_region_they_lie_in(transport, native):
    transport.write(PEER, runs((1000, 30_000, 10), (1010, 30_500, 20)), b"note")
    transport.read(PEER, runs((20_000, 5000, 30)))
    assert native[0].named("initialize_xfer") == [
        (
            "WRITE",
            ([[1000, 10, 0], [1010, 20, 0]], "DRAM"),
            ([[30_000, 10, 3], [30_500, 20, 3]], "VRAM"),
            "peer",
            b"note",
        ),
        ("READ", ([[5000, 30, 2]], "VRAM"), ([[20_000, 30, 1]], "DRAM"), "peer", b""),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        runs((999, 20_000, 1)),
        runs((1000, 20_990, 11)),
        runs((1000, 20_000, 10), (1990, 20_000, 11)),
        runs((1000, 40_000, 1)),
        runs((1000, 20_000, 1), (5000, 20_001, 1)),
        runs((1000, 20_000, 1), (1001, 30_000, 1)),
        runs(),
    ],
)
def test_runs_out_of_bounds_or_of_mixed_kinds_never_reach_nixl(transport, native, bad):
    """V08: each descriptor is checked before anything is posted."""
    with pytest.raises(TransportError) as caught:
        transport.write(PEER, bad)
    assert not caught.value.retryable
    assert native[0].named("initialize_xfer") == []


def test_messages_arrive_with_their_senders_name(transport):
    assert [(message.peer, message.payload) for message in transport.receive()] == [
        ("peer", b"one"),
        ("peer", b"two"),
    ]


def test_a_handle_is_released_only_in_a_terminal_state(transport, native):
    """A11: NIXL sees no release, and no deregistration, before the end."""
    handle = transport.write(PEER, RUN)
    with pytest.raises(AssertionError, match="in flight"):
        transport.release(handle)
    with pytest.raises(UsageError, match="1 transfers in flight"):
        transport.close()
    assert native[0].handles[0].released == 0
    assert native[0].named("deregister_memory") == []
    native[0].states = ["PROC", "DONE"]
    assert transport.poll(handle) is PostState.IN_FLIGHT
    assert transport.poll(handle) is PostState.DONE
    assert transport.poll(handle) is PostState.DONE
    assert len(native[0].named("check_xfer_state")) == 2
    transport.release(handle)
    assert native[0].handles[0].released == 1
    with pytest.raises(AssertionError, match="unknown or released"):
        transport.release(handle)


def test_a_refused_post_is_released_and_raised(transport, native):
    native[0].errors["transfer"] = [native_error("nixlBackendError")]
    with pytest.raises(
        TransportError, match="WRITE of 10 bytes in 1 runs, peer peer: nixlBackendError"
    ) as caught:
        transport.write(PEER, RUN)
    assert caught.value.retryable
    assert native[0].handles[0].released == 1
    transport.close()


def test_a_peer_that_disconnects_in_flight_fails_the_transfer_as_lost(transport, native):
    handle = transport.write(PEER, RUN)
    native[0].errors["check_xfer_state"] = [native_error("nixlRemoteDisconnectError")]
    assert transport.poll(handle) is PostState.FAILED
    assert isinstance(transport.failure(handle), PeerLostError)
    transport.release(handle)
    assert native[0].handles[0].released == 1


def test_a_peer_that_nixl_lost_silently_works_again_after_connect(transport, native):
    """A07: one failure, then the same metadata is loaded anew and the next transfer works."""
    native[0].errors["initialize_xfer"] = [native_error("nixlNotFoundError")]
    with pytest.raises(TransportError) as caught:
        transport.write(PEER, RUN)
    assert caught.value.retryable
    assert not isinstance(caught.value, PeerLostError)
    transport.connect(PEER, metadata())
    assert native[0].named("remove_remote_agent") == [("peer",)]
    assert native[0].named("add_remote_agent") == [(b"theirs",), (b"theirs",)]
    native[0].states = ["DONE"]
    assert transport.poll(transport.write(PEER, RUN)) is PostState.DONE


def test_a_peer_that_nixl_lost_silently_is_loaded_anew_at_its_next_use(transport, native):
    """A07: our side believes in the connection, so nobody would call `connect`."""
    native[0].errors["send_notif"] = [native_error("nixlNotFoundError")]
    with pytest.raises(TransportError) as caught:
        transport.send(PEER, b"x")
    assert caught.value.retryable
    transport.send(PEER, b"x")
    assert native[0].named("add_remote_agent") == [(b"theirs",), (b"theirs",)]
    transport.send(PEER, b"x")
    transport.write(PEER, RUN)
    assert len(native[0].named("add_remote_agent")) == 2


def test_a_lost_peer_is_not_removed_under_a_transfer_and_a_failed_load_is_tried_again(transport, native):
    """A07, A11: nothing is taken away while bytes move, and one refusal is not the end."""
    handle = transport.write(PEER, RUN)
    native[0].errors["send_notif"] = [native_error("nixlNotFoundError")]
    with pytest.raises(TransportError):
        transport.send(PEER, b"x")
    transport.send(PEER, b"x")
    assert native[0].named("remove_remote_agent") == []
    native[0].states = ["DONE"]
    assert transport.poll(handle) is PostState.DONE
    native[0].errors["add_remote_agent"] = [native_error("nixlMismatchError")]
    with pytest.raises(TransportError, match="loading the metadata") as caught:
        transport.send(PEER, b"x")
    assert caught.value.retryable
    transport.send(PEER, b"x")
    assert native[0].named("remove_remote_agent") == [("peer",)] * 2


def test_a_failure_of_the_backend_alone_removes_nobody(transport, native):
    """A08: removing and adding a peer back to back is what fails; only a peer that is not found needs it."""
    native[0].errors["send_notif"] = [native_error("nixlBackendError")]
    with pytest.raises(TransportError):
        transport.send(PEER, b"x")
    transport.send(PEER, b"x")
    assert native[0].named("remove_remote_agent") == []


def test_connect_is_idempotent_and_another_life_replaces_the_first(transport, native):
    """A05, A21: the old state is removed before the new one is loaded."""
    transport.connect(PEER, metadata())
    assert native[0].named("add_remote_agent") == [(b"theirs",)]
    transport.connect(PEER, metadata(b"reborn"))
    methods = [method for method, _ in native[0].calls if "remote_agent" in method]
    assert methods == ["add_remote_agent", "remove_remote_agent", "add_remote_agent"]


def test_a_peer_whose_native_name_differs_is_refused_and_removed(transport, native):
    other = PeerName("other")
    envelope = Envelope(transport="nixl", name=other, regions=(), blob=b"x").encoded()
    with pytest.raises(TransportError, match="names another peer"):
        transport.connect(other, envelope)
    assert native[0].named("remove_remote_agent") == [("peer",)]


def test_native_metadata_that_cannot_be_loaded_is_a_transport_error(native):
    """A01, A03: a bad peer is an error of that peer."""
    transport = NixlTransport(PeerName("we"))
    native[0].errors["add_remote_agent"] = [native_error("nixlMismatchError")]
    with pytest.raises(TransportError, match="loading the metadata of peer"):
        transport.connect(PEER, metadata())
    with pytest.raises(TransportError, match="not connected"):
        transport.send(PEER, b"x")


def test_disconnect_waits_for_transfers_in_flight_before_nixl_forgets_the_peer(transport, native):
    """A11: removing the peer under a transfer makes NIXL call it failed while it still moves bytes."""
    first, second = transport.write(PEER, RUN), transport.write(PEER, RUN)
    transport.disconnect(PEER)
    for refused in (lambda: transport.send(PEER, b"x"), lambda: transport.write(PEER, RUN)):
        with pytest.raises(TransportError, match="not connected"):
            refused()
    with pytest.raises(TransportError, match="still in flight") as caught:
        transport.connect(PEER, metadata(b"reborn"))
    assert caught.value.retryable
    native[0].states = ["DONE", "PROC", "DONE"]
    assert transport.poll(first) is PostState.DONE
    assert transport.poll(second) is PostState.IN_FLIGHT
    assert native[0].named("remove_remote_agent") == []
    assert transport.poll(second) is PostState.DONE
    assert native[0].named("remove_remote_agent") == [("peer",)]
    transport.disconnect(PEER)
    assert native[0].named("remove_remote_agent") == [("peer",)]


def test_connecting_again_before_the_end_keeps_the_peer(transport, native):
    handle = transport.write(PEER, RUN)
    transport.disconnect(PEER)
    transport.connect(PEER, metadata())
    transport.send(PEER, b"x")
    native[0].states = ["DONE"]
    assert transport.poll(handle) is PostState.DONE
    assert native[0].named("remove_remote_agent") == []


def test_disconnect_does_not_mind_that_nixl_has_forgotten_the_peer_already(transport, native):
    native[0].errors["remove_remote_agent"] = [native_error("nixlNotFoundError")]
    transport.disconnect(PEER)
    with pytest.raises(TransportError, match="not connected"):
        transport.send(PEER, b"x")


@pytest.mark.parametrize(
    ("name", "lost", "retryable"),
    [
        ("nixlRemoteDisconnectError", True, False),
        ("nixlNotFoundError", False, True),
        ("nixlBackendError", False, True),
        ("nixlUnknownError", False, True),
        ("nixlNotAllowedError", False, False),
        ("nixlInvalidParamError", False, False),
        ("nixlMismatchError", False, False),
        ("KeyError", False, False),
    ],
)
def test_native_errors_are_mapped_in_one_place(name, lost, retryable):
    error = mapped_error(native_error(name), "sending to peer")
    assert isinstance(error, PeerLostError) is lost
    assert error.retryable is retryable
    assert str(error) == f"sending to peer: {name}: NIXL_ERR"


def test_send_errors_surface(transport, native):
    """A07: a failed message is never swallowed."""
    native[0].errors["send_notif"] = [native_error("nixlRemoteDisconnectError")]
    with pytest.raises(PeerLostError, match="sending to peer"):
        transport.send(PEER, b"x")
    for payload in (b"", bytes(nixl.NOTIFICATION_BYTES_MAX + 1)):
        with pytest.raises(TransportError):
            transport.send(PEER, payload)
    assert len(native[0].named("send_notif")) == 1
