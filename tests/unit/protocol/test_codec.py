"""Messages to bytes and back, and what strangers' bytes do: nothing but a `PeerError`."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import PeerError, UsageError
from kvferry.ids import ConsumerId, EngineId, Incarnation, PeerName, TransferId
from kvferry.protocol.codec import FORMAT_VERSION, PARTIAL_MESSAGES_MAX, PARTS_MAX, Decoder, Encoder
from kvferry.protocol.messages import (
    Announce,
    AnyMessage,
    Cancel,
    Cancelled,
    Complaint,
    Failed,
    Fetch,
    Fetched,
    Hello,
    HelloRefused,
    Landed,
    Message,
    Offer,
    Register,
    Renew,
    Status,
    TransferStatus,
    Written,
)

PEER, OTHER = PeerName("p0"), PeerName("p1")
T, C = TransferId("t" * 32), ConsumerId("cmpl-1")
EXAMPLES: list[AnyMessage] = [
    Hello(
        engine=EngineId("e"),
        incarnation=Incarnation("i"),
        pp=0,
        tp=3,
        version=1,
        metadata=bytes(range(256)),
        cache=b"",
    ),
    HelloRefused(reason="block size differs"),
    Complaint(reason="unreadable"),
    Announce(transfer=T, consumer=C, attempt=2),
    Register(
        transfer=T,
        consumer=C,
        start=16,
        stop=48,
        groups=(((3, 2),), ((7, 1), (9, 1))),
        write_seconds=10.0,
        mark=86400.125,
        sharers=2,
        attempt=1 << 40,
    ),
    Renew(transfers=((T, C, 1), (T, ConsumerId("1_cmpl-1"), 1 << 40)), write_seconds=2.5, mark=-0.5),
    Cancel(transfer=T, consumer=C, reason="cancelled", sharers=4),
    Renew(transfers=((T, C, 1),), write_seconds=2.5, asked=7.25),
    Fetch(transfer=T, consumer=C, start=16, stop=48, asked=1e9 / 3, sharers=2),
    Fetched(transfer=T, consumer=C),
    Offer(
        transfer=T,
        consumer=C,
        start=16,
        stop=48,
        groups=(((3, 2),), ((7, 1), (9, 1))),
        asked=-0.5,
        keep_seconds=29.75,
        attempt=4,
    ),
    Landed(transfer=T, consumer=C, start=0, stop=16),
    Written(transfer=T, consumer=C, start=0, stop=48),
    Failed(transfer=T, consumer=C, reason="abandoned: \u00fc", valid_until=32),
    Cancelled(transfer=T, consumer=C),
    Status(transfers=(TransferStatus(T, C, "computing", 4096, 3),), mark=1e9 / 7),
    Status(transfers=(TransferStatus(T, C, "held", 4096, 3, 29.5),), mark=1e9 / 7, asked=7.25),
]


def framed(body: bytes, *, version: int = FORMAT_VERSION, kind: int = 0, magic: bytes = b"KF") -> bytes:
    return struct.pack(">2sBB4x", magic, version, kind) + body


def part(number: int, index: int, count: int, piece: bytes) -> bytes:
    return framed(struct.pack(">III", number, index, count) + piece, kind=1)


def one(message: AnyMessage) -> bytes:
    (payload,) = Encoder(1 << 20).encode(message)
    return payload


def test_there_is_an_example_of_every_message() -> None:
    assert {type(message) for message in EXAMPLES} == set(Message.__subclasses__())
    tags = {type(message): type(message).__struct_config__.tag for message in EXAMPLES}
    assert len(set(tags.values())) == len(tags)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("payload_bytes_max", [1 << 20, 40, 21])
def test_every_message_survives_the_way(message: AnyMessage, payload_bytes_max: int) -> None:
    payloads = Encoder(payload_bytes_max).encode(message)
    assert max(map(len, payloads)) <= payload_bytes_max
    decoder = Decoder(1 << 16)
    *missing, last = [decoder.decode(PEER, payload) for payload in payloads]
    assert missing == [None] * (len(payloads) - 1)
    assert last == message


def test_parts_may_come_in_any_order_twice_and_mixed_with_those_of_others() -> None:
    encoder, decoder = Encoder(40), Decoder(1 << 16)
    first, second = encoder.encode(EXAMPLES[0]), encoder.encode(EXAMPLES[4])
    assert [decoder.decode(PEER, payload) for payload in first[:-1]] == [None] * (len(first) - 1)
    assert [decoder.decode(OTHER, payload) for payload in first[:-1]] == [None] * (len(first) - 1)
    assert decoder.decode(PEER, first[0]) is None
    for payload in reversed(second[1:]):
        assert decoder.decode(PEER, payload) is None
    assert decoder.decode(PEER, second[0]) == EXAMPLES[4]
    assert decoder.decode(PEER, first[-1]) == EXAMPLES[0]
    decoder.forget(OTHER)
    assert decoder.decode(OTHER, first[-1]) is None


def test_20_000_scattered_blocks_pass_a_small_notification_limit() -> None:
    """A16: a message over the backend's limit travels in parts."""
    message = Register(
        transfer=T,
        consumer=C,
        start=0,
        stop=320_000,
        groups=(tuple((2 * at, 1) for at in range(20_000)),),
        write_seconds=10.0,
    )
    payloads = Encoder(1024).encode(message)
    assert len(payloads) > 64
    assert max(map(len, payloads)) <= 1024
    decoder = Decoder(16 << 20)
    assert [decoder.decode(PEER, payload) for payload in payloads][-1] == message


