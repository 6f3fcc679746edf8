"""Two real NIXL agents: in one process, and in two."""

from __future__ import annotations

import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest

from kvferry.errors import PeerLostError, TransportError, UsageError
from kvferry.ids import PeerName
from kvferry.layout.runs import Region, Runs
from kvferry.transport.base import Notification, PostState, Transport
from kvferry.transport.nixl import NixlTransport
from tests.support.nixl_peer import ProcessPeer, spawned

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

BUFFER_BYTES = 1 << 22


class Agent:
    """A NixlTransport with one registered buffer, owned by the test's thread."""

    def __init__(
        self, name: str, *, size: int = BUFFER_BYTES, notification_bytes_max: int = 64 << 10
    ) -> None:
        self.name = PeerName(name)
        self.buffer = np.zeros(size, dtype=np.uint8)
        self.address = int(self.buffer.ctypes.data)
        self.transport = NixlTransport(self.name, notification_bytes_max=notification_bytes_max)
        self.transport.register([Region(self.address, size)])
        self.inbox: list[Notification] = []

    def connect(self, peer: Agent | ProcessPeer) -> None:
        metadata = peer.metadata if isinstance(peer, ProcessPeer) else peer.transport.local_metadata()
        self.transport.connect(peer.name, metadata)

    def pump(self) -> None:
        self.inbox += self.transport.receive()

    def payloads(self) -> list[bytes]:
        return [notification.payload for notification in self.inbox]


def wait_until(condition: Callable[[], bool], *agents: Agent, limit_seconds: float = 30.0) -> None:
    """Let the agents make progress until something holds; the limit only ends a broken run."""
    end = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < end, "nothing came of it"
        for agent in agents:
            agent.pump()


def finish(agent: Agent, handle: int, *others: Agent) -> PostState:
    wait_until(lambda: agent.transport.poll(handle) is not PostState.IN_FLIGHT, *others)
    return agent.transport.poll(handle)


def runs_to(source: Agent, target: Agent | ProcessPeer, *pairs: tuple[int, int, int]) -> Runs:
    columns = np.array(pairs, dtype=np.uint64).reshape(-1, 3)
    return Runs(
        columns[:, 0] + np.uint64(source.address), columns[:, 1] + np.uint64(target.address), columns[:, 2]
    )


@pytest.fixture
def pair() -> Iterator[tuple[Agent, Agent]]:
    a, b = Agent("a"), Agent("b")
    a.connect(b)
    yield a, b
    a.transport.close()
    b.transport.close()


def test_it_implements_the_interface(pair):
    transport: Transport = pair[0].transport
    assert transport.name == "a"
    assert transport.retry_bound_seconds > 0


