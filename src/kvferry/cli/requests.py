"""A small blocking client for one OpenAI-compatible server, that remembers when the first token came."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvferry.errors import KvferryError

ERROR_CHARACTERS_MAX = 500


class RequestError(KvferryError):
    """The server did not answer, or not with 200; the message has its words."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: one text and one list of token ids per choice, in the order of their indexes."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    """Empty lists where the server was not asked for token ids, or cannot give them."""
    finish_reasons: tuple[str | None, ...]
    prompt_tokens: int
    """Of all prompts together, as the server counts them; 0 where it does not."""
    first_token_seconds: float | None
    """From sending the request; None when the answer was not streamed."""


def fetch(url: str, path: str, *, seconds: float) -> str:
    """The body of a GET."""
    with _Exchange(url, seconds) as exchange:
        return exchange.send("GET", path, None).read().decode("utf-8")


def ask(url: str, path: str, body: dict[str, Any], *, seconds: float) -> Answer:
    """Send a completion or chat request, streamed if the body says so.

    Raises:
        RequestError: no answer within `seconds` of silence, or another status than 200, or an error event.
    """
    collected = Collected()
    with _Exchange(url, seconds) as exchange:
        began = time.monotonic()
        response = exchange.send("POST", path, body)
        if not body.get("stream"):
            collected.add(json.loads(response.read()))
            return collected.answer(None)
        first: float | None = None
        for event in _events(response):
            if "error" in event:
                raise RequestError(f"{url}{path} broke off: {_shown(json.dumps(event['error']))}")
            if collected.add(event) and first is None:
                first = time.monotonic() - began
        return collected.answer(first)


class _Exchange:
    """One request on a connection of its own."""

    def __init__(self, url: str, seconds: float) -> None:
        parts = urlsplit(url)
        self._url = url
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._connection.close()
        if isinstance(error, OSError | http.client.HTTPException):
            raise RequestError(f"{self._url} gave no whole answer: {error!r}") from error

    def send(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        payload = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        self._connection.request(method, path, payload, headers)
        response = self._connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            text = response.read().decode("utf-8", errors="replace")
            raise RequestError(f"{self._url}{path} answered {response.status}: {_shown(text)}")
        return response


class Collected:
    """Puts the choices of one answer, or of the events of a stream, together."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._texts: dict[int, str] = {}
        self._tokens: dict[int, list[int]] = {}
        self._finish: dict[int, str | None] = {}
        self._prompt_tokens = 0

    def add(self, event: dict[str, Any]) -> bool:
        """Whether the event brought text or tokens."""
        news = False
        self._prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", self._prompt_tokens)
        for choice in event.get("choices", ()):
            index = choice["index"]
            part = choice.get("delta") or choice.get("message") or choice
            text = part.get("text") or part.get("content") or ""
            tokens = choice.get("token_ids") or ()
            self._texts[index] = self._texts.get(index, "") + text
            self._tokens.setdefault(index, []).extend(tokens)
            self._finish[index] = choice.get("finish_reason") or self._finish.get(index)
            news = news or bool(text) or bool(tokens)
        return news

    def answer(self, first_token_seconds: float | None) -> Answer:
        """What has come so far."""
        indexes = sorted(self._texts)
        return Answer(
            texts=tuple(self._texts[index] for index in indexes),
            tokens=tuple(tuple(self._tokens[index]) for index in indexes),
            finish_reasons=tuple(self._finish[index] for index in indexes),
            prompt_tokens=self._prompt_tokens,
            first_token_seconds=first_token_seconds,
        )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        name, _, value = line.decode("utf-8").strip().partition(":")
        if name == "data" and value.strip() != "[DONE]":
            yield json.loads(value)


def _shown(text: str) -> str:
    return text if len(text) <= ERROR_CHARACTERS_MAX else text[:ERROR_CHARACTERS_MAX] + "..."
