"""The load generator on virtual time: when requests go out, what counts, what ends it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence

import aiohttp
import pytest
from vllm import envs

from kvferry.bench import load as subject
from kvferry.bench.dispatch import Ask, asks_of
from kvferry.bench.load import LoadLimits, run_load
from kvferry.bench.prompts import token_prompts
from kvferry.bench.records import Load, Record
from kvferry.bench.stream import LegError, Seen
from kvferry.bench.virtual_time import run_virtually
from kvferry.errors import UsageError


class Server:
    """Answers each request after its seconds, or the usual ones; with two tokens, the first at half time."""

    def __init__(self, seconds: float = 0.5, special: Mapping[str, float] | None = None) -> None:
        self.seconds = seconds
        self.special = special or {}
        self.failing: dict[str, str] = {}
        self.silent: set[str] = set()
        self.most = 0
        self._running = 0

    async def prepare(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        """Nothing to prepare."""

    async def send(self, session: aiohttp.ClientSession, ask: Ask, seen: Seen) -> None:
        """Answer."""
        seen.sent = seen.now()
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            seconds = self.special.get(ask.request, self.seconds)
            await asyncio.sleep(seconds / 2)
            if ask.request in self.failing:
                raise LegError(self.failing[ask.request])
            if ask.request in self.silent:
                return
            seen.chunks.append(seen.now())
            await asyncio.sleep(seconds / 2)
            seen.chunks.append(seen.now())
            seen.completion_tokens = 2
        finally:
            self._running -= 1


def run(
    server: Server,
    due: Sequence[float] | None,
    *,
    count: int | None = None,
    heard: list[Record] | None = None,
    **limits: float,
) -> Load:
    count = len(due) if due is not None and count is None else count
    asks = asks_of("r", token_prompts(count or 0, 4, (0, 9), seed=1), 2)

    async def work() -> Load:
        session = aiohttp.ClientSession()
        note = functools.partial(list.append, [] if heard is None else heard)
        try:
            return await run_load(session, server, asks, due, LoadLimits(**limits), note)  # type: ignore[arg-type]
        finally:
            await session.close()

    return run_virtually(work())


def by_name(load: Load) -> dict[str, Record]:
    return {record.request: record for record in load.records}


def test_requests_go_out_when_they_are_due_however_slow_the_server_is() -> None:
    due = [0.0, 0.1, 0.15, 2.0]
    load = run(Server(seconds=30.0), due)
    found = by_name(load)
    assert [found[f"r-{position}"].sent for position in range(4)] == pytest.approx(due)
    assert load.seconds == pytest.approx(32.0)


def test_latency_counts_from_the_due_moment_when_a_slot_is_waited_for() -> None:
    load = run(Server(seconds=1.0), [0.0, 0.1, 0.2], concurrency_max=1)
    found = by_name(load)
    assert [found[f"r-{position}"].sent for position in range(3)] == pytest.approx([0.0, 1.0, 2.0])
    assert [found[f"r-{position}"].ttft_seconds for position in range(3)] == pytest.approx([0.5, 1.4, 2.3])


def test_a_late_request_does_not_move_those_behind_it() -> None:
    load = run(Server(seconds=0.1), [0.0, 1.0, 2.0, 3.0], concurrency_max=1)
    assert sorted(record.due for record in load.records) == [0.0, 1.0, 2.0, 3.0]
    assert sorted(record.sent or 0.0 for record in load.records) == pytest.approx([0.0, 1.0, 2.0, 3.0])


def test_without_a_schedule_a_request_is_due_when_a_slot_is_free() -> None:
    server = Server(seconds=1.0)
    load = run(server, None, count=5, concurrency_max=2)
    assert server.most == 2
    assert sorted(record.due for record in load.records) == pytest.approx([0.0, 0.0, 1.0, 1.0, 2.0])
    assert {record.ttft_seconds for record in load.records} == {0.5}


def test_without_any_limit_all_go_out_at_once() -> None:
    server = Server()
    run(server, None, count=7)
    assert server.most == 7


def test_a_failed_request_is_recorded_and_the_rest_goes_on() -> None:
    server = Server()
    server.failing["r-1"] = "answered 503: unwell"
    server.silent.add("r-2")
    load = run(server, [0.0, 0.1, 0.2, 0.3])
    errors = {name: record.error for name, record in by_name(load).items()}
    assert errors == {
        "r-0": None,
        "r-1": "answered 503: unwell",
        "r-2": "answered without a token",
        "r-3": None,
    }
    assert by_name(load)["r-1"].end is None


def test_a_request_that_takes_too_long_is_given_up() -> None:
    load = run(Server(special={"r-0": 1e9}), [0.0, 0.1], request_seconds_max=5.0)
    assert by_name(load)["r-0"].error == "not answered within 5 s"
    assert by_name(load)["r-1"].error is None
    assert load.seconds == pytest.approx(5.0)


def test_what_is_beyond_the_bound_is_not_sent_but_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "IN_FLIGHT_MAX", 2)
    load = run(Server(seconds=10.0), [0.0, 0.1, 0.2])
    assert by_name(load)["r-2"].error == "not sent: 2 requests were in flight"
    assert by_name(load)["r-2"].sent is None


def test_each_record_is_told_as_it_comes() -> None:
    heard: list[Record] = []
    load = run(Server(), [0.0, 0.1], heard=heard)
    assert tuple(heard) == load.records


def test_requests_and_moments_belong_together() -> None:
    with pytest.raises(ValueError, match="3 requests and 1 moments"):
        run(Server(), [0.0], count=3)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"concurrency_max": 0}, "--max-concurrency must be from 1 to 4096, not 0"),
        ({"request_seconds_max": 0.0}, "--request-seconds must be above 0, not 0"),
    ],
)
def test_limits_that_are_none_are_refused(limits: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LoadLimits(**limits)  # type: ignore[arg-type]


async def test_idle_connections_end_before_vllms_server_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", raising=False)
    assert subject.IDLE_CONNECTION_SECONDS < envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    async with subject.client() as session:
        assert session.connector._keepalive_timeout == subject.IDLE_CONNECTION_SECONDS
