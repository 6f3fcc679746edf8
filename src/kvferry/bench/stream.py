"""One leg of a request over HTTP: a whole answer, or a stream whose chunks are timed as they arrive."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from kvferry.errors import KvferryError

COMPLETIONS = "/v1/completions"
ANSWER_BYTES_MAX = 64 << 20
LINE_BYTES_MAX = 16 << 20
ERROR_CHARACTERS_MAX = 300


class LegError(KvferryError):
    """A leg was not answered in full; the message says which engine and what it said."""


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Seen:
    """What has arrived of one answer; `now` gives the time that chunks are stamped with."""

    now: Callable[[], float]
    chunks: list[float] = field(default_factory=list)
    sent: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    checksum: int | None = None

    def note(self, event: bytes) -> None:
        """Take in one event of a stream that has just arrived.

        Raises:
            LegError: it is an error, or cannot be read.
        """
        try:
            read = _EVENTS.decode(event)
        except msgspec.MsgspecError as error:
            raise LegError(f"an event that is no completion chunk: {error}") from error
        if read.error is not None:
            raise LegError(f"broke off: {shown(str(read.error))}")
        if read.usage is not None:
            self.prompt_tokens = read.usage.prompt_tokens
            self.completion_tokens = read.usage.completion_tokens or 0
        tokens = [token for choice in read.choices for token in choice.token_ids or ()]
        text = "".join(choice.text or "" for choice in read.choices)
        if tokens or text:
            self.chunks.append(self.now())
            # Joined so that it does not depend on where chunks were cut.
            said = "".join(f"{token}," for token in tokens) or text
            self.checksum = zlib.crc32(said.encode(), self.checksum or 0)


class Lines:
    """Cuts a stream of bytes into its `data:` payloads."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that are complete with these bytes.

        Raises:
            LegError: a line is longer than `LINE_BYTES_MAX`.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise LegError(f"a line of more than {LINE_BYTES_MAX} bytes in the stream")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def stream(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str], seen: Seen
) -> None:
    """Send a streamed completion to the engine at `url`, and note what arrives until `[DONE]`.

    Raises:
        LegError: it was not answered in full.
    """
    encoded = msgspec.json.encode(body)
    lines = Lines()
    with _named(url):
        seen.sent = seen.now()
        async with session.post(url + COMPLETIONS, data=encoded, headers=headers) as response:
            await _refuse_failure(response)
            done = False
            async for data in response.content.iter_any():
                for event in lines.feed(data):
                    if event == b"[DONE]":
                        done = True
                    elif not done:
                        seen.note(event)
        if not done:
            raise LegError("the stream ended before its answer did")


async def answer(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> dict[str, Any]:
    """Send a completion that is not streamed, and return the answer.

    Raises:
        LegError: it was not answered in full.
    """
    with _named(url):
        async with session.post(
            url + COMPLETIONS, data=msgspec.json.encode(body), headers=headers
        ) as response:
            await _refuse_failure(response)
            raw = await _bounded(response, ANSWER_BYTES_MAX)
        try:
            return msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise LegError(f"an answer that is no JSON object: {error}") from error


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Errors of the HTTP client become ours, and each says which engine it is about."""
    try:
        yield
    except LegError as error:
        raise LegError(f"{url}: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise LegError(f"{url}: the connection failed: {str(error) or type(error).__name__}") from error


async def _refuse_failure(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = (await _bounded(response, 1 << 20)).decode("utf-8", errors="replace")
        raise LegError(f"answered {response.status}: {shown(text)}")


async def _bounded(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > bytes_max:
            raise LegError(f"an answer of more than {bytes_max} bytes")
        parts.append(part)
    return b"".join(parts)


def shown(text: str) -> str:
    """Enough of a server's words to see what is wrong, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= ERROR_CHARACTERS_MAX else text[:ERROR_CHARACTERS_MAX] + "..."
