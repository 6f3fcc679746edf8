"""What the router itself asks of engines, each by a request of one token.

Of a prefill engine its coordinates, and the release of a transfer; of a decode engine what it keeps of a
turn.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.errors import HandoffError, KvferryError
from kvferry.handoff import HELD_OF_KEY, PrefillParams, SourceParams, parse_source
from kvferry.ids import TransferId
from kvferry.router.api.openai import PARAMS, Endpoint, error_message
from kvferry.router.engines.worker import Model

if TYPE_CHECKING:
    import aiohttp

_ANSWER_BYTES_MAX = 1 << 20
_METRICS_BYTES_MAX = 16 << 20
_MODELS_MAX = 4096
_RANKS_MAX = 1024
_ENGINE_LABEL = re.compile(rb'^vllm:num_requests_running\{[^}]*\bengine="(\d+)"', re.MULTILINE)


class ProbeError(KvferryError):
    """The engine did not tell its coordinates; the message says why.

    `unsuitable` is True when asking again soon is in vain: the engine runs, but hands nothing over.
    """

    def __init__(self, problem: str, *, unsuitable: bool = False) -> None:
        super().__init__(problem)
        self.unsuitable = unsuitable


async def probe(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> SourceParams:
    """Ask the engine at `url` where its KV can be had. The caller bounds the time.

    Raises:
        ProbeError: the engine answered something else.
        aiohttp.ClientError: no answer.
    """
    models = await _json(session.get(f"{url}/v1/models", headers=headers), "/v1/models")
    body = probe_body(_first_model(models))
    request = session.post(f"{url}{Endpoint.COMPLETIONS.value}", json=body, headers=headers)
    params = (await _json(request, "the probe")).get(PARAMS)
    if params is None:
        raise ProbeError(
            "its answers carry no kv_transfer_params; start it with a KV connector that produces",
            unsuitable=True,
        )
    try:
        return parse_source(params)
    except HandoffError as error:
        raise ProbeError(f"its coordinates make no sense: {error}", unsuitable=True) from error


async def models_of(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]
) -> tuple[Model, ...]:
    """The models that the engine at `url` serves, adapters included, with their limits.

    Raises:
        ProbeError: the engine answered something else.
        aiohttp.ClientError: no answer.
    """
    answer = await _json(session.get(f"{url}/v1/models", headers=headers), "/v1/models")
    data = answer.get("data")
    models = [_model(card) for card in data[:_MODELS_MAX]] if isinstance(data, list) else []
    return tuple(model for model in models if model is not None)


async def version_of(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> str:
    """The engine's version; empty when it does not tell.

    Raises:
        aiohttp.ClientError: no answer.
    """
    try:
        version = (await _json(session.get(f"{url}/version", headers=headers), "/version")).get("version")
    except ProbeError:
        return ""
    return version[:64] if isinstance(version, str) and version.isprintable() else ""


async def ranks_of(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> int | None:
    """How many data-parallel ranks are behind `url`, by its metrics; None when they do not tell.

    Raises:
        aiohttp.ClientError: no answer.
    """
    try:
        raw = await _read(session.get(f"{url}/metrics", headers=headers), "/metrics", _METRICS_BYTES_MAX)
    except ProbeError:
        return None
    ranks = set(_ENGINE_LABEL.findall(raw))
    return min(len(ranks), _RANKS_MAX) or None


def probe_body(model: str) -> dict[str, Any]:
    """The probe's request; `probe` asks a kvferry engine to hold nothing, others hold until a lease ends."""
    params = PrefillParams(transfer=TransferId(secrets.token_hex(16)), consumers=1).to_params()
    return {
        "model": model,
        "prompt": "probe",
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": False,
        PARAMS: params | {"probe": True},
    }


def held_body(model: object, transfer: TransferId) -> dict[str, Any]:
    """A request by which a kvferry engine tells what it keeps of the one that got its KV by `transfer`."""
    params = PrefillParams(transfer=TransferId(secrets.token_hex(16)), consumers=1).to_params()
    return {
        "model": model,
        "prompt": "held",
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": False,
        PARAMS: params | {"probe": True, HELD_OF_KEY: transfer},
    }


def release_body(model: object, transfer: TransferId) -> dict[str, Any]:
    """A request by which a kvferry engine releases what it holds for `transfer`; it computes one token."""
    params = PrefillParams(transfer=transfer, consumers=1).to_params()
    return {
        "model": model,
        "prompt": "release",
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": False,
        PARAMS: params | {"release": True},
    }


def _first_model(models: Mapping[str, Any]) -> str:
    data = models.get("data")
    first = data[0] if isinstance(data, list) and data else None
    name = first.get("id") if isinstance(first, Mapping) else None
    if not isinstance(name, str):
        raise ProbeError("/v1/models names no model")
    return name


def _model(card: object) -> Model | None:
    name = card.get("id") if isinstance(card, Mapping) else None
    if not isinstance(card, Mapping) or not isinstance(name, str):
        return None
    length = card.get("max_model_len")
    known = isinstance(length, int) and not isinstance(length, bool) and length > 0
    return Model(name, length if known else None)


async def _json(request: Any, what: str) -> Mapping[str, Any]:
    raw = await _read(request, what, _ANSWER_BYTES_MAX)
    try:
        answer = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProbeError(f"{what}: the answer is not JSON: {error}") from error
    if not isinstance(answer, Mapping):
        raise ProbeError(f"{what}: the answer is not an object")
    return answer


async def _read(request: Any, what: str, bytes_max: int) -> bytes:
    async with request as response:
        raw: bytes = await response.content.read(bytes_max)
        while not response.content.at_eof():
            more = await response.content.read(bytes_max)
            raw += more
            if len(raw) > bytes_max:
                raise ProbeError(f"{what}: the answer is too long")
        if response.status != 200:
            told = error_message(raw)
            # A 4xx repeats itself until somebody changes the engine or the key.
            raise ProbeError(
                f"{what}: answered {response.status}" + (f": {told}" if told else ""),
                unsuitable=400 <= response.status < 500,
            )
    return raw
