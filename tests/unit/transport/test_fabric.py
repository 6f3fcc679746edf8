from __future__ import annotations

import threading
from random import Random

import numpy as np
import pytest

from kvferry.errors import PeerLostError, TransportError, UsageError
from kvferry.transport.base import PostState
from kvferry.transport.memory import FabricLimits, Link, MemoryFabric, MessageFault, PostFault, Traffic
from tests.support.fabric import BUFFER_BYTES, Member, Rig, runs_between

WHOLE = (0, 0, 4096)


def write_whole(rig: Rig, notify: bytes | None = None) -> int:
    return rig.a.transport.write(rig.b.name, runs_between(rig.a, rig.b, WHOLE), notify)


# --- what lands when -------------------------------------------------------------------------------


def test_a_write_reads_its_source_when_it_lands_not_when_it_is_posted():
    rig = Rig()
    rig.fabric.hold(rig.a.name, rig.b.name)
    handle = write_whole(rig)
    rig.a.buffer[:] = 9
    rig.fabric.release(rig.a.name, rig.b.name)
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert (rig.b.buffer[:4096] == 9).all()


def test_a_read_reads_its_source_when_it_lands():
    rig = Rig()
    rig.fabric.hold(rig.b.name, rig.a.name)
    handle = rig.a.transport.read(rig.b.name, runs_between(rig.b, rig.a, WHOLE))
    rig.b.buffer[:] = 9
    rig.fabric.release(rig.b.name, rig.a.name)
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert (rig.a.buffer[:4096] == 9).all()


def test_pieces_land_one_by_one_in_an_order_that_the_seed_decides():
    def order(seed: int) -> list[int]:
        rig = Rig(seed, auto_advance=False)
        seen: list[int] = []
        rig.fabric.on_land(lambda landing: seen.extend((landing.runs.target - rig.b.address).tolist()))
        handle = rig.a.transport.write(
            rig.b.name, runs_between(rig.a, rig.b, *((at, at, 64) for at in range(0, 4096, 64)))
        )
        while rig.fabric.land_due(1):
            pass
        assert rig.a.transport.poll(handle) is PostState.DONE
        return seen

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != sorted(order(1))
    assert sorted(order(1)) == list(range(0, 4096, 64))


def test_one_long_run_is_cut_into_pieces_that_cover_it_once():
    rig = Rig(auto_advance=False)
    sizes: list[int] = []
    rig.fabric.on_land(lambda landing: sizes.append(landing.runs.bytes))
    write_whole(rig)
    rig.fabric.land_due(1)
    assert 0 < (rig.b.buffer[:4096] == 1).sum() < 4096
    rig.fabric.land_due()
    assert sum(sizes) == 4096
    assert (rig.b.buffer[:4096] == 1).all()


def test_a_write_lands_after_its_target_forgot_it():
    """P02: the target's engine may give the blocks away; a posted write lands all the same."""
    rig = Rig(auto_advance=False)
    rig.fabric.set_link(rig.a.name, rig.b.name, Link(latency_seconds=60.0))
    write_whole(rig)
    rig.b.buffer[:] = 7
    rig.clock.advance(60.0)
    rig.fabric.land_due()
    assert (rig.b.buffer[:4096] == 1).all()


def test_stepwise_advance_lands_only_what_is_due():
    rig = Rig(auto_advance=False)
    rig.fabric.set_link(rig.a.name, rig.b.name, Link(latency_seconds=0.5))
    assert rig.fabric.next_due() is None
    handle = write_whole(rig, b"done")
    assert rig.fabric.next_due() == 100.5
    assert rig.fabric.land_due() == 0
    rig.clock.now = 100.5
    assert rig.fabric.land_due() == FabricLimits().pieces_max
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert rig.fabric.next_due() == 101.0
    assert rig.b.payloads() == []
    rig.clock.now = 101.0
    assert rig.fabric.land_due() == 1
    assert rig.b.payloads() == [b"done"]


