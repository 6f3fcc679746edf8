"""The demo's cases, its comparison of two sides, and its table, against stub servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import demo, main
from kvferry.cli.demo import compare, demo_deployment, same, token_bytes
from kvferry.cli.demo_cases import Case, demo_cases, expected_blocks, request_body
from kvferry.cli.demo_report import Outcome, table, verdict
from kvferry.cli.engines import Deployment, Endpoints
from kvferry.cli.fleet import Fleet
from kvferry.cli.requests import Answer
from kvferry.handoff import TransferMode
from tests.support.stub_openai import StubOpenAI

BLOCK = 128
CHUNK = 512
TRANSFERS: tuple[TransferMode, ...] = ("push", "pull")
LAYERS, KV_HEADS, HEAD = 4, 2, 64
BLOCK_BYTES = BLOCK * 2 * LAYERS * KV_HEADS * HEAD * 4


def cases() -> list[Case]:
    return demo_cases(block_tokens=BLOCK, chunk_tokens=CHUNK, seed=0)


# --- cases ---------------------------------------------------------------------------------------


def test_the_cases_have_every_shape_of_prompt() -> None:
    listed = cases()
    assert len(listed) >= 8
    lengths = [case.prompt_lengths(0) for case in listed if isinstance(case.body.get("prompt"), list)]
    single = [found[0] for found in lengths if len(found) == 1]
    assert 1 in single
    assert BLOCK in single
    assert any(tokens > BLOCK and tokens % BLOCK == 0 for tokens in single)
    assert any(BLOCK < tokens < CHUNK and tokens % BLOCK for tokens in single)
    assert sum(tokens > 4 * CHUNK for tokens in single) >= 2
    assert any(len(found) > 1 for found in lengths)
    assert any("messages" in case.body and case.body["stream"] for case in listed)
    assert any("messages" in case.body and not case.body["stream"] for case in listed)
    assert next(case.body for case in listed if case.answers == 2)["top_k"] == 1
    assert len({case.name for case in listed}) == len(listed)


def test_the_cases_follow_from_the_seed() -> None:
    assert cases() == cases()
    assert cases() != demo_cases(block_tokens=BLOCK, chunk_tokens=CHUNK, seed=1)


def test_no_two_prompts_of_tokens_begin_alike() -> None:
    """Otherwise a prefix cache would answer for the transfer."""
    prompts = []
    for case in cases():
        prompt = case.body.get("prompt")
        if isinstance(prompt, list):
            prompts += prompt if isinstance(prompt[0], list) else [prompt]
    assert len({tuple(prompt[:BLOCK]) for prompt in prompts}) == len(prompts) > 8


def test_a_body_asks_for_greedy_token_ids_and_keeps_what_the_case_says() -> None:
    streamed = Case("x", "/v1/completions", {"prompt": [1], "stream": True})
    body = request_body(streamed, "tiny")
    assert body["model"] == "tiny"
    assert body["temperature"] == 0
    assert body["return_token_ids"] is True
    assert body["stream_options"] == {"include_usage": True}
    whole = Case("x", "/v1/completions", {"prompt": [1], "stream": False, "temperature": 1})
    assert request_body(whole, "tiny")["temperature"] == 1
    assert "stream_options" not in request_body(whole, "tiny")


@pytest.mark.parametrize(
    ("lengths", "answers", "cached", "blocks"),
    [
        ([1], 1, 0, 0),
        ([2], 1, 0, 1),
        ([BLOCK], 1, 0, 1),
        ([BLOCK + 1], 1, 0, 2),
        ([BLOCK + 1], 1, BLOCK, 1),
        ([BLOCK + 1], 2, 0, 4),
        ([BLOCK + 1], 2, BLOCK, 3),
        ([3, BLOCK + 1, 1], 1, 0, 3),
    ],
)
def test_expected_blocks(lengths: list[int], answers: int, cached: int, blocks: int) -> None:
    assert expected_blocks(lengths, answers=answers, cached_tokens=cached, block_tokens=BLOCK) == blocks


def test_the_bytes_of_a_token_follow_from_the_models_shape(tmp_path: Path) -> None:
    assert token_bytes(model_config(tmp_path)) * BLOCK == BLOCK_BYTES


# --- comparison ----------------------------------------------------------------------------------


def model_config(directory: Path) -> Path:
    config = directory / "config.json"
    shape = {"num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD}
    config.write_text(json.dumps(shape))
    return config


@dataclass
class World:
    """A router, its two engines' metrics and a reference, all stubs. The flags are ways of being wrong."""

    mode: TransferMode = "push"
    missing_bytes: int = 0
    computed_extra: int = 0
    moved: int = 0
    computed: int = 0
    received: int = 0
    router: StubOpenAI = field(init=False)
    reference: StubOpenAI = field(init=False)
    prefill: StubOpenAI = field(init=False)
    decode: StubOpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.reference, self.prefill, self.decode = StubOpenAI(), StubOpenAI(), StubOpenAI()
        self.router = StubOpenAI(on_request=self.serve)
        self.publish()

    def serve(self, body: dict[str, Any]) -> None:
        """Count as real engines would."""
        case = Case("", "", body)
        lengths = case.prompt_lengths(self.router.answer(body)["usage"]["prompt_tokens"])
        for length in lengths * case.answers:
            self.computed += 1 + self.computed_extra
            self.received += length - 1 - self.computed_extra
        blocks = expected_blocks(lengths, answers=case.answers, cached_tokens=0, block_tokens=BLOCK)
        self.moved += blocks * BLOCK_BYTES - (self.missing_bytes if blocks else 0)
        self.publish()

    def publish(self) -> None:
        source = "vllm:prompt_tokens_by_source_total"
        self.prefill.metrics = f'vllm:cache_config_info{{block_size="{BLOCK}"}} 1.0\n'
        self.decode.metrics = (
            f'{source}{{source="local_compute"}} {self.computed}\n'
            f'{source}{{source="external_kv_transfer"}} {self.received}\n'
            f'kvferry_transfer_bytes_total{{mode="{self.mode}"}} {self.moved}\n'
        )
        if self.mode == "push":
            self.prefill.metrics += (
                f'kvferry_transfer_bytes_total{{mode="push"}} {self.moved}\n'
                f'kvferry_bytes_before_prefill_end_total{{mode="push"}} {self.moved // 2}\n'
            )

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(self.router.url, (self.prefill.url,), (self.decode.url,), self.reference.url)

    def __enter__(self) -> World:
        for server in (self.router, self.reference, self.prefill, self.decode):
            server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.router, self.reference, self.prefill, self.decode):
            server.__exit__(None, None, None)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(demo, "SETTLE_SECONDS_MAX", 0.0)
    with World() as started:
        yield started


