"""Slices in flight: each has one end, is released once and only then, and says who is gone."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec
import pytest

from kvferry.agent.posting import Posts
from kvferry.agent.stats import Stats
from kvferry.errors import PeerLostError, TransportError
from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.layout.plan import CopyPlan, plan
from kvferry.protocol.messages import Written
from kvferry.protocol.outputs import PostSlice
from kvferry.transport.base import PostState
from tests.support.ranks import World

D = PeerName("d")


@dataclass
class Native:
    """A transport whose one post is in the state that the test says."""

    state: PostState = PostState.IN_FLIGHT
    error: TransportError | None = None
    refusal: TransportError | None = None
    released: list[int] = field(default_factory=list)

    def write(self, peer: PeerName, runs: object, notify: bytes) -> int:
        if self.refusal is not None:
            raise self.refusal
        return 7

    def poll(self, handle: int) -> PostState:
        assert handle not in self.released
        return self.state

    def failure(self, handle: int) -> TransportError | None:
        return self.error

    def release(self, handle: int) -> None:
        assert self.state is not PostState.IN_FLIGHT, "released in flight"
        assert handle not in self.released
        self.released.append(handle)


@dataclass
class Sink:
    ends: list[tuple[int, str, bool | None]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def handle_slice_done(self, number: int, now: float) -> None:
        self.ends.append((number, "", None))
        self.times.append(now)

    def handle_slice_failed(self, number: int, reason: str, now: float, *, retryable: bool) -> None:
        self.ends.append((number, reason, retryable))


def joint() -> CopyPlan:
    world = World()
    [one], [another] = world.engine("P", 1), world.engine("D", 2)
    return plan(one.cache, another.cache)


def piece(source: int = 1) -> PostSlice:
    t, c = TransferId("transfer-0001"), ConsumerId("r")
    return PostSlice(
        slice=5,
        peer=D,
        transfer=t,
        consumer=c,
        start=0,
        stop=16,
        source_blocks=(array("q", [source]),),
        target_blocks=(array("q", [2]),),
        notify=Written(transfer=t, consumer=c, start=0, stop=16),
        early=False,
    )


def posts_over(native: Native) -> tuple[Posts, Sink]:
    sink = Sink()
    return Posts(native, sink, Stats(), lambda message: b"written"), sink  # type: ignore[arg-type]


def test_a_slice_is_released_once_and_after_its_end() -> None:
    """A11: nothing is freed under what still moves."""
    native = Native()
    posts, sink = posts_over(native)
    assert posts.post(piece(), joint(), lambda: 0.0) is None
    assert posts.poll(lambda: 1.0) == []
    assert (native.released, sink.ends, posts.peers(), len(posts)) == ([], [], {D}, 1)
    native.state = PostState.DONE
    assert posts.poll(lambda: 2.0) == []
    assert posts.poll(lambda: 3.0) == []
    assert (native.released, sink.ends, posts.peers()) == ([7], [(5, "", None)], set())


def test_a_slice_of_nothing_is_a_message_alone() -> None:
    """A rank that holds only windows has nothing to write of early tokens, and says so in their order."""
    sent: list[tuple[PeerName, bytes]] = []
    native = Native()
    native.send = lambda peer, payload: sent.append((peer, payload))  # type: ignore[attr-defined]
    posts, sink = posts_over(native)
    nothing = msgspec.structs.replace(piece(), source_blocks=(array("q"),), target_blocks=(array("q"),))
    assert posts.post(nothing, joint(), lambda: 0.0) is None
    assert (sent, sink.ends, len(posts)) == ([(D, b"written")], [(5, "", None)], 0)


@pytest.mark.parametrize(
    ("error", "reason", "retryable", "lost"),
    [
        (TransportError("broke", retryable=True), "broke", True, []),
        (TransportError("never"), "never", False, []),
        (PeerLostError("gone"), "peer_lost: gone", False, [(D, "gone")]),
        (None, "the transfer failed", False, []),
    ],
)
def test_a_failed_slice_says_whether_to_try_again_and_who_is_gone(error, reason, retryable, lost) -> None:
    """P46, A25: failed is never done."""
    native = Native()
    posts, sink = posts_over(native)
    posts.post(piece(), joint(), lambda: 0.0)
    native.state, native.error = PostState.FAILED, error
    assert posts.poll(lambda: 1.0) == lost
    assert sink.ends == [(5, reason, retryable)]
    assert native.released == [7]


@pytest.mark.parametrize(
    ("error", "reason", "retryable"),
    [
        (TransportError("busy", retryable=True), "busy", True),
        (TransportError("never"), "never", False),
        (PeerLostError("gone"), "peer_lost: gone", False),
    ],
)
def test_a_refused_slice_has_ended_too(error, reason, retryable) -> None:
    """P03: each planned write has exactly one end, that of a post which never began included."""
    posts, sink = posts_over(Native(refusal=error))
    assert posts.post(piece(), joint(), lambda: 0.0) is (error if isinstance(error, PeerLostError) else None)
    assert sink.ends == [(5, reason, retryable)]
    assert len(posts) == 0


def test_a_block_outside_the_cache_fails_its_slice_alone() -> None:
    """V01, V08: block ids come from peers; a bad one is that transfer's end and not the agent's."""
    posts, sink = posts_over(Native())
    assert posts.post(piece(source=10**6), joint(), lambda: 0.0) is None
    [(number, reason, retryable)] = sink.ends
    assert (number, retryable) == (5, False)
    assert "block" in reason
    assert len(posts) == 0


@dataclass
class Moving:
    """A transport whose posts have ended when they return; each has a handle of its own."""

    polled: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    handles: int = 0

    def write(self, peer: PeerName, runs: object, notify: bytes) -> int:
        self.handles += 1
        return self.handles

    def poll(self, handle: int) -> PostState:
        self.polled.append(handle)
        return PostState.DONE

    def release(self, handle: int) -> None:
        self.released.append(handle)


def test_a_slice_that_ends_in_its_post_is_told_at_once_with_the_time_of_its_end() -> None:
    sink = Sink()
    posts = Posts(Moving(), sink, Stats(), lambda message: b"written")  # type: ignore[arg-type]
    assert posts.post(piece(), joint(), lambda: 3.0) is None
    assert sink.times == [3.0]
    assert (sink.ends, len(posts), posts.peers()) == ([(5, "", None)], 0, set())


def test_a_peer_that_is_gone_in_the_post_is_named_at_once() -> None:
    gone = PeerLostError("gone")
    native = Native(PostState.FAILED, gone)
    posts, sink = posts_over(native)
    assert posts.post(piece(), joint(), lambda: 0.0) is gone
    assert sink.ends == [(5, "peer_lost: gone", False)]
    assert (native.released, len(posts)) == ([7], 0)
