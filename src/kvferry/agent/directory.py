"""The side channel: where an engine's ranks can be found, and how that is asked for.

One request and one answer over ZeroMQ. With a shared secret it takes two: the server answers `Ask` with a
`Challenge`, and only a `Prove` with the right proof brings the directory, which then carries the server's own
proof. The secret itself never travels, and without it nobody learns an engine's metadata. The channel is not
encrypted: who can read the network between two engines can read a directory.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from kvferry.errors import PeerError
from kvferry.ids import EngineId, Incarnation

DIRECTORY_VERSION = 1
REQUEST_BYTES_MAX = 4096
RESPONSE_BYTES_MAX = 64 << 20
NONCE_BYTES = 16


class RankEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its transport's name and metadata, and its encoded `layout.spec.CacheSpec`."""

    pp: int
    tp: int
    peer: str
    metadata: bytes
    cache: bytes
    ends_with_engine: bool = True
    """Whether it ends within a moment (`Limits.orphan_seconds`) of its engine; see `agent.parent`."""


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of one incarnation of one engine."""

    engine: EngineId
    incarnation: Incarnation
    tp_size: int
    pp_size: int
    ranks: tuple[RankEntry, ...]
    version: int = DIRECTORY_VERSION


# --- what is asked and answered ----------------------------------------------------------------------


class _Said(msgspec.Struct, frozen=True, tag_field="t", kw_only=True):
    """Base of what travels on the side channel."""


class Ask(_Said, frozen=True, tag="ask"):
    """Please tell me your directory."""

    nonce: bytes
    version: int = DIRECTORY_VERSION


class Prove(_Said, frozen=True, tag="prove"):
    """The answer to a `Challenge`: `proof` over both nonces shows that the client has the secret."""

    nonce: bytes
    proof: bytes


class Challenge(_Said, frozen=True, tag="challenge"):
    """Show that you have the secret, over your nonce and this one."""

    nonce: bytes


class NotReady(_Said, frozen=True, tag="not_ready"):
    """The engine is starting; ask again."""


class Refused(_Said, frozen=True, tag="refused"):
    """The directory is not for you."""

    reason: str


class Answer(_Said, frozen=True, tag="answer"):
    """The encoded `Directory`; `proof` shows that the server has the secret, empty where there is none."""

    directory: bytes
    proof: bytes = b""


Request = Ask | Prove
Response = Challenge | NotReady | Refused | Answer

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_response_decoder = msgspec.msgpack.Decoder(Response)
_directory_decoder = msgspec.msgpack.Decoder(Directory)


def encode(said: Request | Response | Directory) -> bytes:
    """The bytes that travel."""
    return _encoder.encode(said)


def decode_request(data: bytes) -> Request:
    """Read what a client says.

    Raises:
        PeerError: it is no request.
    """
    try:
        request: Request = _request_decoder.decode(data)
    except msgspec.MsgspecError as problem:
        raise PeerError(f"not a request for a directory: {problem}") from None
    if len(request.nonce) != NONCE_BYTES:
        raise PeerError(f"nonce has {len(request.nonce)} bytes, not {NONCE_BYTES}")
    return request


def decode_response(data: bytes) -> Response:
    """Read what a server says.

    Raises:
        PeerError: it is no response.
    """
    try:
        response: Response = _response_decoder.decode(data)
    except msgspec.MsgspecError as problem:
        raise PeerError(f"not a directory's response: {problem}") from None
    return response


def decode_directory(data: bytes) -> Directory:
    """Read a directory; ranks are complete, in range and named once.

    Raises:
        PeerError: it cannot be read, is of another version, or contradicts itself.
    """
    try:
        directory = _directory_decoder.decode(data)
    except msgspec.MsgspecError as problem:
        raise PeerError(f"not a directory: {problem}") from None
    if directory.version != DIRECTORY_VERSION:
        raise PeerError(
            f"directory version is {directory.version}, ours is {DIRECTORY_VERSION}; upgrade the older engine"
        )
    places = {(entry.pp, entry.tp) for entry in directory.ranks}
    complete = len(directory.ranks) == len(places) == directory.tp_size * directory.pp_size
    in_range = all(0 <= pp < directory.pp_size and 0 <= tp < directory.tp_size for pp, tp in places)
    if not places or not complete or not in_range:
        raise PeerError(
            f"directory of {directory.engine!r} lists {len(directory.ranks)} ranks for "
            f"tp_size {directory.tp_size} and pp_size {directory.pp_size}"
        )
    return directory


# --- proofs ------------------------------------------------------------------------------------------


def client_proof(secret: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """What `Prove` carries."""
    return _proof(secret, b"client", client_nonce, server_nonce, b"")


def server_proof(secret: str, client_nonce: bytes, server_nonce: bytes, directory: bytes) -> bytes:
    """What `Answer` carries: it binds the directory to this very exchange."""
    return _proof(secret, b"server", client_nonce, server_nonce, directory)


def same_proof(one: bytes, other: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(one, other)


def _proof(secret: str, role: bytes, client_nonce: bytes, server_nonce: bytes, body: bytes) -> bytes:
    text = b"kvferry directory 1|" + role + b"|" + client_nonce + server_nonce + hashlib.sha256(body).digest()
    return hmac.new(secret.encode(), text, hashlib.sha256).digest()