def outcomes(world: World, tmp_path: Path) -> list[Outcome]:
    model_config(tmp_path)
    return compare(world.endpoints, tmp_path, world.mode, seed=0)


def test_when_all_is_well_no_problem_is_found(world: World, tmp_path: Path) -> None:
    found = outcomes(world, tmp_path)
    assert [outcome.problems for outcome in found] == [[]] * len(cases())
    assert sum(outcome.moved_bytes for outcome in found) == world.moved > 0
    assert sum(outcome.early_bytes for outcome in found) > 0
    assert any(outcome.first_token_seconds for outcome in found)
    assert len(world.router.bodies) == len(world.reference.bodies) == len(cases())
    assert world.router.bodies == world.reference.bodies


def test_pulled_bytes_are_counted_where_they_arrive(world: World, tmp_path: Path) -> None:
    world.mode = "pull"
    world.publish()
    found = outcomes(world, tmp_path)
    assert [outcome.problems for outcome in found] == [[]] * len(cases())
    assert sum(outcome.moved_bytes for outcome in found) == world.moved > 0
    assert not any(outcome.early_bytes for outcome in found)


def test_another_token_is_found(world: World, tmp_path: Path) -> None:
    world.router.damage = 1
    found = outcomes(world, tmp_path)
    assert all("answer differs" in outcome.problems[0] for outcome in found)


def test_a_missing_byte_is_found(world: World, tmp_path: Path) -> None:
    world.missing_bytes = 1
    found = outcomes(world, tmp_path)
    for outcome in found:
        text = f"{outcome.expected_bytes - 1} bytes pushed, geometry says {outcome.expected_bytes}"
        assert outcome.problems == ([f"{outcome.name}: {text}"] if outcome.expected_bytes else [])


def test_a_decode_engine_that_prefills_itself_is_found(world: World, tmp_path: Path) -> None:
    world.computed_extra = BLOCK
    found = outcomes(world, tmp_path)
    assert all("computed" in outcome.problems[-1] for outcome in found)


