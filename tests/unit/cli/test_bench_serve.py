"""The command line of `kvferry bench serve`: options, report, file, exit code and last line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.bench.records import Load, Record
from kvferry.bench.serve import ServeOptions, result
from kvferry.cli import bench_serve
from kvferry.cli import main as cli
from tests.support.stub_openai import StubOpenAI

LOAD = ["--model", "tiny", "--num-prompts", "4", "--random-input-len", "5", "--random-output-len", "3"]


def serve(url: str, *more: str) -> int:
    return cli.main(["bench", "serve", "--base-url", url, *LOAD, *more])


def test_a_load_is_sent_reported_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    with StubOpenAI() as stub:
        assert serve(stub.url, "--save-result", str(file), "--goodput", "ttft:60000", "--api-key", "k") == 0
        assert len(stub.bodies) == 4
        assert stub.bodies[0]["ignore_eos"] is True
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[:5]] == ["ms", "ttft", "tpot", "itl", "e2el"]
    assert out[-1].startswith("4 of 4 requests answered in ")
    assert "goodput" in out[-1]
    told = json.loads(file.read_text())
    assert len(told["requests"]) == 4
    assert told["totals"]["failed"] == 0
    assert '"k"' not in file.read_text().replace('"kind"', "")


def test_a_failed_request_fails_the_command_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with StubOpenAI() as stub:
        stub.status = 503
        assert serve(stub.url) == 1
    out = capsys.readouterr().out.splitlines()
    failed = [line for line in out if line.startswith("failed ")]
    assert sum(int(line.split()[1]) for line in failed) == 4
    assert "answered 503" in out[0]
    assert out[-1].startswith("0 of 4 requests answered in ")


def test_failures_that_differ_in_a_number_are_told_once_with_the_flag_that_helps() -> None:
    errors = [f"Token id {number} is out of vocabulary" for number in (29952, 7)]
    load = SimpleNamespace(failures=[SimpleNamespace(error=error) for error in [*errors, "no answer"]])
    first, second, hint = bench_serve._failures(load)
    assert first == "failed 2 x: Token id 29952 is out of vocabulary"
    assert second == "failed 1 x: no answer"
    assert "--vocabulary FIRST:END" in hint


def test_only_the_metrics_that_are_asked_for_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with StubOpenAI() as stub:
        assert serve(stub.url, "--percentile-metrics", "e2el", "--no-ignore-eos") == 0
        assert "ignore_eos" not in stub.bodies[0]
    table = capsys.readouterr().out.splitlines()[:-2]
    assert [line.split()[0] for line in table] == ["ms", "e2el"]


def test_texts_and_more_keys_can_be_sent() -> None:
    with StubOpenAI() as stub:
        assert serve(stub.url, "--prompt-kind", "text", "--extra-body", '{"top_k": 1}') == 0
        assert {len(body["prompt"].split()) for body in stub.bodies} == {5}
        assert stub.bodies[0]["top_k"] == 1


def answered(position: int, tokens: int) -> Record:
    chunks = (position + 0.5, position + 0.9)
    return Record(
        request=f"r-{position}", due=position, chunks=chunks, end=chunks[1], completion_tokens=tokens
    )


def told_of(*tokens: int, metrics: tuple[str, ...] = ("ttft", "tpot")) -> list[str]:
    """The report of requests that were answered with so many tokens each."""
    records = tuple(answered(position, count) for position, count in enumerate(tokens))
    load = Load(started_ns=0, seconds=9.0, records=records)
    options = ServeOptions(url="http://h:1", model="tiny")
    return bench_serve.lines(load, result(options, load, metrics))


def test_the_time_per_token_says_of_how_many_requests_it_is_and_why_not_of_more() -> None:
    head, ttft, tpot, single, uncounted, *_ = told_of(5, 5, 1, 0, 0)
    assert (head.split()[-1], ttft.split()[-1], tpot.split()[-1]) == ("samples", "5", "2")
    assert tpot.split()[:3] == ["tpot", "100.00", "100.00"]
    assert single == "not in tpot: 1 requests had one token, and none after it"
    assert uncounted == "not in tpot: of 2 the server did not count the tokens (no `usage` in the stream)"


def test_where_every_token_is_the_only_one_there_is_no_row_but_the_reason() -> None:
    _, ttft, reason, *_ = told_of(1, 1)
    assert ttft.startswith("ttft")
    assert reason.startswith("not in tpot: 2 requests had one token")


def test_nothing_is_said_of_a_time_per_token_that_is_whole_or_not_asked_for() -> None:
    assert not [line for line in told_of(5, 2) if line.startswith("not in")]
    assert not [line for line in told_of(5, 1, metrics=("ttft",)) if line.startswith("not in")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--request-rate", "0"], "--request-rate must be above 0 (inf sends all at once), not 0.0"),
        (["--max-concurrency", "0"], "--max-concurrency must be from 1 to 4096, not 0"),
        (["--vocabulary", "many"], "--vocabulary must be FIRST:END, such as 1000:30000, not 'many'"),
        (["--extra-body", "[1]"], "--extra-body must be a JSON object, such as '{\"top_k\": 1}'"),
        (
            ["--save-result", "/nowhere/r.json"],
            "--save-result: there is no directory /nowhere; make it first",
        ),
        (["--num-prompts", "0"], "--num-prompts must be from 1 to 1000000, not 0"),
        (["--request-seconds", "0"], "--request-seconds must be above 0, not 0.0"),
    ],
)
def test_impossible_options_say_what_is_possible(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve("http://127.0.0.1:9", *arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"kvferry: {said}"


def test_what_is_no_json_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("http://127.0.0.1:9", "--extra-body", "{") == 2
    assert capsys.readouterr().err.startswith("kvferry: --extra-body is not JSON: ")
