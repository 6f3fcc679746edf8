"""What emulated engines write about themselves while they run: one JSON object per line and file.

Wall-clock times are comparable because all engines and the load generator run on one machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvferry.errors import KvferryError

_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


class TimingError(KvferryError):
    """An engine's file cannot be read; the message names the file and the line."""


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="request"):
    """One request's life in one engine, written at its end. Nanoseconds of the wall clock.

    What an engine has no part in is None: a prefill engine receives nothing, a decode engine prefills none.
    """

    request: str
    """vLLM's id of it."""
    arrived_ns: int | None = None
    """In the scheduler."""
    scheduled_ns: int | None = None
    """In a step for the first time."""
    prefill_end_ns: int | None = None
    """On the device."""
    allocated_ns: int | None = None
    """Memory for what is to be received."""
    received_ns: int | None = None
    """The connector has told the scheduler that all KV is there."""
    first_step_ns: int | None = None
    """The first step that decodes is submitted to the device."""
    first_token_ns: int | None = None
    """That step's end on the device."""
    finished_ns: int | None = None


class HookTimes(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="hook"):
    """What a connector's hook has cost the engine's main thread since the start.

    `idle_*` is the part of the calls in which it had nothing to do for any request.
    """

    side: str
    hook: str
    count: int
    seconds: float
    cpu_seconds: float = 0.0
    max_seconds: float = 0.0
    idle_count: int = 0
    idle_seconds: float = 0.0
    idle_cpu_seconds: float = 0.0


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One step of the engine: what the cost model says it takes, and what it took."""

    intended_seconds: float
    actual_seconds: float
    idle_seconds: float = 0.0
    """How long the device had nothing to do before it, although an answer was running."""

    @property
    def late_seconds(self) -> float:
        """What the host has added: the device's wait for the step, and the engine's for its end."""
        return self.idle_seconds + self.actual_seconds - self.intended_seconds


class TransferTimes(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="transfer"):
    """One transfer of KV, as the engine that posted it saw it."""

    request: str
    """vLLM's id of the request that its notification names; empty where it names none."""
    posted_ns: int
    done_ns: int
    descriptors: int = 0
    operation: str = "WRITE"
    """`READ` when the engine that receives has posted it."""


class Verified(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="verified"):
    """Pages that were compared with what they should hold, and how many differed, since the start."""

    pages: int
    mismatches: int


Row = RequestTimes | HookTimes | StepTimes | TransferTimes | Verified


class _Kind(msgspec.Struct):
    kind: str = ""


_ROWS = msgspec.json.Decoder(Row)
_KINDS = msgspec.json.Decoder(_Kind)
_KNOWN = frozenset(("request", "hook", "step", "transfer", "verified"))


class TimingFile:
    """One engine's file, read as it grows. A file that is not there yet has no rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._line = 0

    def new_rows(self) -> list[Row]:
        """The rows since the last call; a line that is still being written waits for the next one.

        Raises:
            TimingError: a line cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = []
        for line in whole.splitlines():
            self._line += 1
            row = self._row(line)
            if row is not None:
                rows.append(row)
        return rows

    def _row(self, line: bytes) -> Row | None:
        """None for a kind that this version does not know."""
        try:
            return _ROWS.decode(line) if _KINDS.decode(line).kind in _KNOWN else None
        except msgspec.MsgspecError as error:
            raise TimingError(f"{self._path}, line {self._line}: {error}") from error


def request_of(engine_request: str) -> str:
    """The `X-Request-Id` in vLLM's id of a completion with one prompt."""
    return _SUFFIX.sub("", engine_request).removeprefix("cmpl-").removesuffix("-0")


def by_request(rows: Iterable[Row]) -> dict[str, RequestTimes]:
    """The requests among some rows by their `X-Request-Id`."""
    return {request_of(row.request): row for row in rows if isinstance(row, RequestTimes)}


def transfers_by_request(rows: Iterable[Row]) -> dict[str, list[TransferTimes]]:
    """The transfers among some rows by the `X-Request-Id` of the request that they name."""
    found: dict[str, list[TransferTimes]] = {}
    for row in rows:
        if isinstance(row, TransferTimes) and row.request:
            found.setdefault(request_of(row.request), []).append(row)
    return found