def test_a_request_that_fails_is_not_equal(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.router.status = 500
    found = outcomes(world, tmp_path)
    assert not any(outcome.equal for outcome in found)
    assert "answered 500" in capsys.readouterr().out


def test_an_engine_without_a_block_size_is_an_error(world: World, tmp_path: Path) -> None:
    world.prefill.metrics = ""
    with pytest.raises(demo.DemoError, match="does not tell its block size"):
        outcomes(world, tmp_path)


ANSWER = Answer(("a b",), ((1, 2),), ("length",), 5, None)


@pytest.mark.parametrize(
    "other",
    [
        replace(ANSWER, texts=("a c",)),
        replace(ANSWER, tokens=((1, 3),)),
        replace(ANSWER, finish_reasons=("stop",)),
        replace(ANSWER, texts=("a b", "a b"), tokens=((1, 2), (1, 2)), finish_reasons=("length",) * 2),
    ],
)
def test_answers_differ_in_any_part(other: Answer) -> None:
    assert same(ANSWER, replace(ANSWER, first_token_seconds=1.0))
    assert not same(other, ANSWER)


def test_an_answer_without_tokens_proves_nothing() -> None:
    empty = replace(ANSWER, tokens=((),))
    assert not same(empty, empty)
    nothing = Answer((), (), (), 0, None)
    assert not same(nothing, nothing)


# --- report and command --------------------------------------------------------------------------

GOOD = Outcome(
    name="five chunks",
    prompt_tokens=2090,
    prompts=1,
    equal=True,
    moved_bytes=8 << 20,
    expected_bytes=8 << 20,
    early_bytes=6 << 20,
    computed_tokens=1,
    computed_tokens_max=128,
    first_token_seconds=0.0714,
    reference_first_token_seconds=None,
)


def test_the_table_shows_each_figure() -> None:
    heading, rule, row = table([GOOD]).splitlines()
    assert heading.split()[:3] == ["request", "tokens", "equal"]
    assert set(rule) == {"-", " "}
    assert row.split() == [
        "five",
        "chunks",
        "2090",
        "yes",
        "8.0",
        "MiB",
        "agrees",
        "75",
        "%",
        "1",
        "71",
        "ms",
        "-",
    ]


def test_the_table_shows_what_is_wrong() -> None:
    row = table([replace(GOOD, equal=False, expected_bytes=9 << 20)]).splitlines()[-1]
    assert "NO" in row.split()
    assert "9.0 MiB" in row


def test_the_last_line_says_the_figures() -> None:
    assert verdict([GOOD, GOOD]) == (
        "PASSED: 2 of 2 answers equal one engine's; 16.0 MiB of KV pushed, 75 % of it before prefill ended."
    )
    nothing_pushed = replace(GOOD, moved_bytes=0, early_bytes=0)
    assert verdict([GOOD, nothing_pushed]).startswith("FAILED: 2 of 2 answers equal")
    assert verdict([replace(GOOD, equal=False)]).startswith("FAILED: 0 of 1")


def test_a_pull_is_told_as_one() -> None:
    pulled = replace(GOOD, mode="pull", early_bytes=0)
    heading, _, row = table([pulled]).splitlines()
    assert "pulled" in heading.split()
    assert "0 %" not in row
    assert row.split()[-5:] == ["-", "1", "71", "ms", "-"]
    assert verdict([pulled]) == "PASSED: 1 of 1 answers equal one engine's; 8.0 MiB of KV pulled."
    assert "bytes pulled, geometry" in replace(pulled, moved_bytes=1).problems[0]


def test_the_router_is_told_the_mode(tmp_path: Path) -> None:
    for mode in TRANSFERS:
        assert demo_deployment(tmp_path, tmp_path, mode).router_arguments == ("--transfer-mode", mode)


def test_the_damage_is_asked_of_the_prefill_engine_alone(tmp_path: Path) -> None:
    plan = demo_deployment(tmp_path, tmp_path, corrupt=True)
    assert plan.prefill_config == {"test_corrupt_block": 0}
    assert plan.decode_config == {}
    assert plan.environment == {"KVFERRY_TESTING": "1"}
    well = demo_deployment(tmp_path, tmp_path)
    assert (well.prefill_config, well.environment) == ({}, {})
    assert well.reference


@pytest.mark.parametrize(("damage", "code"), [(0, 0), (1, 1)])
def test_the_exit_code_tells(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: int,
    code: int,
) -> None:
    plans: list[Deployment] = []

    def bring_up(fleet: Fleet, plan: Deployment, *, startup_seconds: float) -> Endpoints:
        plans.append(plan)
        assert (Path(plan.model) / "model.safetensors").is_file()
        return world.endpoints

    monkeypatch.setattr(demo, "bring_up", bring_up)
    world.router.damage = damage
    assert main.main(["demo", "--log-dir", str(tmp_path)]) == code
    assert plans[0].router_arguments == ("--transfer-mode", "push")
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[-1].startswith("PASSED" if code == 0 else "FAILED")
    assert not Path(plans[0].model).exists()
