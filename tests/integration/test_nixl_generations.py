"""NIXL agents of several processes that start together, die, and come back: over TCP, as between hosts."""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import numpy as np
import pytest

from kvferry.errors import PeerLostError
from kvferry.ids import PeerName
from kvferry.layout.runs import Region, Runs
from kvferry.transport.base import Handle, PostState
from kvferry.transport.nixl import NixlTransport
from tests.support.nixl_peer import ProcessPeer, spawned

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SIZE = 1 << 20
WAIT_SECONDS = 30.0


@pytest.fixture(autouse=True)
def _over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory would hide what only a connection can show."""
    monkeypatch.setenv("UCX_TLS", "tcp")


class Survivor:
    """Our own process's agent, with one buffer."""

    def __init__(self, name: str = "survivor") -> None:
        self.buffer = np.zeros(SIZE, dtype=np.uint8)
        self.transport = NixlTransport(PeerName(name))
        self.transport.register([Region(int(self.buffer.ctypes.data), SIZE)])
        self.arrived: list[bytes] = []

    def wait(self, condition: Callable[[], object]) -> None:
        """Make progress until something holds."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "nothing came of it"
            self.arrived += [message.payload for message in self.transport.receive()]

    def post(self, peer: ProcessPeer, notify: bytes | None = None, size: int = SIZE) -> Handle:
        """Post a write of the buffer's beginning."""
        numbers = (int(self.buffer.ctypes.data), peer.address, size)
        return self.transport.write(
            peer.name, Runs(*(np.array([one], dtype=np.uint64) for one in numbers)), notify
        )

    def end(self, handle: Handle) -> PostState:
        """Poll a post to its end and release it."""
        self.wait(lambda: self.transport.poll(handle) is not PostState.IN_FLIGHT)
        state = self.transport.poll(handle)
        self.transport.release(handle)
        return state

    def exchange(self, peer: ProcessPeer, fill: int) -> None:
        """Meet a peer, write into it, and have it say what has arrived."""
        self.transport.connect(peer.name, peer.metadata)
        self.buffer[:] = fill
        self.transport.send(peer.name, b"metadata " + self.transport.local_metadata())
        assert self.end(self.post(peer, b"sum")) is PostState.DONE
        self.wait(lambda: self.arrived)
        assert self.arrived == [b"sum %d" % zlib.crc32(self.buffer.tobytes())]
        self.arrived.clear()


@pytest.fixture
def survivor() -> Iterator[Survivor]:
    survivor = Survivor()
    yield survivor
    survivor.transport.close()


def kill(peer: ProcessPeer) -> None:
    os.kill(peer.process.pid, signal.SIGKILL)
    peer.process.wait()


@contextmanager
def started(*names: str) -> Iterator[list[ProcessPeer]]:
    """Peers that are started at the same moment."""
    with ExitStack() as stack, ThreadPoolExecutor(len(names)) as threads:
        starts = [threads.submit(stack.enter_context, spawned(name, SIZE)) for name in names]
        yield [start.result(WAIT_SECONDS) for start in starts]


def test_a_replacement_is_met_while_the_connection_to_the_dead_one_breaks(survivor: Survivor) -> None:
    """A01: twice a peer dies under writes, and its replacement's metadata is loaded before the dead one's end
    has been polled. The survivor lives, the writes fail as lost, the replacement is served."""
    with started("life-0", "life-1", "life-2") as lives:
        survivor.exchange(lives[0], 1)
        for life, (peer, replacement) in enumerate(pairwise(lives)):
            os.kill(peer.process.pid, signal.SIGSTOP)
            handles = [survivor.post(peer) for _ in range(4)]
            kill(peer)
            survivor.exchange(replacement, 10 + life)
            for handle in handles:
                survivor.wait(
                    lambda handle=handle: survivor.transport.poll(handle) is not PostState.IN_FLIGHT
                )
                assert isinstance(survivor.transport.failure(handle), PeerLostError)
                survivor.transport.release(handle)
            survivor.transport.disconnect(peer.name)
            survivor.exchange(replacement, 20 + life)


def test_a_peer_that_is_stopped_in_good_order_and_started_again_is_added(survivor: Survivor) -> None:
    """A02, A03: back under its old name, while the connection to what it was is still known here."""
    with spawned("p", SIZE) as peer:
        survivor.exchange(peer, 7)
        survivor.transport.send(peer.name, b"quit")
        survivor.wait(lambda: peer.process.poll() is not None)
    with spawned("p", SIZE) as peer:
        survivor.exchange(peer, 8)


@pytest.mark.parametrize(
    "cycles", [100, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_a_peer_is_removed_and_added_again_many_times(survivor: Survivor, cycles: int) -> None:
    """A08: remove, add, transfer, back to back and to another process: not one failure."""
    with spawned("other", SIZE) as peer:
        survivor.exchange(peer, 5)
        for cycle in range(cycles):
            survivor.transport.disconnect(peer.name)
            survivor.transport.connect(peer.name, peer.metadata)
            survivor.buffer[:4096] = cycle % 251
            assert survivor.end(survivor.post(peer, size=4096)) is PostState.DONE
        survivor.transport.send(peer.name, b"sum")
        survivor.wait(lambda: survivor.arrived)
        assert survivor.arrived == [b"sum %d" % zlib.crc32(survivor.buffer.tobytes())]


def test_two_agents_that_start_at_the_same_moment_both_start(survivor: Survivor) -> None:
    """A18: two processes at once on one host; then each exchanges bytes with a third."""
    with started("a", "b") as peers:
        for fill, peer in enumerate(peers):
            survivor.exchange(peer, 1 + fill)