def test_listeners_learn_who_wrote_what_when():
    rig = Rig()
    posts, landings = [], []
    rig.fabric.on_post(posts.append)
    rig.fabric.on_land(landings.append)
    handle = write_whole(rig)
    rig.clock.advance(2.0)
    rig.a.transport.poll(handle)
    assert [(post.at_seconds, post.initiator, post.owner, post.handle) for post in posts] == [
        (100.0, "a", "b", handle)
    ]
    assert {(one.at_seconds, one.initiator, one.owner, one.handle) for one in landings} == {
        (102.0, "a", "b", handle)
    }
    touched = np.zeros(BUFFER_BYTES, dtype=int)
    for landing in landings:
        for target, length in zip(landing.runs.target.tolist(), landing.runs.length.tolist(), strict=True):
            touched[target - rig.b.address : target - rig.b.address + length] += 1
    assert (touched[:4096] == 1).all()
    assert not touched[4096:].any()


# --- faults ----------------------------------------------------------------------------------------


def test_a_refused_post_moves_nothing_and_the_next_works():
    rig = Rig()
    rig.fabric.inject(rig.a.name, rig.b.name, PostFault.REFUSE)
    with pytest.raises(TransportError) as caught:
        write_whole(rig)
    assert caught.value.retryable
    assert rig.fabric.under_way() == 0
    assert rig.a.transport.poll(write_whole(rig)) is PostState.DONE


def test_a_broken_post_fails_for_good_after_a_part_landed():
    """A14: a part of the bytes is there, the failure is told, and nothing more lands."""
    outcomes = set()
    for seed in range(8):
        rig = Rig(seed)
        rig.fabric.inject(rig.a.name, rig.b.name, PostFault.BREAK)
        handle = write_whole(rig, b"never")
        assert rig.a.transport.poll(handle) is PostState.FAILED
        error = rig.a.transport.failure(handle)
        assert error is not None
        assert not isinstance(error, PeerLostError)
        landed = int((rig.b.buffer[:4096] == 1).sum())
        assert landed < 4096
        outcomes.add(landed)
        rig.clock.advance(1000.0)
        assert rig.a.transport.poll(handle) is PostState.FAILED
        assert int((rig.b.buffer[:4096] == 1).sum()) == landed
        assert rig.b.payloads() == []
    assert len(outcomes) > 2


def test_a_stalled_post_never_ends_while_its_connection_stands():
    rig = Rig(disconnect_fences=True)
    rig.fabric.inject(rig.a.name, rig.b.name, PostFault.STALL)
    handle = write_whole(rig)
    rig.clock.advance(10_000.0)
    assert rig.a.transport.poll(handle) is PostState.IN_FLIGHT
    assert rig.a.transport.failure(handle) is None
    rig.a.transport.disconnect(rig.b.name)
    assert rig.a.transport.poll(handle) is PostState.FAILED


def test_messages_are_lost_doubled_and_delayed_on_request():
    rig = Rig()
    rig.fabric.set_link(rig.a.name, rig.b.name, Link(delay_seconds=3.0, overtaking=True))
    rig.fabric.inject(rig.a.name, rig.b.name, MessageFault.LOSE, MessageFault.DOUBLE, MessageFault.DELAY)
    for payload in (b"lost", b"twice", b"late", b"plain"):
        rig.a.transport.send(rig.b.name, payload)
    assert sorted(rig.b.payloads()) == [b"plain", b"twice", b"twice"]
    rig.clock.advance(3.0)
    assert rig.b.payloads() == [b"late"]


def test_a_lost_notification_does_not_change_the_transfer():
    """A13: the initiator knows that it is done; the target hears nothing."""
    rig = Rig()
    rig.fabric.inject(rig.a.name, rig.b.name, MessageFault.LOSE)
    assert rig.a.transport.poll(write_whole(rig, b"written")) is PostState.DONE
    assert rig.b.payloads() == []
    assert (rig.b.buffer[:4096] == 1).all()


@pytest.mark.parametrize(
    ("link", "overtaken"), [(Link(jitter_seconds=1), False), (Link(jitter_seconds=1, overtaking=True), True)]
)
def test_messages_of_one_link_keep_their_order_unless_told_otherwise(link, overtaken):
    rig = Rig()
    rig.fabric.set_link(rig.a.name, rig.b.name, link)
    sent = [bytes([number]) for number in range(20)]
    for payload in sent:
        rig.a.transport.send(rig.b.name, payload)
    rig.clock.advance(1.0)
    arrived = rig.b.payloads()
    assert sorted(arrived) == sent
    assert (arrived != sent) is overtaken