def test_fields_that_a_newer_peer_added_are_skipped_and_missing_ones_have_defaults() -> None:
    body = msgspec.msgpack.encode(
        {"t": "cancel", "transfer": T, "consumer": C, "reason": "x", "novelty": [1, 2]}
    )
    assert Decoder(1000).decode(PEER, framed(body)) == Cancel(transfer=T, consumer=C, reason="x", sharers=1)


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (b"", "not a kvferry message"),
        (b"KF", "not a kvferry message"),
        (b"GET / HTTP/1.1\r\n\r\n", "not a kvferry message"),
        (framed(b"", magic=b"kf"), "not a kvferry message"),
        (framed(b"", version=2), "message format 2, we read 1"),
        (framed(b"", kind=2), "unknown payload kind 2"),
        (framed(b""), "unreadable"),
        (framed(b"\xc1"), "unreadable"),
        (framed(b"\x91" * 900), "unreadable"),
        (framed(msgspec.msgpack.encode({"t": "novelty"})), "unreadable"),
        (framed(msgspec.msgpack.encode({"transfer": T})), "unreadable"),
        (framed(msgspec.msgpack.encode({"t": "announce", "transfer": T})), "unreadable"),
        (framed(msgspec.msgpack.encode({"t": "announce", "transfer": 7, "consumer": C})), "unreadable"),
        (framed(msgspec.msgpack.encode([1, 2, 3])), "unreadable"),
        (framed(b"\x82\xa1t\xa8announce\xa8transfer\xa2\xff\xfe"), "unreadable"),
        (framed(bytes(1001)), "message of 1001 bytes, the limit is 1000"),
        (framed(b"", kind=1), "part without a body"),
        (part(1, 0, 0, b"x"), "part 0 of 0 is out of range"),
        (part(1, 3, 3, b"x"), "part 3 of 3 is out of range"),
        (part(1, 0, PARTS_MAX + 1, b"x"), "out of range"),
        (part(1, 0, 2, bytes(1001)), "message over 1000 bytes"),
    ],
)
def test_bytes_that_are_no_message(payload: bytes, problem: str) -> None:
    """S03, S04, X21: strangers' bytes are an error of that peer, never a crash."""
    with pytest.raises(PeerError, match=problem):
        Decoder(1000).decode(PEER, payload)


def test_parts_over_the_limit_together_are_refused_and_forgotten() -> None:
    decoder = Decoder(1000)
    assert decoder.decode(PEER, part(1, 0, 3, bytes(600))) is None
    with pytest.raises(PeerError, match="message over 1000 bytes"):
        decoder.decode(PEER, part(1, 1, 3, bytes(600)))
    assert decoder.decode(PEER, part(1, 1, 3, bytes(10))) is None


@pytest.mark.parametrize("second", [part(1, 0, 1, b"x"), part(1, 1, 2, b"x")])
def test_parts_that_disagree_on_their_count_are_refused(second: bytes) -> None:
    decoder = Decoder(1000)
    assert decoder.decode(PEER, part(1, 5, 9, b"x")) is None
    with pytest.raises(PeerError, match="disagree on their count"):
        decoder.decode(PEER, second)


def test_unfinished_messages_are_bounded_and_the_oldest_is_given_up() -> None:
    decoder = Decoder(1000)
    whole = one(Announce(transfer=T, consumer=C))
    body = whole[8:]
    for number in range(PARTIAL_MESSAGES_MAX + 1):
        assert decoder.decode(PEER, part(number, 0, 2, body[:5])) is None
    assert len(decoder._partial) == PARTIAL_MESSAGES_MAX
    assert decoder.decode(PEER, part(PARTIAL_MESSAGES_MAX, 1, 2, body[5:])) is not None
    assert decoder.decode(PEER, part(0, 1, 2, body[5:])) is None


def test_a_payload_limit_without_room_is_refused_at_start() -> None:
    with pytest.raises(UsageError, match="at most 20 bytes have no room"):
        Encoder(20)


@given(st.binary(max_size=200))
def test_hostile_bytes_never_do_more_than_raise(body: bytes) -> None:
    """S03: whatever arrives, the reader lives and reads the next good message."""
    decoder = Decoder(1000)
    for payload in (body, framed(body), framed(body, kind=1), part(1, 0, 1, body or b"x")):
        try:
            decoder.decode(PEER, payload)
        except PeerError:
            continue
    assert decoder.decode(PEER, one(EXAMPLES[3])) == EXAMPLES[3]


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_damaged_message_never_does_more_than_raise(message: AnyMessage, data: st.DataObject) -> None:
    payload = bytearray(one(message))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    try:
        Decoder(1 << 16).decode(PEER, bytes(payload))
    except PeerError:
        return
