from __future__ import annotations

import threading

import numpy as np
import pytest

from kvferry.errors import PeerLostError, TransportError, UsageError
from kvferry.ids import PeerName
from kvferry.layout.runs import Region, Runs
from kvferry.transport.base import PostState, Transport
from kvferry.transport.memory import FabricLimits, MemoryTransport
from tests.support.fabric import BUFFER_BYTES, Member, Rig, runs_between


def test_it_implements_the_interface():
    transport: Transport = Rig().a.transport
    assert transport.name == "a"
    assert transport.notification_bytes_max == 64 << 10


def test_a_write_moves_exactly_its_runs():
    rig = Rig()
    rig.a.buffer[:] = np.arange(BUFFER_BYTES) % 251
    runs = runs_between(rig.a, rig.b, (0, 100, 1000), (5000, 30000, 7))
    handle = rig.a.transport.write(rig.b.name, runs)
    assert rig.a.transport.poll(handle) is PostState.DONE
    expected = np.full(BUFFER_BYTES, 2, dtype=np.uint8)
    expected[100:1100] = rig.a.buffer[:1000]
    expected[30000:30007] = rig.a.buffer[5000:5007]
    assert np.array_equal(rig.b.buffer, expected)


def test_a_read_moves_exactly_its_runs():
    rig = Rig()
    rig.b.buffer[:] = np.arange(BUFFER_BYTES) % 251
    handle = rig.a.transport.read(rig.b.name, runs_between(rig.b, rig.a, (64, 0, 512)), b"taken")
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert np.array_equal(rig.a.buffer[:512], rig.b.buffer[64:576])
    assert (rig.a.buffer[512:] == 1).all()
    assert rig.b.payloads() == [b"taken"]


def test_the_notification_follows_the_initiators_poll_and_the_last_byte():
    rig = Rig()
    rig.fabric.hold(rig.a.name, rig.b.name)
    handle = rig.a.transport.write(rig.b.name, runs_between(rig.a, rig.b, (0, 0, 4096)), b"written")
    assert rig.a.transport.poll(handle) is PostState.IN_FLIGHT
    rig.fabric.release(rig.a.name, rig.b.name)
    assert rig.b.payloads() == []
    assert (rig.b.buffer[:4096] == 1).all()
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert rig.b.payloads() == [b"written"]
    assert rig.a.transport.poll(handle) is PostState.DONE
    assert rig.b.payloads() == []


def test_without_notify_on_poll_the_notification_needs_no_poll():
    rig = Rig(notify_on_poll=False)
    rig.a.transport.write(rig.b.name, runs_between(rig.a, rig.b, (0, 0, 4096)), b"written")
    assert rig.b.payloads() == [b"written"]


def test_messages_reach_a_peer_that_has_not_connected_and_name_their_sender():
    rig = Rig()
    stranger = Member(rig.fabric, "stranger")
    stranger.transport.connect(rig.b.name, rig.b.transport.local_metadata())
    stranger.transport.send(rig.b.name, b"hello")
    arrived = rig.b.transport.receive()
    assert [(message.peer, message.payload) for message in arrived] == [("stranger", b"hello")]


def test_a_hello_by_message_alone_lets_the_other_side_write_back():
    rig = Rig()
    opener = Member(rig.fabric, "opener")
    opener.transport.connect(rig.b.name, rig.b.transport.local_metadata())
    opener.transport.send(rig.b.name, opener.transport.local_metadata())
    (hello,) = rig.b.transport.receive()
    rig.b.transport.connect(hello.peer, hello.payload)
    handle = rig.b.transport.write(hello.peer, runs_between(rig.b, opener, (0, 0, 64)))
    assert rig.b.transport.poll(handle) is PostState.DONE
    assert (opener.buffer[:64] == 2).all()


@pytest.mark.parametrize(
    "pairs",
    [
        [(BUFFER_BYTES - 8, 0, 16)],
        [(0, BUFFER_BYTES - 8, 16)],
        [(0, 0, 16), (0, BUFFER_BYTES, 1)],
        [(BUFFER_BYTES, 0, 1)],
        [(0, 0, 0)],
        [],
    ],
)
def test_runs_outside_registered_memory_are_refused_before_anything_moves(pairs):
    """V08: each descriptor is checked against the registered memory of both sides."""
    rig = Rig()
    for post in (rig.a.transport.write, rig.a.transport.read):
        with pytest.raises(TransportError) as caught:
            post(rig.b.name, runs_between(rig.a, rig.b, *pairs))
        assert not caught.value.retryable
    assert rig.fabric.under_way() == 0
    assert (rig.b.buffer == 2).all()


def test_runs_of_a_wrong_type_or_uneven_length_are_refused():
    rig = Rig()
    good = runs_between(rig.a, rig.b, (0, 0, 8), (8, 8, 8))
    with pytest.raises(TransportError, match="uneven"):
        rig.a.transport.write(rig.b.name, Runs(good.source[:1], good.target, good.length))
    with pytest.raises(TransportError, match=r"runs\.target must be a vector of uint64"):
        rig.a.transport.write(rig.b.name, Runs(good.source, good.target.astype(np.int64), good.length))


def test_a_message_over_the_limit_is_refused():
    rig = Rig(limits=FabricLimits(notification_bytes_max=10))
    rig.a.transport.send(rig.b.name, b"x" * 10)
    with pytest.raises(TransportError, match="11 bytes"):
        rig.a.transport.send(rig.b.name, b"x" * 11)
    with pytest.raises(TransportError, match="11 bytes"):
        rig.a.transport.write(rig.b.name, runs_between(rig.a, rig.b, (0, 0, 8)), b"x" * 11)
    assert rig.fabric.under_way() == 1