def test_messages_of_different_peers_overtake_each_other():
    rig = Rig()
    rig.fabric.set_all_links(Link(jitter_seconds=1.0))
    c = Member(rig.fabric, "c")
    c.meet(rig.b)
    for number in range(10):
        rig.a.transport.send(rig.b.name, b"a%d" % number)
        c.transport.send(rig.b.name, b"c%d" % number)
    rig.clock.advance(1.0)
    arrived = rig.b.payloads()
    sent = [b"%s%d" % (who, number) for number in range(10) for who in (b"a", b"c")]
    assert arrived != sent
    assert sorted(arrived) == sorted(sent)


def test_fault_rates_are_drawn_from_the_seed():
    def outcome(seed: int) -> list[str]:
        rig = Rig(seed)
        rig.fabric.set_all_links(Link(refuse_rate=0.2, break_rate=0.2, lose_rate=0.2, double_rate=0.2))
        states = []
        for number in range(40):
            try:
                handle = write_whole(rig, b"%d" % number)
            except TransportError:
                states.append("refused")
                continue
            states.append(rig.a.transport.poll(handle).value)
        return states + [payload.decode() for payload in rig.b.payloads()]

    assert outcome(3) == outcome(3)
    assert outcome(3) != outcome(4)
    assert {"refused", "failed", "done"} <= set(outcome(3))


@pytest.mark.parametrize("field", ["latency_seconds", "lose_rate", "delay_seconds"])
def test_a_link_with_an_impossible_value_is_refused(field):
    with pytest.raises(UsageError, match=field):
        Link(**{field: -0.5})
    with pytest.raises(UsageError, match="stall_rate"):
        Link(stall_rate=1.5)


# --- holding and cutting ---------------------------------------------------------------------------


def test_posts_and_messages_are_held_apart():
    rig = Rig()
    rig.fabric.hold(rig.a.name, rig.b.name, Traffic.POSTS)
    handle = write_whole(rig)
    rig.a.transport.send(rig.b.name, b"message")
    assert rig.b.payloads() == [b"message"]
    assert rig.a.transport.poll(handle) is PostState.IN_FLIGHT
    rig.fabric.hold(rig.a.name, rig.b.name, Traffic.MESSAGES)
    rig.fabric.release(rig.a.name, rig.b.name, Traffic.POSTS)
    rig.a.transport.send(rig.b.name, b"held")
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert rig.b.payloads() == []
    rig.fabric.release(rig.a.name, rig.b.name)
    assert rig.b.payloads() == [b"held"]


def test_a_cut_is_one_way_loses_messages_and_lets_posts_go_on_after_it():
    rig = Rig()
    rig.fabric.cut(rig.a.name, rig.b.name)
    handle = write_whole(rig)
    rig.a.transport.send(rig.b.name, b"lost")
    rig.b.transport.send(rig.a.name, b"fine")
    assert rig.b.payloads() == []
    assert rig.a.payloads() == [b"fine"]
    assert rig.a.transport.poll(handle) is PostState.IN_FLIGHT
    rig.fabric.heal(rig.a.name, rig.b.name)
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert rig.b.payloads() == []


def test_a_post_over_a_cut_link_fails_at_the_retry_bound_and_lands_no_more():
    """A25: an outage within the bound is ridden out, a longer one ends the transfer."""
    rig = Rig(limits=FabricLimits(retry_bound_seconds=5.0))
    rig.fabric.cut(rig.a.name, rig.b.name)
    handle = write_whole(rig)
    rig.clock.advance(4.9)
    assert rig.a.transport.poll(handle) is PostState.IN_FLIGHT
    rig.clock.advance(0.1)
    assert rig.a.transport.poll(handle) is PostState.FAILED
    rig.fabric.heal(rig.a.name, rig.b.name)
    rig.fabric.land_due()
    assert (rig.b.buffer == 2).all()


def test_without_the_way_back_bytes_land_but_the_initiator_cannot_know():
    rig = Rig()
    rig.fabric.cut(rig.b.name, rig.a.name)
    handle = write_whole(rig, b"written")
    assert rig.a.transport.poll(handle) is PostState.IN_FLIGHT
    assert (rig.b.buffer[:4096] == 1).all()
    rig.fabric.heal(rig.b.name, rig.a.name)
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert rig.b.payloads() == [b"written"]


