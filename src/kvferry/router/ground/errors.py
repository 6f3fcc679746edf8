"""Why a request ends without its answer, and how that looks to the client.

Every error of the router has a `Cause`, which is also the label of the metric and the `kvferry` field of the
error body, so that an operator finds the same word in all three.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.errors import KvferryError

JSON = "application/json"


class Cause(enum.StrEnum):
    """Why a request ended as it did; bounded, for it is a metric's label."""

    NONE = "none"
    # Served, but without a hand-over.
    NO_PREFILL = "no_prefill"
    PREFILL_FAILED = "prefill_failed"
    NOTHING_HELD = "nothing_held"
    """Pull: the prefill engine's answer names no KV that could be fetched."""
    NEEDS_WHOLE_PROMPT = "needs_whole_prompt"
    """The answer contains something about the prompt that only the engine that computed it can tell."""
    SHORT_PROMPT = "short_prompt"
    """It has fewer tokens than are handed over, see `--local-prefill-below`."""
    # Not served.
    INVALID_REQUEST = "invalid_request"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    BODY_TOO_LARGE = "body_too_large"
    OVERLOADED = "overloaded"
    QUEUE_TIMEOUT = "queue_timeout"
    SHUTTING_DOWN = "shutting_down"
    PREFILL_REJECTED = "prefill_rejected"
    PREFILL_REFUSED = "prefill_refused"
    PREFILL_LOST = "prefill_lost"
    PREFILL_ERROR = "prefill_error"
    PREFILL_SLOW = "prefill_slow"
    DECODE_REJECTED = "decode_rejected"
    DECODE_REFUSED = "decode_refused"
    DECODE_LOST = "decode_lost"
    DECODE_ERROR = "decode_error"
    DECODE_SLOW = "decode_slow"
    NO_DECODE = "no_decode"
    TIMEOUT = "timeout"
    CLIENT_GONE = "client_gone"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What an engine answered instead of success, to be passed on as it is."""

    status: int
    body: bytes
    content_type: str
    retry_after: str | None = None


class RequestError(KvferryError):
    """A request ends with `status` and `cause`.

    `param` names the field of the body at fault. `answer` is an engine's own answer: with a 4xx the client
    gets it unchanged. `allowed` are the methods that the path has, for a 405.
    """

    def __init__(
        self,
        status: int,
        cause: Cause,
        message: str,
        *,
        param: str | None = None,
        answer: EngineAnswer | None = None,
        retry_after_seconds: int | None = None,
        allowed: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause
        self.message = message
        self.param = param
        self.answer = answer
        self.retry_after_seconds = retry_after_seconds
        self.allowed = allowed
        self.request_id = ""
        """That of the request that it ended, where one was given or made."""

    def body(self) -> bytes:
        """The HTTP body: the engine's own for a 4xx of an engine, else an error in OpenAI's shape."""
        if self.answer is not None and self.answer.status < 500:
            return self.answer.body
        return msgspec.json.encode(self.shape())

    def content_type(self) -> str:
        """The content type of `body`."""
        passed_on = self.answer is not None and self.answer.status < 500
        return self.answer.content_type if passed_on and self.answer is not None else JSON

    def headers(self) -> dict[str, str]:
        """Headers that go with `body`."""
        headers = {"X-Kvferry-Cause": self.cause.value}
        if self.status == 401 and self.answer is None:
            headers["WWW-Authenticate"] = "Bearer"
        if self.allowed:
            headers["Allow"] = ", ".join(self.allowed)
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(self.retry_after_seconds)
        elif self.answer is not None and self.answer.retry_after is not None:
            headers["Retry-After"] = self.answer.retry_after
        return headers

    def shape(self) -> dict[str, Any]:
        """The error in OpenAI's shape, also inside a stream."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": _type_of(self.status),
            "param": self.param,
            "code": self.status,
            "kvferry": self.cause.value,
        }
        return {"error": error}


def invalid(param: str, problem: str) -> RequestError:
    """A 400 that names the field."""
    return RequestError(400, Cause.INVALID_REQUEST, f"{param}: {problem}", param=param)


def nobody_decodes() -> RequestError:
    """A 503 for a request that needs a decode engine, when none is ready."""
    message = "no decode engine is ready; see /workers"
    return RequestError(503, Cause.NO_DECODE, message, retry_after_seconds=1)


def not_allowed(path: str, method: str, allowed: Sequence[str]) -> RequestError:
    """A 405 that names the methods that the path has."""
    message = f"{path}: {method} is not one of {', '.join(allowed)}"
    return RequestError(405, Cause.NOT_FOUND, message, allowed=allowed)


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


class EventTooLongError(ValueError):
    """One event of a stream is longer than the router takes."""
