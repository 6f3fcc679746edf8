"""Where the time to first token goes: a request's way, cut at milestones that client and engines noted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvferry.bench.records import Record
from kvferry.bench.timing import RequestTimes, TransferTimes

PHASES = {
    "send": "from due until the prefill engine's scheduler has it",
    "queue": "until its first chunk is computed",
    "prefill": "until its last chunk has been computed",
    "registration": "after prefill, until the decode engine has memory for it",
    "match": "until the first transfer is posted",
    "write": "until the last transfer is complete",
    "read": "the same where the decode engine fetches it",
    "notice": "until the decode engine's scheduler knows",
    "transfer": "match, write or read, and notice together, where engines do not tell them apart",
    "wait": "until its first decode step starts",
    "first step": "until that step has ended",
    "answer": "until the client has the first token",
}
"""Phases in order. What has happened before its phase's turn costs nothing in it: it was hidden."""

_NANOSECONDS = 1_000_000_000


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """One request's phases in seconds, in order; together they are its time to first token.

    A phase whose milestone nobody noted is missing, and its time is in the next one. `handover` is from the
    end of prefill to the first token on the decode engine's device, `received` to the report that all is
    there. `moving` is for how long at least one transfer of its KV was posted and not seen to be complete.
    """

    request: str
    seconds: dict[str, float]
    handover: float | None = None
    received: float | None = None
    moving: float | None = None


def phases(
    record: Record,
    started_ns: int,
    prefill: RequestTimes | None,
    decode: RequestTimes | None,
    transfers: Sequence[TransferTimes] = (),
) -> Phases | None:
    """Cut one request's way; None when it has no first token or neither engine noted it."""
    if not record.chunks or (prefill is None and decode is None):
        return None
    found: dict[str, float] = {}
    at = record.due
    for name, moment in _milestones(record, started_ns, prefill, decode, transfers):
        if moment is None:
            continue
        # Clocks of one machine, but a stamp may still be taken a little late.
        reached = min(max(at, moment), record.chunks[0])
        found[name] = round(reached - at, 6)
        at = reached
    end = prefill.prefill_end_ns if prefill else None
    return Phases(
        request=record.request,
        seconds=found,
        handover=_between(end, decode.first_token_ns if decode else None),
        received=_between(end, decode.received_ns if decode else None),
        moving=_moving(transfers),
    )


def as_fetched(one: Phases) -> Phases:
    """The same where the decode engine fetched: runs from before there was a phase `read` call it `write`."""
    if "write" not in one.seconds:
        return one
    renamed = {"read" if name == "write" else name: seconds for name, seconds in one.seconds.items()}
    return msgspec.structs.replace(one, seconds=renamed)


def _milestones(
    record: Record,
    started_ns: int,
    prefill: RequestTimes | None,
    decode: RequestTimes | None,
    transfers: Sequence[TransferTimes],
) -> Iterator[tuple[str, float | None]]:
    def seconds(nanoseconds: int | None) -> float | None:
        return None if nanoseconds is None else (nanoseconds - started_ns) / _NANOSECONDS

    yield "send", seconds(prefill.arrived_ns) if prefill else None
    yield "queue", seconds(prefill.scheduled_ns) if prefill else None
    yield "prefill", seconds(prefill.prefill_end_ns) if prefill else None
    yield "registration", seconds(decode.allocated_ns) if decode else None
    if transfers:
        yield "match", seconds(min(one.posted_ns for one in transfers))
        moved = "read" if all(one.operation == "READ" for one in transfers) else "write"
        yield moved, seconds(max(one.done_ns for one in transfers))
    yield "notice" if transfers else "transfer", seconds(decode.received_ns) if decode else None
    yield "wait", seconds(decode.first_step_ns) if decode else None
    yield "first step", seconds(decode.first_token_ns) if decode else None
    yield "answer", record.chunks[0]


def _moving(transfers: Sequence[TransferTimes]) -> float | None:
    """The length of the union of their times."""
    if not transfers:
        return None
    total, reached = 0, 0
    for posted_ns, done_ns in sorted((one.posted_ns, one.done_ns) for one in transfers):
        total += max(done_ns - max(posted_ns, reached), 0)
        reached = max(reached, done_ns)
    return round(total / _NANOSECONDS, 6)


def _between(start_ns: int | None, end_ns: int | None) -> float | None:
    if start_ns is None or end_ns is None:
        return None
    return round((end_ns - start_ns) / _NANOSECONDS, 6)