# --- death and return ------------------------------------------------------------------------------


def test_a_killed_peer_is_lost_on_send_write_and_poll():
    rig = Rig()
    rig.fabric.hold(rig.a.name, rig.b.name)
    handle = write_whole(rig)
    rig.fabric.kill(rig.b.name)
    with pytest.raises(PeerLostError):
        rig.a.transport.send(rig.b.name, b"x")
    with pytest.raises(PeerLostError):
        write_whole(rig)
    assert rig.a.transport.poll(handle) is PostState.FAILED
    assert isinstance(rig.a.transport.failure(handle), PeerLostError)
    rig.fabric.release(rig.a.name, rig.b.name)
    rig.fabric.land_due()
    assert (rig.b.buffer == 2).all()
    with pytest.raises(UsageError, match="was killed"):
        rig.b.transport.receive()
    rig.b.transport.close()


def test_a_death_goes_unnoticed_for_as_long_as_told():
    rig = Rig(limits=FabricLimits(retry_bound_seconds=60.0))
    rig.fabric.kill(rig.b.name, noticed_after_seconds=2.0)
    rig.a.transport.send(rig.b.name, b"vanishes")
    handle = write_whole(rig)
    assert rig.a.transport.poll(handle) is PostState.IN_FLIGHT
    rig.clock.advance(2.0)
    assert rig.a.transport.poll(handle) is PostState.FAILED
    with pytest.raises(PeerLostError):
        rig.a.transport.send(rig.b.name, b"x")


def test_a_silent_death_ends_transfers_at_the_retry_bound():
    """P04: whatever dies silently, a transfer to it ends within the bound."""
    rig = Rig(limits=FabricLimits(retry_bound_seconds=5.0))
    rig.fabric.kill(rig.b.name, noticed_after_seconds=float("inf"))
    handle = write_whole(rig)
    rig.clock.advance(5.0)
    assert rig.a.transport.poll(handle) is PostState.FAILED


def test_writes_of_a_dead_initiator_may_land_until_the_target_is_told():
    """P02: a dead producer's posted write is quiet only once the transport says that it is lost."""
    rig = Rig(auto_advance=False)
    write_whole(rig)
    rig.fabric.kill(rig.a.name)
    rig.fabric.land_due(1)
    assert (rig.b.buffer == 1).any()
    before = rig.b.buffer.copy()
    with pytest.raises(PeerLostError):
        rig.b.transport.send(rig.a.name, b"are you there?")
    rig.fabric.land_due()
    assert np.array_equal(rig.b.buffer, before)


def test_a_told_death_also_quiets_what_was_posted_over_an_earlier_connection():
    rig = Rig(auto_advance=False)
    write_whole(rig)
    rig.a.transport.disconnect(rig.b.name)
    rig.a.transport.connect(rig.b.name, rig.b.transport.local_metadata())
    rig.fabric.kill(rig.a.name)
    with pytest.raises(PeerLostError):
        rig.b.transport.send(rig.a.name, b"are you there?")
    before = rig.b.buffer.copy()
    rig.fabric.land_due()
    assert np.array_equal(rig.b.buffer, before)


@pytest.mark.parametrize("fences", [True, False])
def test_disconnect_by_the_target_stops_writes_where_the_transport_can(fences):
    rig = Rig(disconnect_fences=fences)
    rig.fabric.hold(rig.a.name, rig.b.name)
    handle = write_whole(rig)
    rig.b.transport.disconnect(rig.a.name)
    rig.fabric.release(rig.a.name, rig.b.name)
    rig.fabric.land_due()
    assert bool((rig.b.buffer == 1).any()) is not fences
    assert rig.a.transport.poll(handle) is (PostState.FAILED if fences else PostState.DONE)
    if fences:
        with pytest.raises(PeerLostError, match="torn"):
            write_whole(rig)