def test_a_full_inbox_refuses_and_nothing_is_lost():
    """A22: back-pressure is a retryable error, and order is kept."""
    rig = Rig(limits=FabricLimits(messages_pending_max=2))
    rig.a.transport.send(rig.b.name, b"1")
    rig.a.transport.send(rig.b.name, b"2")
    with pytest.raises(TransportError) as caught:
        rig.a.transport.send(rig.b.name, b"3")
    assert caught.value.retryable
    assert rig.b.payloads() == [b"1", b"2"]
    rig.a.transport.send(rig.b.name, b"3")
    assert rig.b.payloads() == [b"3"]


def test_posts_beyond_the_limit_are_refused_until_one_ended():
    """A22: a busy transport refuses; the same post works later."""
    rig = Rig(limits=FabricLimits(posts_in_flight_max=1))
    runs = runs_between(rig.a, rig.b, (0, 0, 64))
    first = rig.a.transport.write(rig.b.name, runs)
    with pytest.raises(TransportError) as caught:
        rig.a.transport.write(rig.b.name, runs)
    assert caught.value.retryable
    assert rig.a.transport.poll(first) is PostState.DONE
    assert rig.a.transport.poll(rig.a.transport.write(rig.b.name, runs)) is PostState.DONE


def test_not_connected_is_an_error():
    rig = Rig()
    stranger = Member(rig.fabric, "stranger")
    with pytest.raises(TransportError, match="not connected to a"):
        stranger.transport.send(rig.a.name, b"x")
    with pytest.raises(TransportError, match="not connected to a"):
        stranger.transport.write(rig.a.name, runs_between(stranger, rig.a, (0, 0, 8)))
    stranger.transport.disconnect(rig.a.name)


def test_damaged_foreign_and_wrong_metadata_is_refused():
    rig = Rig()
    metadata = rig.b.transport.local_metadata()
    for bad in (b"", b"nonsense", metadata[:-1], b"\x80", metadata + b"\x00"):
        with pytest.raises(TransportError, match="cannot be read"):
            rig.a.transport.connect(rig.b.name, bad)
    with pytest.raises(TransportError, match="names another peer"):
        rig.a.transport.connect(PeerName("c"), metadata)
    with pytest.raises(TransportError, match="runs transport 'radium'"):
        rig.a.transport.connect(rig.b.name, metadata.replace(b"memory", b"radium"))


def test_a_handle_is_released_only_in_a_terminal_state():
    """A11: what is in flight cannot be recalled, so it must not be forgotten."""
    rig = Rig()
    rig.fabric.hold(rig.a.name, rig.b.name)
    handle = rig.a.transport.write(rig.b.name, runs_between(rig.a, rig.b, (0, 0, 8)))
    with pytest.raises(AssertionError, match="in flight"):
        rig.a.transport.release(handle)
    with pytest.raises(UsageError, match="1 transfers in flight"):
        rig.a.transport.close()
    rig.fabric.release(rig.a.name, rig.b.name)
    rig.a.transport.poll(handle)
    rig.a.transport.release(handle)
    with pytest.raises(AssertionError, match="unknown or released"):
        rig.a.transport.poll(handle)
    rig.a.transport.close()
    rig.a.transport.close()


def test_handles_are_never_reused():
    rig = Rig()
    seen = set()
    for _ in range(3):
        handle = rig.a.transport.write(rig.b.name, runs_between(rig.a, rig.b, (0, 0, 8)))
        rig.a.transport.poll(handle)
        rig.a.transport.release(handle)
        seen.add(handle)
    assert len(seen) == 3


def test_a_second_thread_is_refused_by_every_method():
    """A10: one thread owns a transport."""
    rig = Rig()
    transport = rig.a.transport
    runs = runs_between(rig.a, rig.b, (0, 0, 8))
    handle = transport.write(rig.b.name, runs)
    calls = [
        lambda: transport.register([]),
        transport.local_metadata,
        lambda: transport.connect(rig.b.name, b""),
        lambda: transport.disconnect(rig.b.name),
        lambda: transport.send(rig.b.name, b"x"),
        transport.receive,
        lambda: transport.write(rig.b.name, runs),
        lambda: transport.read(rig.b.name, runs),
        lambda: transport.poll(handle),
        lambda: transport.failure(handle),
        lambda: transport.release(handle),
        transport.close,
    ]
    refused = []

    def intrude() -> None:
        for call in calls:
            try:
                call()
            except AssertionError as error:
                refused.append(str(error))

    intruder = threading.Thread(target=intrude)
    intruder.start()
    intruder.join()
    assert len(refused) == len(calls)
    assert all("belongs to thread" in text for text in refused)


def test_register_works_once_and_after_close_nothing_does():
    rig = Rig()
    with pytest.raises(UsageError, match="once"):
        rig.a.transport.register([Region(rig.a.address, 8)])
    rig.a.transport.close()
    with pytest.raises(UsageError, match="is closed"):
        rig.a.transport.receive()


def test_two_living_nodes_cannot_share_a_name():
    rig = Rig()
    with pytest.raises(UsageError, match="a node named a"):
        MemoryTransport(rig.fabric, rig.a.name)


def test_a_closed_peer_is_lost():
    rig = Rig()
    rig.b.transport.close()
    with pytest.raises(PeerLostError):
        rig.a.transport.send(rig.b.name, b"x")
    with pytest.raises(PeerLostError):
        rig.a.transport.write(rig.b.name, runs_between(rig.a, rig.b, (0, 0, 8)))
