from __future__ import annotations

import threading
from random import Random

import pytest

from kvferry.ids import PeerName
from kvferry.transport.owner import ThreadOwner
from kvferry.transport.wire import Event, Traffic, Wire

A_TO_B = (PeerName("a"), PeerName("b"))
B_TO_A = A_TO_B[::-1]


def filled(*events: tuple[float, str], traffic: Traffic = Traffic.MESSAGES) -> tuple[Wire, list[str]]:
    wire, landed = Wire(Random(1)), []
    for due, name in events:
        wire.push(Event(due, A_TO_B, traffic, lambda name=name: landed.append(name)))
    return wire, landed


def land(wire: Wire, now: float) -> None:
    while (event := wire.pop_due(now)) is not None:
        event.action()


def test_events_land_when_they_are_due():
    wire, landed = filled((2.0, "late"), (1.0, "early"), traffic=Traffic.POSTS)
    assert wire.next_due() == 1.0
    land(wire, 1.5)
    assert landed == ["early"]
    assert wire.next_due() == 2.0
    land(wire, 2.0)
    assert landed == ["early", "late"]
    assert wire.next_due() is None


def test_messages_of_a_link_never_pass_each_other():
    wire, landed = filled((5.0, "first"), (1.0, "second"), (5.0, "third"))
    land(wire, 4.9)
    assert landed == []
    land(wire, 5.0)
    assert landed == ["first", "second", "third"]


def test_the_other_direction_is_another_link():
    wire, landed = filled((5.0, "slow"))
    wire.push(Event(1.0, B_TO_A, Traffic.MESSAGES, lambda: landed.append("back")))
    land(wire, 1.0)
    assert landed == ["back"]


def test_blocked_events_wait_and_keep_their_order():
    wire, landed = filled((1.0, "first"), (2.0, "second"))
    wire.block(A_TO_B, Traffic.MESSAGES, "hold")
    wire.push(Event(3.0, A_TO_B, Traffic.MESSAGES, lambda: landed.append("third")))
    assert wire.next_due() is None
    assert len(wire) == 3
    wire.unblock(A_TO_B, Traffic.MESSAGES, "hold", now=9.0)
    assert wire.next_due() == 9.0
    land(wire, 9.0)
    assert landed == ["first", "second", "third"]


def test_a_link_is_blocked_until_every_reason_is_gone():
    wire, landed = filled((1.0, "held"))
    for reason in ("hold", "cut", "cut"):
        wire.block(A_TO_B, Traffic.MESSAGES, reason)
    wire.unblock(A_TO_B, Traffic.MESSAGES, "hold", now=1.0)
    land(wire, 9.0)
    assert landed == []
    wire.unblock(A_TO_B, Traffic.MESSAGES, "cut", now=1.0)
    land(wire, 9.0)
    assert landed == ["held"]


def test_unblocking_a_free_link_changes_nothing():
    wire, landed = filled((1.0, "free"))
    wire.unblock(A_TO_B, Traffic.POSTS, "hold", now=0.0)
    land(wire, 1.0)
    assert landed == ["free"]


def test_the_first_thread_owns_and_no_other_enters():
    """A10: ownership is taken by the first call, not by the constructor."""
    owner = ThreadOwner("transport x")
    first = threading.Thread(target=owner.check)
    first.start()
    first.join()
    with pytest.raises(AssertionError, match="transport x belongs to thread"):
        owner.check()
