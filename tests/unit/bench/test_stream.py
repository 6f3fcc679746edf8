"""One leg over HTTP: what is noted of a stream, and how each failure is told."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import aiohttp
import pytest

from kvferry.bench import stream as subject
from kvferry.bench.stream import LegError, Lines, Seen, answer, shown, stream
from tests.support.stub_engines import StubEngine, serving

HEADERS = {"X-Request-Id": "r-0"}


def ticking() -> Seen:
    ticks: Iterator[int] = itertools.count()
    return Seen(lambda: float(next(ticks)))


def event(**fields: object) -> bytes:
    return json.dumps(fields).encode()


async def streamed(engine: StubEngine, seen: Seen, tokens: int = 3) -> None:
    async with serving(engine) as url, aiohttp.ClientSession() as session:
        body = {"prompt": [1, 2], "max_tokens": tokens, "stream": True}
        await stream(session, url, body, HEADERS, seen)


async def test_each_chunk_with_tokens_is_timed_and_usage_is_the_servers() -> None:
    seen = ticking()
    await streamed(StubEngine(), seen, tokens=3)
    assert seen.sent == 0.0
    assert seen.chunks == [1.0, 2.0, 3.0]
    assert (seen.prompt_tokens, seen.completion_tokens) == (2, 3)


def test_lines_are_cut_wherever_the_network_cut_them() -> None:
    whole = b": a comment\r\ndata: one\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]\n\n"
    for width in (1, 2, 5, len(whole)):
        lines = Lines()
        found = [
            payload
            for start in range(0, len(whole), width)
            for payload in lines.feed(whole[start : start + width])
        ]
        assert found == [b"one", b"two", b"[DONE]"]


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "LINE_BYTES_MAX", 10)
    with pytest.raises(LegError, match="a line of more than 10 bytes"):
        list(Lines().feed(b"data: 0123456789"))


def test_events_without_tokens_are_no_chunks() -> None:
    seen = ticking()
    seen.note(event(choices=[{"text": "", "index": 0}]))
    seen.note(event(choices=[]))
    assert seen.chunks == []
    seen.note(event(choices=[{"text": "", "token_ids": [4]}]))
    seen.note(event(choices=[{"text": "word"}]))
    assert seen.chunks == [0.0, 1.0]


def test_equal_answers_have_equal_checksums_however_they_are_cut() -> None:
    one, other, wrong = ticking(), ticking(), ticking()
    one.note(event(choices=[{"token_ids": [4, 5, 6]}]))
    for tokens in ([4], [5, 6]):
        other.note(event(choices=[{"token_ids": tokens}]))
    wrong.note(event(choices=[{"token_ids": [4, 5, 7]}]))
    assert one.checksum == other.checksum != wrong.checksum
    whole, cut = ticking(), ticking()
    whole.note(event(choices=[{"text": "two words"}]))
    for text in ("two", " words"):
        cut.note(event(choices=[{"text": text}]))
    assert whole.checksum == cut.checksum != one.checksum


async def test_an_error_event_ends_the_leg_with_the_servers_words() -> None:
    engine = StubEngine()
    engine.events = [b'data: {"error": {"message": "no memory"}}\n\n', b"data: [DONE]\n\n"]
    with pytest.raises(LegError, match=r"http://.*: broke off: .*no memory"):
        await streamed(engine, ticking())


async def test_a_stream_without_its_end_is_no_answer() -> None:
    engine = StubEngine()
    engine.events = [b'data: {"choices": [{"text": "a"}]}\n\n']
    with pytest.raises(LegError, match="the stream ended before its answer did"):
        await streamed(engine, ticking())


async def test_what_is_no_chunk_is_refused() -> None:
    engine = StubEngine()
    engine.events = [b"data: {nonsense\n\n"]
    with pytest.raises(LegError, match="an event that is no completion chunk"):
        await streamed(engine, ticking())


async def test_another_status_is_told_with_the_engines_words() -> None:
    engine = StubEngine("prefill")
    engine.status = 503
    with pytest.raises(LegError, match=r"http://.*: answered 503: .*prefill is unwell"):
        await streamed(engine, ticking())


async def test_an_engine_that_is_not_there_is_told() -> None:
    async with serving(StubEngine()) as url:
        pass
    async with aiohttp.ClientSession() as session:
        with pytest.raises(LegError, match=f"{url}: the connection failed"):
            await answer(session, url, {}, HEADERS)


async def test_a_whole_answer_is_read_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StubEngine(params={"remote_port": 7})
    async with serving(engine) as url, aiohttp.ClientSession() as session:
        assert (await answer(session, url, {"a": 1}, HEADERS))["kv_transfer_params"] == {"remote_port": 7}
        assert engine.bodies == [{"a": 1}]
        assert engine.asked[0][1]["X-Request-Id"] == "r-0"
        monkeypatch.setattr(subject, "ANSWER_BYTES_MAX", 5)
        with pytest.raises(LegError, match="an answer of more than 5 bytes"):
            await answer(session, url, {}, HEADERS)


def test_an_error_is_one_line_and_not_endless() -> None:
    assert shown("x" * 400) == "x" * 300 + "..."
    assert shown("short,\n  on two lines") == "short, on two lines"
