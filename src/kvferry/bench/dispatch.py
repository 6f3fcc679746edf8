"""How a request is sent: to one endpoint, or as a router would send it to a prefill and a decode engine.

The load generator plays the router itself, so that no router's CPU time is in the figures and every connector
gets its legs from the same code:

- push: both legs at once. kvferry's are paired by a transfer id; those of vLLM's push connector by the
  `X-Request-Id` that both carry.
- pull: the prefill leg, then the decode leg with what the prefill engine answered; kvferry's with a transfer
  id, too.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.bench.prompts import Prompt
from kvferry.bench.stream import LegError, Seen, answer, stream
from kvferry.errors import HandoffError
from kvferry.handoff import DecodeParams, PrefillParams, SourceParams, parse_source
from kvferry.ids import TransferId

if TYPE_CHECKING:
    import aiohttp

PARAMS = "kv_transfer_params"
PROBE_TOKENS = 300
"""Length of the prompt of `prepare`: more than a block of the usual sizes, so that there is KV to move."""

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request as the load has planned it."""

    request: str
    """Its `X-Request-Id`."""
    prompt: Prompt
    output_tokens: int


def asks_of(name: str, prompts: Iterable[Prompt], output_tokens: int) -> list[Ask]:
    """Number some prompts as requests."""
    return [
        Ask(request=f"{name}-{position}", prompt=prompt, output_tokens=output_tokens)
        for position, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What all bodies of a load have in common."""

    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More keys for the body, such as `ignore_eos`."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def client_body(self, ask: Ask) -> Body:
        """What a client would send: streamed, with usage at the end."""
        return {
            "model": self.model,
            "prompt": ask.prompt.encoded,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }

    def prefill_body(self, ask: Ask, params: Body) -> Body:
        """The prefill leg: one token, not streamed."""
        body: Body = {"model": self.model, "prompt": ask.prompt.encoded, "temperature": 0, **self.extra}
        return body | {"max_tokens": 1, "stream": False, PARAMS: params}

    def decode_body(self, ask: Ask, params: Body) -> Body:
        """The decode leg."""
        return self.client_body(ask) | {PARAMS: params}

    def headers_of(self, ask: Ask) -> dict[str, str]:
        """The headers of each leg."""
        return {"Content-Type": "application/json", "X-Request-Id": ask.request, **self.headers}


class Dispatch(Protocol):
    """Sends requests; `prepare` comes first, once."""

    async def prepare(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Learn what must be known before the first request, with one small request of its own.

        Raises:
            LegError: an engine did not tell.
        """
        ...

    async def send(self, session: aiohttp.ClientSession, ask: Ask, seen: Seen) -> None:
        """Send one request and note its answer.

        Raises:
            LegError: it was not answered in full.
        """
        ...


@dataclass(frozen=True, slots=True)
class Direct:
    """One endpoint: an engine, or a router with everything behind it."""

    url: str
    style: Style

    async def prepare(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Nothing has to be known."""

    async def send(self, session: aiohttp.ClientSession, ask: Ask, seen: Seen) -> None:
        """One streamed completion."""
        await stream(session, self.url, self.style.client_body(ask), self.style.headers_of(ask), seen)


class FerryPush:
    """As kvferry's router sends a request in push mode."""

    def __init__(self, prefill: str, decode: str, style: Style) -> None:
        self._urls = prefill, decode
        self._style = style
        self._source: SourceParams | None = None

    async def prepare(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Ask the prefill engine for its coordinates; it holds nothing for it."""
        params = PrefillParams(transfer=_minted()).to_params() | {"probe": True}
        told = await answer(
            session, self._urls[0], self._style.prefill_body(ask, params), self._style.headers_of(ask)
        )
        try:
            self._source = parse_source(told.get(PARAMS))
        except HandoffError as error:
            raise LegError(f"{self._urls[0]} does not tell where its KV can be had: {error}") from error

    async def send(self, session: aiohttp.ClientSession, ask: Ask, seen: Seen) -> None:
        """Both legs at once, with a transfer id of their own."""
        if self._source is None:
            raise LegError("the prefill engine's coordinates are not known; call prepare first")
        transfer = _minted()
        produce = PrefillParams(transfer=transfer, mode="push").to_params()
        consume = DecodeParams(source=self._source, transfer=transfer, mode="push").to_params()
        await _both_legs(session, self._urls, self._style, ask, (produce, consume), seen)


class FerryPull:
    """As kvferry's router sends a request in pull mode."""

    def __init__(self, prefill: str, decode: str, style: Style) -> None:
        self._urls = prefill, decode
        self._style = style

    async def prepare(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Run one request through both engines, so that they know each other."""
        await self.send(session, ask, Seen(_no_time))

    async def send(self, session: aiohttp.ClientSession, ask: Ask, seen: Seen) -> None:
        """The prefill leg, then the decode leg with what it answered and a transfer id of their own."""
        params = PrefillParams(transfer=_minted(), mode="pull").to_params()
        consume = params | {"do_remote_prefill": True, "do_remote_decode": False}
        await _prefill_then_decode(session, self._urls, self._style, ask, seen, (params, consume))


class VllmPush:
    """As a router for vLLM's push connector sends a request."""

    def __init__(self, prefill: str, decode: str, style: Style) -> None:
        self._urls = prefill, decode
        self._style = style
        self._source: Body | None = None

    async def prepare(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Run one request through both engines, prefill first, and keep the prefill engine's coordinates."""
        told = await _prefill_then_decode(session, self._urls, self._style, ask, Seen(_no_time))
        keys = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size", "dcp_size")
        self._source = {key: told[key] for key in keys if key in told}

    async def send(self, session: aiohttp.ClientSession, ask: Ask, seen: Seen) -> None:
        """Both legs at once; the shared request id pairs them."""
        if self._source is None:
            raise LegError("the prefill engine's coordinates are not known; call prepare first")
        consume = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            # The engines cut off what each has appended to its copy of the id, and compare the rest.
            "remote_request_id": f"cmpl-{ask.request}-0",
            **self._source,
        }
        await _both_legs(session, self._urls, self._style, ask, (_producing(), consume), seen)


class VllmPull:
    """As a router for vLLM's pull connector sends a request."""

    def __init__(self, prefill: str, decode: str, style: Style) -> None:
        self._urls = prefill, decode
        self._style = style

    async def prepare(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Run one request through both engines, so that they know each other as under push."""
        await _prefill_then_decode(session, self._urls, self._style, ask, Seen(_no_time))

    async def send(self, session: aiohttp.ClientSession, ask: Ask, seen: Seen) -> None:
        """The prefill leg, then the decode leg with what it answered."""
        await _prefill_then_decode(session, self._urls, self._style, ask, seen)


def _producing() -> Body:
    return {"do_remote_decode": True, "do_remote_prefill": False}


async def _prefill_then_decode(
    session: aiohttp.ClientSession,
    urls: tuple[str, str],
    style: Style,
    ask: Ask,
    seen: Seen,
    params: tuple[Body, Body] | None = None,
) -> Body:
    """What the prefill engine answered. `params`: the prefill leg's, and what the decode leg says besides."""
    prefill, decode = urls
    produce, consume = params or (_producing(), {})
    headers = style.headers_of(ask)
    seen.sent = seen.now()
    sent = seen.sent
    told = (await answer(session, prefill, style.prefill_body(ask, produce), headers)).get(PARAMS)
    if not isinstance(told, dict):
        raise LegError(f"{prefill}: the answer carries no {PARAMS}; is its KV connector a producer?")
    await stream(session, decode, style.decode_body(ask, told | consume), headers, seen)
    seen.sent = sent
    return told


async def _both_legs(
    session: aiohttp.ClientSession,
    urls: tuple[str, str],
    style: Style,
    ask: Ask,
    params: tuple[Body, Body],
    seen: Seen,
) -> None:
    """The decode leg goes out first: its registration is what prefill shall find."""
    headers = style.headers_of(ask)
    try:
        async with asyncio.TaskGroup() as legs:
            legs.create_task(stream(session, urls[1], style.decode_body(ask, params[1]), headers, seen))
            legs.create_task(answer(session, urls[0], style.prefill_body(ask, params[0]), headers))
    except* LegError as group:
        # One failed leg ends the other; two may fail on their own, and the first says enough.
        raise group.exceptions[0] from None


def _minted() -> TransferId:
    return TransferId(secrets.token_hex(16))


def _no_time() -> float:
    return 0.0
