"""`kv_transfer_params`: what router and engines tell each other about one hand-over, and its validation.

The keys are those of vLLM's own NIXL connectors, so that routers made for these work; ours add
`transfer_id`, `transfer_mode`, `consumers` and `kvferry_incarnation`. The dictionaries come from HTTP and are
hostile until they have passed `parse_*`, which raise `HandoffError` naming the key. Unknown keys are
ignored: a newer router may talk to an older engine.

Four values exist:

- `PrefillParams`: the router's request to the producer.
- `SourceParams`: the producer's answer: where its KV can be had.
- `DecodeParams`: the router's request to the consumer: a `SourceParams` plus the transfer.
- `HeldParams`: a consumer's answer after a turn: what it keeps, to be sent with the next prefill leg.

`remote_block_ids`, which the published connectors need, is a hint to none of ours and is not read here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvferry.errors import HandoffError
from kvferry.ids import EngineId, Incarnation, TransferId

TransferMode = Literal["push", "pull"]

TEXT_CHARACTERS_MAX = 256
RANKS_MAX = 1024
CONSUMERS_MAX = 128
TOKENS_MAX = 1 << 31
LEASE_SECONDS_MAX = 86_400.0
PREFIXES_MAX = 32
TRANSFER_ID_PATTERN = re.compile(r"[0-9A-Za-z_.:-]{8,256}")
DIGEST_PATTERN = re.compile(r"[0-9a-f]{32}")
HELD_OF_KEY = "held_of"
"""Of a probe: the transfer of a decode leg; what the engine keeps of its request is told besides."""
HOLDS_KEY = "holds"
"""Of the answer to such a probe: whether the engine keeps anything after a turn at all."""
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_CHILD = re.compile(r"^\d+_")


class PrefillParams(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill leg: compute the prompt and hand its KV to `consumers` requests.

    `transfer` is None when the router does not mint ids; the legs are then paired by `paired_by_request_id`.
    """

    transfer: TransferId | None = None
    mode: TransferMode | None = None
    consumers: int = 1
    history: HeldParams | None = None
    """What the engine that decoded the turn before keeps: it may be had instead of computed."""

    def to_params(self) -> dict[str, Any]:
        """The dictionary that travels as `kv_transfer_params`."""
        params = {} if self.history is None else self.history.to_params()
        params |= {"do_remote_decode": True, "do_remote_prefill": False, "consumers": self.consumers}
        return params | _optional(transfer_id=self.transfer, transfer_mode=self.mode)


class SourceParams(msgspec.Struct, frozen=True, kw_only=True):
    """Where a producer engine's KV can be had: its directory's address, its identity and its sizes."""

    engine: EngineId
    host: str
    port: int
    tp: int = 1
    pp: int = 1
    incarnation: Incarnation | None = None
    mode: TransferMode | None = None
    """The producer's default mode."""

    def to_params(self) -> dict[str, Any]:
        """The dictionary that travels as `kv_transfer_params`."""
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.tp,
            "pp_size": self.pp,
        }
        return params | _optional(kvferry_incarnation=self.incarnation, transfer_mode=self.mode)


class DecodeParams(msgspec.Struct, frozen=True, kw_only=True):
    """The decode leg: receive the KV of `transfer` from `source`."""

    source: SourceParams
    transfer: TransferId | None = None
    mode: TransferMode | None = None
    consumers: int = 1
    prefilled_tokens: int | None = None
    """How many tokens the producer holds; None while its prefill may still run or be on its way."""

    def to_params(self) -> dict[str, Any]:
        """The dictionary that travels as `kv_transfer_params`."""
        params = self.source.to_params() | {"consumers": self.consumers}
        return params | _optional(
            transfer_id=self.transfer, transfer_mode=self.mode, remote_num_tokens=self.prefilled_tokens
        )


class Prefix(msgspec.Struct, frozen=True):
    """The digest of a request's first `tokens` tokens, by which another engine compares them with its own."""

    tokens: int
    digest: str