@pytest.mark.parametrize("fences", [True, False])
def test_disconnect_by_the_initiator_recalls_a_write_only_where_the_transport_can(fences):
    """A11: without a fence the write goes on to read its source, and can be polled to its end."""
    rig = Rig(disconnect_fences=fences)
    rig.fabric.hold(rig.a.name, rig.b.name)
    handle = write_whole(rig)
    rig.a.transport.disconnect(rig.b.name)
    assert rig.a.transport.poll(handle) is (PostState.FAILED if fences else PostState.IN_FLIGHT)
    with pytest.raises(TransportError, match="not connected"):
        write_whole(rig)
    rig.fabric.release(rig.a.name, rig.b.name)
    assert rig.a.transport.poll(handle) is (PostState.FAILED if fences else PostState.DONE)
    assert bool((rig.b.buffer == 1).any()) is not fences


def test_connecting_anew_heals_a_torn_connection():
    """A07: a lost peer is dropped and met again; the next transfer works."""
    rig = Rig(disconnect_fences=True)
    rig.b.transport.disconnect(rig.a.name)
    with pytest.raises(PeerLostError):
        write_whole(rig)
    rig.a.transport.connect(rig.b.name, rig.b.transport.local_metadata())
    assert rig.a.transport.poll(write_whole(rig)) is PostState.DONE


def test_connecting_twice_with_the_same_metadata_keeps_what_is_in_flight():
    rig = Rig()
    rig.fabric.hold(rig.a.name, rig.b.name)
    handle = write_whole(rig)
    rig.a.transport.connect(rig.b.name, rig.b.transport.local_metadata())
    rig.fabric.release(rig.a.name, rig.b.name)
    assert rig.a.transport.poll(handle) is PostState.DONE


def test_a_peer_comes_back_under_a_new_name():
    rig = Rig()
    rig.fabric.kill(rig.b.name)
    reborn = Member(rig.fabric, "b2", fill=3)
    reborn.meet(rig.a)
    handle = rig.a.transport.write(reborn.name, runs_between(rig.a, reborn, WHOLE))
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert (reborn.buffer[:4096] == 1).all()
    assert (rig.b.buffer == 2).all()


def test_old_metadata_never_reaches_a_peer_reborn_under_the_same_name():
    """A21: addresses of an earlier life are never used on the new one."""
    rig = Rig()
    old = rig.b.transport.local_metadata()
    rig.fabric.kill(rig.b.name)
    reborn = Member(rig.fabric, "b", fill=3)
    with pytest.raises(PeerLostError):
        write_whole(rig)
    rig.a.transport.connect(reborn.name, old)
    with pytest.raises(PeerLostError):
        rig.a.transport.send(reborn.name, b"x")
    rig.a.transport.connect(reborn.name, reborn.transport.local_metadata())
    handle = rig.a.transport.write(reborn.name, runs_between(rig.a, reborn, WHOLE))
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert (reborn.buffer[:4096] == 1).all()


def test_many_cycles_of_connect_transfer_disconnect():
    """A08: back-to-back removal and addition of a peer never fails."""
    rig = Rig()
    metadata = rig.b.transport.local_metadata()
    for _ in range(200):
        rig.a.transport.connect(rig.b.name, metadata)
        handle = write_whole(rig, b"x")
        assert rig.a.transport.poll(handle) is PostState.DONE
        rig.a.transport.release(handle)
        rig.a.transport.disconnect(rig.b.name)
    assert len(rig.b.payloads()) == 200


def test_threads_share_a_fabric():
    clock = Rig().clock
    fabric = MemoryFabric(random=Random(5), clock=clock)
    hub = Member(fabric, "hub")
    metadata = hub.transport.local_metadata()
    finished: list[str] = []

    def work(number: int) -> None:
        member = Member(fabric, f"worker{number}", fill=number + 10)
        member.transport.connect(hub.name, metadata)
        for step in range(50):
            offset = number * 4096 + step * 64
            runs = runs_between(member, hub, (offset, offset, 64))
            handle = member.transport.write(hub.name, runs, b"%d" % number)
            while member.transport.poll(handle) is PostState.IN_FLIGHT:
                pass
            member.transport.release(handle)
        finished.append(member.name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(finished) == 4
    assert len(hub.payloads()) == 200
    for number in range(4):
        assert (hub.buffer[number * 4096 : number * 4096 + 3200] == number + 10).all()
