"""Messages to bytes and back: the only place where bytes appear.

A payload is a header of eight bytes and a body. The header is `KF`, the format's version, a kind (0 whole,
1 part) and four zero bytes; a part's body starts with message number, index and count. Bodies are
MessagePack of a tagged union. Whoever reads does so under limits, and every fault is a `PeerError`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict

import msgspec

from kvferry.errors import PeerError, UsageError
from kvferry.ids import PeerName
from kvferry.protocol.messages import AnyMessage

FORMAT_VERSION = 1
_MAGIC = b"KF"
_HEADER = struct.Struct(">2sBB4x")
_PART = struct.Struct(">III")
_WHOLE, _PARTIAL = 0, 1
PARTIAL_MESSAGES_MAX = 64
"""Unfinished multi-part messages kept over all peers; the oldest is given up beyond it."""
PARTS_MAX = 1 << 16
"""Parts of one message; more is malformed."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class Encoder:
    """Encodes messages for a transport that takes payloads of at most `payload_bytes_max` bytes."""

    def __init__(self, payload_bytes_max: int) -> None:
        self._part_bytes = payload_bytes_max - _HEADER.size - _PART.size
        if self._part_bytes < 1:
            raise UsageError(f"payloads of at most {payload_bytes_max} bytes have no room for a message")
        self._payload_bytes_max = payload_bytes_max
        self._number = 0

    def encode(self, message: AnyMessage) -> list[bytes]:
        """One payload, or numbered parts when the message is longer than a payload."""
        body = _encoder.encode(message)
        if len(body) + _HEADER.size <= self._payload_bytes_max:
            return [_HEADER.pack(_MAGIC, FORMAT_VERSION, _WHOLE) + body]
        self._number = (self._number + 1) & 0xFFFFFFFF
        pieces = [body[at : at + self._part_bytes] for at in range(0, len(body), self._part_bytes)]
        header = _HEADER.pack(_MAGIC, FORMAT_VERSION, _PARTIAL)
        return [
            header + _PART.pack(self._number, index, len(pieces)) + piece
            for index, piece in enumerate(pieces)
        ]


def is_part(payload: bytes) -> bool:
    """Whether a payload carries only a part of a message; one that is no payload of ours does not."""
    return len(payload) >= _HEADER.size and _HEADER.unpack_from(payload)[2] == _PARTIAL


class Decoder:
    """Decodes payloads and joins parts, within `message_bytes_max` bytes per message."""

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._partial: OrderedDict[tuple[PeerName, int], _Pieces] = OrderedDict()

    def decode(self, peer: PeerName, payload: bytes) -> AnyMessage | None:
        """The message, or None while parts of it are missing.

        Raises:
            PeerError: not a message of a version that we know, or over a limit.
        """
        if len(payload) < _HEADER.size or payload[:2] != _MAGIC:
            raise PeerError("not a kvferry message")
        _, version, kind = _HEADER.unpack_from(payload)
        if version != FORMAT_VERSION:
            raise PeerError(f"message format {version}, we read {FORMAT_VERSION}")
        if kind == _WHOLE:
            return self._whole(payload[_HEADER.size :])
        if kind == _PARTIAL:
            body = self._joined(peer, payload)
            return None if body is None else self._whole(body)
        raise PeerError(f"unknown payload kind {kind}")

    def forget(self, peer: PeerName) -> None:
        """Drop unfinished messages of a peer that is gone."""
        for key in [key for key in self._partial if key[0] == peer]:
            del self._partial[key]

    def _whole(self, body: bytes) -> AnyMessage:
        if len(body) > self._message_bytes_max:
            raise PeerError(f"message of {len(body)} bytes, the limit is {self._message_bytes_max}")
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError(f"unreadable message: {error}") from error

    def _joined(self, peer: PeerName, payload: bytes) -> bytes | None:
        if len(payload) <= _HEADER.size + _PART.size:
            raise PeerError("part without a body")
        number, index, count = _PART.unpack_from(payload, _HEADER.size)
        piece = payload[_HEADER.size + _PART.size :]
        if index >= count or count > PARTS_MAX:
            raise PeerError(f"part {index} of {count} is out of range")
        key = (peer, number)
        pieces = self._partial.setdefault(key, _Pieces())
        pieces.put(index, piece)
        if pieces.bytes > self._message_bytes_max:
            del self._partial[key]
            raise PeerError(f"message over {self._message_bytes_max} bytes")
        if len(pieces) < count:
            while len(self._partial) > PARTIAL_MESSAGES_MAX:
                self._partial.popitem(last=False)
            return None
        del self._partial[key]
        if len(pieces) > count or max(pieces) >= count:
            raise PeerError(f"parts of message {number} disagree on their count")
        return b"".join(pieces[at] for at in range(count))


class _Pieces(dict[int, bytes]):
    """Parts of one message by index, and their bytes together."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def put(self, index: int, piece: bytes) -> None:
        """Add a part, or take it again."""
        self.bytes += len(piece) - len(self.get(index, b""))
        self[index] = piece
