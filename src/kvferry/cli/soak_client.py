"""One request to a server, its reply whatever becomes of it, and what that reply is worth."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvferry.cli.requests import Collected
from kvferry.cli.soak_plan import Ask

COMPLETIONS = "/v1/completions"
_DETAIL_CHARACTERS_MAX = 300

Tokens = tuple[tuple[int, ...], ...]


class Kind(enum.StrEnum):
    """What became of a request."""

    RIGHT = "right"
    """Answered in full, and equal to the reference engine's answer."""
    WRONG = "wrong"
    """Some token differs from the reference engine's, however the answer ended."""
    FAILED = "failed"
    """Ended by an explicit error; what came before is right."""
    LEFT = "left"
    """The client hung up; what came before is right."""
    REJECTED = "rejected"
    """A 4xx, although the request is well-formed."""
    SILENT = "silent"
    """The connection or the stream ended without an answer and without an error."""
    LATE = "late"
    """Neither answer nor error within the bound."""


@dataclass(slots=True)
class Reply:
    """What has come back so far. While a request runs, other threads may read `heard` and nothing else."""

    collected: Collected = field(default_factory=Collected)
    heard: int = 0
    """Tokens that a stream has brought."""
    status: int | None = None
    whole: bool = False
    """Whether the answer came to its end."""
    error: str | None = None
    """An explicit error: an error body, or an error event in a stream."""
    broken: str | None = None
    """How the connection ended before the answer did."""
    left: bool = False
    """Whether it was the client who hung up."""
    late: bool = False
    """Whether the bound was over."""

    @property
    def tokens(self) -> Tokens:
        """The token ids of each choice."""
        return self.collected.answer(None).tokens


async def converse(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], reply: Reply, bound_seconds: float
) -> None:
    """Send a completion request and fill `reply` with what happens; raises nothing but cancellation."""
    try:
        async with (
            asyncio.timeout(bound_seconds),
            session.post(url + COMPLETIONS, json=body) as response,
        ):
            reply.status = response.status
            if response.status != 200:
                _read_error(await response.text(), reply)
            elif body.get("stream"):
                await _read_stream(response, reply)
            else:
                reply.collected.add(json.loads(await response.text()))
                reply.whole = True
    except TimeoutError:
        reply.late = True
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reply.broken = f"{type(error).__name__}: {error}"[:_DETAIL_CHARACTERS_MAX]


async def converse_as(
    session: aiohttp.ClientSession, url: str, ask: Ask, model: str, reply: Reply, bound_seconds: float
) -> None:
    """As `converse`, by a client who may leave early."""
    try:
        async with asyncio.timeout(ask.leaves_after_seconds):
            await converse(session, url, ask.body(model), reply, bound_seconds)
    except TimeoutError:
        reply.left = True


def worth(reply: Reply, expected: Tokens | None, *, direct: bool = False) -> tuple[Kind, str]:
    """The kind of a reply, and what there is to say about it.

    `expected` is the reference engine's answer, which a reply without tokens does without. `direct` says that
    the request went to an engine itself: its broken connection is as explicit as an engine can be.
    """
    tokens = reply.tokens
    if reply.whole and tokens != expected:
        return Kind.WRONG, f"{_shown(tokens)} instead of {_shown(expected or ())}"
    if not reply.whole and not _is_beginning(tokens, expected):
        return Kind.WRONG, f"began with {_shown(tokens)} instead of {_shown(expected or ())}"
    if reply.whole:
        return Kind.RIGHT, ""
    if reply.left:
        return Kind.LEFT, ""
    if reply.late:
        return Kind.LATE, f"after {sum(map(len, tokens))} tokens, status {reply.status}"
    if reply.error is not None:
        client_fault = reply.status is not None and 400 <= reply.status < 500 and reply.status != 429
        return (Kind.REJECTED if client_fault else Kind.FAILED), f"{reply.status}: {reply.error}"
    detail = reply.broken or "the stream ended before its answer did"
    return (Kind.FAILED if direct else Kind.SILENT), detail


def _is_beginning(tokens: Tokens, expected: Tokens | None) -> bool:
    if not any(tokens):
        return True
    if expected is None or len(tokens) > len(expected):
        return False
    # All choices are greedy answers to one prompt and therefore alike; the first may not have begun yet.
    return all(part == expected[0][: len(part)] for part in tokens)


def _read_error(text: str, reply: Reply) -> None:
    try:
        told = json.loads(text)["error"]
    except (ValueError, TypeError, KeyError):
        reply.broken = f"status {reply.status} without an error that can be read: {text[:100]!r}"
        return
    message = told.get("message", told) if isinstance(told, dict) else told
    reply.error = str(message)[:_DETAIL_CHARACTERS_MAX]


async def _read_stream(response: aiohttp.ClientResponse, reply: Reply) -> None:
    async for line in response.content:
        name, _, value = line.decode("utf-8").strip().partition(":")
        if name != "data":
            continue
        if value.strip() == "[DONE]":
            reply.whole = reply.error is None
            return
        event = json.loads(value)
        if "error" in event:
            reply.error = json.dumps(event["error"])[:_DETAIL_CHARACTERS_MAX]
        else:
            reply.collected.add(event)
            reply.heard += sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))


def _shown(tokens: Tokens) -> str:
    return " | ".join(
        ",".join(map(str, choice[:12])) + ("..." if len(choice) > 12 else "") for choice in tokens
    )