class HeldParams(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine keeps of a request that it has decoded: the first `tokens` tokens, under `transfer`.

    It has the shape of a prefill request: routers send it to the next turn's prefill engine as it is. That
    is why its transfer has a key of its own, `remote_transfer_id`: `transfer_id` is the new one's.
    """

    source: SourceParams
    """Without a mode: that of the request which carries all this is for the transfer of the history, too."""
    transfer: TransferId
    tokens: int
    lease_seconds: float | None = None
    """How long it is kept from the answer on."""
    prefixes: tuple[Prefix, ...] = ()
    """Digests of some of its beginnings; what none of them covers is nobody's to use."""

    def to_params(self) -> dict[str, Any]:
        """The dictionary that travels as `kv_transfer_params`."""
        params = self.source.to_params() | {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_transfer_id": self.transfer,
            "remote_num_tokens": self.tokens,
        }
        told = [[prefix.tokens, prefix.digest] for prefix in self.prefixes]
        return params | _optional(remote_lease_seconds=self.lease_seconds, remote_prefixes=told or None)


def parse_request(params: object) -> PrefillParams | DecodeParams | None:
    """Read the `kv_transfer_params` of a request; None when it asks for no transfer.

    Raises:
        HandoffError: a key has a wrong type, is missing or out of range.
    """
    if params is None:
        return None
    reader = _Reader(params)
    produces = reader.flag("do_remote_decode")
    consumes = reader.flag("do_remote_prefill")
    if produces and consumes:
        raise HandoffError("do_remote_decode", "is true together with do_remote_prefill; set one of them")
    if produces:
        return PrefillParams(
            transfer=reader.transfer("transfer_id"),
            mode=reader.mode(),
            consumers=reader.count("consumers", CONSUMERS_MAX),
            history=_held(reader),
        )
    if consumes:
        return DecodeParams(
            source=_source(reader),
            transfer=reader.transfer("transfer_id") or _paired_by_answer(reader),
            mode=reader.mode(),
            consumers=reader.count("consumers", CONSUMERS_MAX),
            prefilled_tokens=reader.tokens() or None,
        )
    return None


def parse_source(params: object) -> SourceParams:
    """Read the `kv_transfer_params` of a producer's answer.

    Raises:
        HandoffError: a key has a wrong type, is missing or out of range.
    """
    return _source(_Reader(params))


def parse_held(params: object) -> HeldParams | None:
    """Read the `kv_transfer_params` of a consumer's answer; None when it keeps nothing.

    Raises:
        HandoffError: a key has a wrong type, is missing or out of range.
    """
    reader = _Reader(params)
    return _held(reader) if reader.flag("do_remote_decode") else None


def parse_held_of(params: object) -> TransferId | None:
    """The transfer of the decode leg that a probe asks about; None when it asks for coordinates alone.

    Raises:
        HandoffError: the key has a wrong type.
    """
    return _Reader(params).transfer(HELD_OF_KEY)


def paired_by_request_id(request_id: str) -> TransferId:
    """The key that pairs two legs without a `transfer_id`: what the engines made of one `X-Request-Id`.

    vLLM appends `-<8 hex>` to each engine's copy of the id and prefixes the children of n > 1 with `<k>_`.
    What a client may write there and a `transfer_id` may not have is replaced by a digest.
    """
    key = "x-request-id:" + _CHILD.sub("", _SUFFIX.sub("", request_id))
    if not TRANSFER_ID_PATTERN.fullmatch(key):
        key = "x-request-id:sha256:" + hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
    return TransferId(key)


def _paired_by_answer(reader: _Reader) -> TransferId | None:
    """The key that the producer made of its own id of the request, if its answer tells that.

    Before it has answered, who sends both legs at once can only guess that id.
    """
    request_id = reader.text("remote_request_id") if reader.tokens() else None
    return None if request_id is None else paired_by_request_id(request_id)


def _source(reader: _Reader) -> SourceParams:
    incarnation = reader.text("kvferry_incarnation")
    return SourceParams(
        engine=EngineId(reader.required_text("remote_engine_id")),
        host=reader.required_text("remote_host"),
        port=reader.integer("remote_port", 1, 65535),
        tp=reader.count("tp_size", RANKS_MAX),
        pp=reader.count("pp_size", RANKS_MAX),
        incarnation=None if incarnation is None else Incarnation(incarnation),
        mode=reader.mode(),
    )


def _held(reader: _Reader) -> HeldParams | None:
    """What a prefill request says of an earlier turn; routers send the keys as nulls when there was none."""
    tokens = reader.tokens()
    if not tokens or reader.text("remote_engine_id") is None:
        return None
    transfer = reader.transfer("remote_transfer_id")
    if transfer is None:
        transfer = paired_by_request_id(reader.required_text("remote_request_id"))
    source = msgspec.structs.replace(_source(reader), mode=None)
    return HeldParams(
        source=source,
        transfer=transfer,
        tokens=tokens,
        lease_seconds=reader.lease_seconds(),
        prefixes=reader.prefixes(),
    )


def _optional(**values: object) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


class _Reader:
    """Typed access to one untrusted dictionary."""

    def __init__(self, params: object) -> None:
        if not isinstance(params, Mapping):
            raise HandoffError("*", f"must be an object, not {type(params).__name__}")
        self._params = params

    def flag(self, key: str) -> bool:
        value = self._params.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise HandoffError(key, f"must be true or false, not {_shown(value)}")
        return value

    def text(self, key: str) -> str | None:
        value = self._params.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            # By its type alone: what stands here by mistake may be a secret.
            found = "an empty one" if value == "" else type(value).__name__
            raise HandoffError(key, f"must be a text, not {found}")
        if len(value) > TEXT_CHARACTERS_MAX or not value.isprintable():
            raise HandoffError(key, f"must be printable and have at most {TEXT_CHARACTERS_MAX} characters")
        return value

    def required_text(self, key: str) -> str:
        value = self.text(key)
        if value is None:
            raise HandoffError(key, "is missing")
        return value

    def integer(self, key: str, least: int, most: int) -> int:
        value = self._params.get(key)
        if value is None:
            raise HandoffError(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise HandoffError(key, f"must be a whole number from {least} to {most}, not {_shown(value)}")
        return value

    def count(self, key: str, most: int) -> int:
        """A whole number from 1 on; absent means 1."""
        return 1 if self._params.get(key) is None else self.integer(key, 1, most)

    def tokens(self) -> int:
        """How many tokens are held; absent means none."""
        key = "remote_num_tokens"
        return 0 if self._params.get(key) is None else self.integer(key, 0, TOKENS_MAX)

    def lease_seconds(self) -> float | None:
        key = "remote_lease_seconds"
        value = self._params.get(key)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= LEASE_SECONDS_MAX
        ):
            raise HandoffError(
                key, f"must be a number over 0 and up to {LEASE_SECONDS_MAX:g}, not {_shown(value)}"
            )
        return float(value)

    def prefixes(self) -> tuple[Prefix, ...]:
        key = "remote_prefixes"
        value = self._params.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or len(value) > PREFIXES_MAX:
            raise HandoffError(key, f"must be a list of at most {PREFIXES_MAX} pairs, not {_shown(value)}")
        return tuple(_prefix(key, pair) for pair in value)

    def transfer(self, key: str) -> TransferId | None:
        value = self.text(key)
        if value is None:
            return None
        if not TRANSFER_ID_PATTERN.fullmatch(value):
            # The id is a secret: the message shows the rule, never the value.
            raise HandoffError(key, "must have 8 to 256 letters, digits or any of _ . : -")
        return TransferId(value)

    def mode(self) -> TransferMode | None:
        value = self.text("transfer_mode")
        if value is None:
            return None
        if value == "push":
            return "push"
        if value == "pull":
            return "pull"
        raise HandoffError("transfer_mode", f"must be 'push' or 'pull', not {_shown(value)}")


def _prefix(key: str, pair: object) -> Prefix:
    if isinstance(pair, list | tuple) and len(pair) == 2:
        tokens, digest = pair
        whole = isinstance(tokens, int) and not isinstance(tokens, bool) and 0 < tokens <= TOKENS_MAX
        if whole and isinstance(digest, str) and DIGEST_PATTERN.fullmatch(digest):
            return Prefix(tokens, digest)
    problem = "must have pairs of a number of tokens and 32 hexadecimal digits"
    raise HandoffError(key, f"{problem}, not {_shown(pair)}")


def _shown(value: object) -> str:
    """Enough of a hostile value to find it by; a large one is never rendered whole."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:40]!r}..."
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return type(value).__name__