def test_scattered_runs_arrive_and_nothing_else_is_touched(pair):
    a, b = pair
    count, size = 4096, 512
    a.buffer[:] = np.frombuffer(Random(1).randbytes(BUFFER_BYTES), dtype=np.uint8)
    b.buffer[:] = 77
    slots = np.random.default_rng(1).permutation(BUFFER_BYTES // size)
    offsets = [(int(slot) * size, int(slots[index]) * size, size) for index, slot in enumerate(slots[:count])]
    offsets = [
        (source, target, size) for (source, _, _), (_, target, _) in zip(offsets, offsets, strict=True)
    ]
    targets = np.random.default_rng(2).permutation(BUFFER_BYTES // size)[:count]
    triples = [
        (source, int(target) * size, size) for (source, _, _), target in zip(offsets, targets, strict=True)
    ]
    handle = a.transport.write(b.name, runs_to(a, b, *triples), b"written")
    assert finish(a, handle, b) is PostState.DONE
    wait_until(lambda: b.payloads() == [b"written"], b)
    expected = np.full(BUFFER_BYTES, 77, dtype=np.uint8)
    for source, target, length in triples:
        expected[target : target + length] = a.buffer[source : source + length]
    assert np.array_equal(b.buffer, expected)
    a.transport.release(handle)


def test_a_read_fetches_the_peers_bytes(pair):
    a, b = pair
    b.buffer[:1000] = np.arange(1000) % 256
    handle = a.transport.read(
        b.name,
        Runs(*(np.array([value], dtype=np.uint64) for value in (b.address, a.address + 5000, 1000))),
        b"fetched",
    )
    assert finish(a, handle, b) is PostState.DONE
    wait_until(lambda: b.payloads() == [b"fetched"], b)
    assert np.array_equal(a.buffer[5000:6000], b.buffer[:1000])


def test_the_notification_comes_after_the_bytes(pair):
    """A13: what arrives with the notification is whole, transfer after transfer."""
    a, b = pair
    for fill in range(1, 21):
        a.buffer[:] = fill
        handle = a.transport.write(b.name, runs_to(a, b, (0, 0, BUFFER_BYTES)), b"%d" % fill)
        while b.payloads() != [b"%d" % fill]:
            a.transport.poll(handle)
            b.pump()
        assert (b.buffer == fill).all()
        b.inbox.clear()
        assert finish(a, handle, b) is PostState.DONE
        a.transport.release(handle)


def test_messages_of_64_kib_and_of_1_mib_arrive_whole():
    """A16: registrations longer than a packet pass."""
    a, b = Agent("a", notification_bytes_max=1 << 20), Agent("b")
    a.connect(b)
    sent = [Random(size).randbytes(size) for size in (1, 64 << 10, 1 << 20)]
    for payload in sent:
        a.transport.send(b.name, payload)
    wait_until(lambda: len(b.inbox) == 3, a, b)
    assert sorted(b.payloads(), key=len) == sent
    with pytest.raises(TransportError, match="at most"):
        a.transport.send(b.name, bytes((1 << 20) + 1))
    a.transport.close()
    b.transport.close()


def test_a_hello_by_message_alone_lets_the_other_side_write_back(pair):
    a, b = pair
    a.transport.send(b.name, a.transport.local_metadata())
    wait_until(lambda: len(b.inbox) == 1, a, b)
    (hello,) = b.inbox
    assert hello.peer == a.name
    b.transport.connect(hello.peer, hello.payload)
    b.buffer[:100] = 9
    handle = b.transport.write(a.name, runs_to(b, a, (0, 200, 100)), b"back")
    assert finish(b, handle, a) is PostState.DONE
    wait_until(lambda: a.payloads() == [b"back"], a)
    assert (a.buffer[200:300] == 9).all()


@pytest.mark.parametrize(
    "triple",
    [
        (BUFFER_BYTES - 8, 0, 16),
        (0, BUFFER_BYTES - 8, 16),
        (BUFFER_BYTES, 0, 1),
        (0, BUFFER_BYTES, 1),
        (0, 0, 0),
    ],
)
def test_runs_outside_registered_memory_are_refused(pair, triple):
    """V08: neither side's memory is touched outside of what it registered."""
    a, b = pair
    with pytest.raises(TransportError):
        a.transport.write(b.name, runs_to(a, b, (0, 0, 8), triple))
    with pytest.raises(TransportError):
        a.transport.read(b.name, runs_to(b, a, (0, 0, 8), triple))


def test_a_handle_is_released_only_in_a_terminal_state(pair):
    """A11: no release before the end, no close with handles in flight."""
    a, b = pair
    a.buffer[:] = 1
    # The first transfer to a peer cannot be done before the peer has made progress.
    handle = a.transport.write(b.name, runs_to(a, b, (0, 0, BUFFER_BYTES)))
    assert a.transport.poll(handle) is PostState.IN_FLIGHT
    with pytest.raises(AssertionError, match="in flight"):
        a.transport.release(handle)
    with pytest.raises(UsageError, match="1 transfers in flight"):
        a.transport.close()
    assert finish(a, handle, b) is PostState.DONE
    a.transport.release(handle)
    with pytest.raises(AssertionError, match="unknown or released"):
        a.transport.poll(handle)


def test_a_second_thread_is_refused(pair):
    """A10: one thread owns an agent."""
    a, _ = pair
    refused: list[str] = []

    def intrude() -> None:
        try:
            a.transport.receive()
        except AssertionError as error:
            refused.append(str(error))

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert len(refused) == 1


def test_not_connected_damaged_and_wrong_metadata_are_errors(pair):
    a, b = pair
    with pytest.raises(TransportError, match="not connected"):
        b.transport.send(a.name, b"x")
    metadata = b.transport.local_metadata()
    with pytest.raises(TransportError, match="cannot be read"):
        a.transport.connect(b.name, metadata[:40])
    with pytest.raises(TransportError, match="names another peer"):
        a.transport.connect(PeerName("c"), metadata)
    a.transport.disconnect(PeerName("unknown"))
    a.transport.send(b.name, b"still fine")
    wait_until(lambda: b.payloads() == [b"still fine"], a, b)


def test_many_cycles_of_connect_transfer_disconnect(pair):
    """A08: back-to-back removal and addition of a peer never fails."""
    a, b = pair
    metadata = b.transport.local_metadata()
    for cycle in range(50):
        a.transport.connect(b.name, metadata)
        a.buffer[:64] = cycle
        handle = a.transport.write(b.name, runs_to(a, b, (0, 0, 64)))
        assert finish(a, handle, b) is PostState.DONE
        a.transport.release(handle)
        assert (b.buffer[:64] == cycle).all()
        a.transport.disconnect(b.name)


def test_an_unknown_backend_is_refused_with_the_list_of_known_ones():
    """O09: a typo in the backend's name is told, with what there is."""
    with pytest.raises(UsageError, match=r"'UCXX' is unknown; available are .*UCX"):
        NixlTransport(PeerName("x"), backends=["UCXX"])
    with pytest.raises(UsageError, match="at least one"):
        NixlTransport(PeerName("x"), backends=[])


def test_two_processes_exchange_bytes():
    with spawned("child", BUFFER_BYTES) as child:
        parent = Agent("parent")
        parent.connect(child)
        parent.buffer[:] = np.frombuffer(Random(3).randbytes(BUFFER_BYTES), dtype=np.uint8)
        parent.transport.send(child.name, b"metadata " + parent.transport.local_metadata())
        handle = parent.transport.write(child.name, runs_to(parent, child, (0, 0, BUFFER_BYTES)), b"sum")
        assert finish(parent, handle, parent) is PostState.DONE
        wait_until(lambda: bool(parent.inbox), parent)
        assert parent.payloads() == [b"sum %d" % zlib.crc32(parent.buffer.tobytes())]
        parent.transport.send(child.name, b"fill 5")
        parent.transport.send(child.name, b"write 1000 1")
        wait_until(lambda: b"written" in parent.payloads(), parent)
        assert (parent.buffer[:1000] == 5).all()
        parent.transport.close()


@pytest.mark.parametrize("how", ["send", "write"])
def test_a_killed_peer_is_lost(how):
    """P04: a dead peer is noticed by the next use."""
    parent = Agent("parent")
    with spawned("child", BUFFER_BYTES) as child:
        parent.connect(child)
        handle = parent.transport.write(child.name, runs_to(parent, child, (0, 0, 64)))
        assert finish(parent, handle, parent) is PostState.DONE
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        with pytest.raises(PeerLostError):  # noqa: PT012 - the first use may come before the news
            while True:
                if how == "send":
                    parent.transport.send(child.name, b"are you there?")
                    parent.pump()
                else:
                    posted = parent.transport.write(child.name, runs_to(parent, child, (0, 0, 64)))
                    if finish(parent, posted, parent) is PostState.FAILED:
                        error = parent.transport.failure(posted)
                        assert error is not None
                        raise error
        # Whoever is lost stays lost, and is forgotten without complaint.
        with pytest.raises(PeerLostError):
            parent.transport.write(child.name, runs_to(parent, child, (0, 0, 64)))
        parent.transport.disconnect(child.name)
        with pytest.raises(TransportError, match="not connected"):
            parent.transport.send(child.name, b"x")
    parent.transport.close()


def test_a_transfer_in_flight_to_a_peer_that_is_killed_fails_as_lost(monkeypatch):
    # Over TCP a stopped process takes no bytes; over shared memory the write may be done without it.
    monkeypatch.setenv("UCX_TLS", "tcp")
    parent = Agent("parent")
    with spawned("child", BUFFER_BYTES) as child:
        parent.connect(child)
        handle = parent.transport.write(child.name, runs_to(parent, child, (0, 0, 64)))
        assert finish(parent, handle, parent) is PostState.DONE
        os.kill(child.process.pid, signal.SIGSTOP)
        handle = parent.transport.write(child.name, runs_to(parent, child, (0, 0, BUFFER_BYTES)), b"x")
        assert parent.transport.poll(handle) is PostState.IN_FLIGHT
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        assert finish(parent, handle, parent) is PostState.FAILED
        assert isinstance(parent.transport.failure(handle), PeerLostError)
        parent.transport.release(handle)
    parent.transport.close()


def test_a_peer_that_died_before_it_was_ever_used_is_an_error_not_a_crash():
    """A01, A03: metadata of a dead process is loaded; using it fails for that peer alone."""
    parent, other = Agent("parent"), Agent("other")
    with spawned("child", BUFFER_BYTES) as child:
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        with pytest.raises(TransportError):  # noqa: PT012 - the connection fails at load or at use
            parent.connect(child)
            while True:
                parent.transport.send(child.name, b"x")
                parent.pump()
    parent.connect(other)
    parent.transport.send(other.name, b"alive")
    wait_until(lambda: other.payloads() == [b"alive"], parent, other)
    parent.transport.close()
    other.transport.close()


def test_a_restarted_peer_works_under_its_new_name_and_under_the_old_one():
    """A02, A21: another life is another peer; the old one's addresses are never used."""
    parent = Agent("parent")
    parent.buffer[:] = 6
    for name in ("child", "child-again", "child"):
        with spawned(name, BUFFER_BYTES) as child:
            parent.connect(child)
            parent.transport.send(child.name, b"metadata " + parent.transport.local_metadata())
            handle = parent.transport.write(child.name, runs_to(parent, child, (0, 0, BUFFER_BYTES)), b"sum")
            assert finish(parent, handle, parent) is PostState.DONE
            parent.transport.release(handle)
            wait_until(lambda: bool(parent.inbox), parent)
            assert parent.payloads() == [b"sum %d" % zlib.crc32(parent.buffer.tobytes())]
            parent.inbox.clear()
            os.kill(child.process.pid, signal.SIGKILL)
            child.process.wait()
    parent.transport.close()


def test_disconnect_keeps_a_transfer_in_flight_until_it_has_ended(monkeypatch):
    """A11: the peer is forgotten only when nothing reads the source any more."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    parent = Agent("parent", size=1 << 26)
    parent.buffer[:] = 1
    with spawned("child", 1 << 26) as child:
        parent.connect(child)
        parent.transport.send(child.name, b"metadata " + parent.transport.local_metadata())
        parent.transport.send(child.name, b"sum")
        wait_until(lambda: bool(parent.inbox), parent)
        parent.inbox.clear()
        os.kill(child.process.pid, signal.SIGSTOP)
        handle = parent.transport.write(child.name, runs_to(parent, child, (0, 0, 1 << 26)))
        parent.transport.disconnect(child.name)
        assert parent.transport.poll(handle) is PostState.IN_FLIGHT
        with pytest.raises(TransportError, match="not connected"):
            parent.transport.send(child.name, b"sum")
        os.kill(child.process.pid, signal.SIGCONT)
        assert finish(parent, handle, parent) is PostState.DONE
        parent.transport.release(handle)
        with pytest.raises(TransportError, match="not connected"):
            parent.transport.send(child.name, b"sum")
        parent.connect(child)
        parent.transport.send(child.name, b"sum")
        wait_until(lambda: bool(parent.inbox), parent)
        assert parent.payloads() == [b"sum %d" % zlib.crc32(parent.buffer.tobytes())]
    parent.transport.close()
