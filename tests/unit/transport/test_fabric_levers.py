"""Levers of the memory fabric that simulated worlds pull, and the listeners that they watch by."""

from __future__ import annotations

import pytest

from kvferry.errors import PeerLostError, TransportError
from kvferry.transport.base import PostState
from kvferry.transport.memory import FabricLimits, Link, MessageFault, PostFault
from kvferry.transport.seen import Carried, Delivered, Ended
from tests.support.fabric import Rig, runs_between

WHOLE = (0, 0, 4096)


def write(rig: Rig, notify: bytes | None = None) -> int:
    return rig.a.transport.write(rig.b.name, runs_between(rig.a, rig.b, WHOLE), notify)


def test_a_post_that_fails_for_good_moves_nothing_and_is_not_to_be_tried_again():
    rig = Rig()
    rig.fabric.inject(rig.a.name, rig.b.name, PostFault.FAIL)
    with pytest.raises(TransportError) as caught:
        write(rig)
    assert not caught.value.retryable
    assert not isinstance(caught.value, PeerLostError)
    assert rig.fabric.under_way() == 0
    assert rig.a.transport.poll(write(rig)) is PostState.DONE


def test_a_late_post_lands_late_and_within_the_retry_bound():
    rig = Rig(limits=FabricLimits(retry_bound_seconds=3.0))
    rig.fabric.set_all_links(Link(delay_seconds=2.0))
    rig.fabric.inject(rig.a.name, rig.b.name, PostFault.DELAY)
    handle = write(rig)
    rig.clock.advance(1.9)
    assert rig.a.transport.poll(handle) is PostState.IN_FLIGHT
    assert rig.b.buffer[0] == 2
    rig.clock.advance(0.2)
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert rig.b.buffer[0] == 1
    rig.fabric.set_all_links(Link(delay_seconds=100.0))
    rig.fabric.inject(rig.a.name, rig.b.name, PostFault.DELAY)
    handle = write(rig)
    rig.clock.advance(3.0)
    assert rig.a.transport.poll(handle) is PostState.DONE


def test_what_a_partition_held_up_beyond_the_retry_bound_never_lands():
    """Whoever carried it has given up, polled or not."""
    rig = Rig(limits=FabricLimits(retry_bound_seconds=3.0))
    rig.fabric.cut(rig.a.name, rig.b.name)
    old = write(rig)
    rig.clock.advance(2.0)
    young = rig.a.transport.write(rig.b.name, runs_between(rig.a, rig.b, (8192, 8192, 64)))
    rig.clock.advance(1.0)
    rig.fabric.heal(rig.a.name, rig.b.name)
    assert rig.a.transport.poll(young) is PostState.DONE
    assert rig.a.transport.poll(old) is PostState.FAILED
    assert rig.b.buffer[0] == 2
    assert rig.b.buffer[8192] == 1


def test_a_stalled_transfer_ends_when_its_peer_is_disconnected():
    rig = Rig()
    rig.fabric.inject(rig.a.name, rig.b.name, PostFault.STALL)
    handle = write(rig)
    rig.clock.advance(1000.0)
    assert rig.a.transport.poll(handle) is PostState.IN_FLIGHT
    rig.a.transport.disconnect(rig.b.name)
    assert rig.a.transport.poll(handle) is PostState.FAILED
    assert rig.b.buffer[0] == 2


def test_a_connection_dies_at_one_end_and_what_the_other_end_posted_still_lands():
    rig = Rig(auto_advance=False)
    from_a = write(rig)
    from_b = rig.b.transport.write(rig.a.name, runs_between(rig.b, rig.a, (8192, 8192, 64)))
    assert rig.fabric.break_connection(rig.a.name, rig.b.name)
    rig.fabric.land_due()
    assert rig.b.buffer[0] == 2, "what the broken end had posted does not land"
    assert rig.a.buffer[8192] == 2, "what the other end had posted does"
    assert rig.b.transport.poll(from_b) is PostState.DONE
    assert rig.a.transport.poll(from_a) is PostState.FAILED
    assert isinstance(rig.a.transport.failure(from_a), PeerLostError)
    with pytest.raises(PeerLostError):
        rig.a.transport.send(rig.b.name, b"hello")
    rig.b.transport.send(rig.a.name, b"I noticed nothing")
    rig.fabric.land_due()
    assert rig.a.payloads() == [b"I noticed nothing"]


def test_a_broken_connection_is_made_anew_by_connecting():
    rig = Rig()
    assert rig.fabric.break_connection(rig.a.name, rig.b.name)
    assert not rig.fabric.break_connection(rig.a.name, rig.b.name), "it is broken already"
    rig.a.transport.connect(rig.b.name, rig.b.transport.local_metadata())
    rig.a.transport.send(rig.b.name, b"back")
    assert rig.b.payloads() == [b"back"]


def test_pieces_are_as_many_as_the_fabric_says():
    rig = Rig(limits=FabricLimits(pieces_max=3), auto_advance=False)
    write(rig)
    assert rig.fabric.land_due() == 3
    assert (rig.b.buffer[:4096] == 1).all()


def test_the_end_of_a_transfer_is_told_once_and_when_its_initiator_sees_it():
    rig = Rig(auto_advance=False)
    seen: list[Ended] = []
    rig.fabric.listeners.ended.append(seen.append)
    done = write(rig)
    rig.fabric.land_due()
    assert seen == []
    for _ in range(2):
        rig.a.transport.poll(done)
    rig.fabric.inject(rig.a.name, rig.b.name, PostFault.BREAK)
    broken = write(rig)
    rig.fabric.land_due()
    rig.a.transport.poll(broken)
    assert [(one.handle, one.state) for one in seen] == [(done, PostState.DONE), (broken, PostState.FAILED)]


def test_progress_names_whoever_would_find_something():
    rig = Rig(auto_advance=False)
    seen: list[str] = []
    rig.fabric.listeners.progress.append(seen.append)
    write(rig)
    assert seen == []
    rig.fabric.land_due()
    assert seen == [rig.a.name], "the last piece has landed: its initiator may poll"
    rig.a.transport.send(rig.b.name, b"hello")
    rig.fabric.land_due()
    assert seen == [rig.a.name, rig.b.name]
    rig.fabric.break_connection(rig.a.name, rig.b.name)
    assert seen[2:] == [rig.a.name]


def test_each_message_is_told_when_it_is_taken_and_each_copy_when_it_ends():
    rig = Rig(auto_advance=False)
    sent: list[Carried] = []
    ended: list[Delivered] = []
    rig.fabric.listeners.carried.append(sent.append)
    rig.fabric.listeners.delivered.append(ended.append)
    rig.fabric.inject(rig.a.name, rig.b.name, MessageFault.LOSE, MessageFault.DOUBLE)
    for payload in (b"lost", b"twice"):
        rig.a.transport.send(rig.b.name, payload)
    rig.fabric.land_due()
    assert [(one.number, one.payload) for one in sent] == [(1, b"lost"), (2, b"twice")]
    assert [(one.number, one.arrived) for one in ended] == [(1, False), (2, True), (2, True)]
