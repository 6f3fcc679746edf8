"""A rank under vLLM's own asynchronous scheduler: what it says, what it writes, and what it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.emulator.device import Device
from kvferry.host.devices import recorder_of
from tests.support.emulated_rank import MakeRank, Rank
from tests.support.fake_clock import FakeClock
from tests.support.vllm_engine import BLOCK_TOKENS, LAYERS


def prompt(tokens: int, salt: int = 0) -> list[int]:
    return [(7 * position + 13 * salt) % 251 for position in range(tokens)]


def handed_over(
    make_rank: MakeRank, tokens: int, *, latent: bool = False, **emulator: Any
) -> tuple[Rank, Rank]:
    """A prompt computed on one rank, its blocks copied to another, and its first step there."""
    source = make_rank({**emulator}, latent=latent)
    whole = {key: value for key, value in emulator.items() if key != "test_corrupt_block"}
    target = make_rank(whole, latent=latent)
    # More tokens than one keep the request, and so its blocks, while they are copied.
    source.add("r", prompt(tokens), max_tokens=8)
    while not source.said.get("r"):
        source.step()
    target.add("r", prompt(tokens), max_tokens=4)
    target.take_as_received("r")
    for block, other in zip(source.blocks_of("r"), target.blocks_of("r"), strict=False):
        for ours, theirs in zip(source.tensors, target.tensors, strict=True):
            theirs[other] = ours[block]
    target.first_step("r")
    return source, target


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100, 200])
def test_a_prompt_is_answered_in_chunks_of_a_step(make_rank: MakeRank, tokens: int) -> None:
    rank = make_rank()
    rank.add("r", prompt(tokens), max_tokens=5)
    rank.run()
    assert len(rank.said["r"]) == 5
    assert rank.session.steps.count >= -(-tokens // 64) + 4


def test_a_step_stays_a_chunk_when_the_platform_has_its_say_again(make_rank: MakeRank) -> None:
    """vLLM's CPU platform turns chunks off for MLA, and an engine asks it twice; the prompt would wait."""
    rank = make_rank()
    rank.config.scheduler_config.enable_chunked_prefill = False
    rank.add("r", prompt(200))
    for _ in range(6):
        rank.step()
    assert len(rank.said["r"]) == 1


def test_two_ranks_say_the_same_however_their_steps_are_cut(make_rank: MakeRank) -> None:
    alone, busy = make_rank(), make_rank({"seed": 1})
    alone.add("r", prompt(100), max_tokens=20)
    alone.run()
    for number in range(3):
        busy.add(f"other-{number}", prompt(50, salt=number + 1), max_tokens=10)
    busy.add("r", prompt(100), max_tokens=20)
    busy.run()
    assert alone.said["r"] == busy.said["r"]
    assert alone.said["r"] != busy.said["other-0"][:20]


@pytest.mark.parametrize("verify", ["stamps", "full"])
@pytest.mark.parametrize("tokens", [17, 32, 100])
def test_pages_that_were_carried_are_found_right(make_rank: MakeRank, tokens: int, verify: str) -> None:
    source, target = handed_over(make_rank, tokens, verify=verify)
    blocks = -(-(tokens - 1) // BLOCK_TOKENS)
    assert target.verdicts() == (blocks * len(LAYERS), 0)
    assert target.said["r"] == source.said["r"][:1]


def test_latents_are_found_right_and_a_planted_fault_wrong(make_rank: MakeRank) -> None:
    """MLA: one row per token, of a size that is no power of two."""
    assert handed_over(make_rank, 100, latent=True, verify="full")[1].verdicts() == (7 * len(LAYERS), 0)
    _, wrong = handed_over(make_rank, 100, latent=True, verify="full", test_corrupt_block=3)
    assert wrong.verdicts() == (7 * len(LAYERS), len(LAYERS))


def test_a_planted_fault_is_counted_logged_and_changes_the_answer(
    make_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = handed_over(make_rank, 100, test_corrupt_block=3)
    assert target.verdicts() == (7 * len(LAYERS), len(LAYERS))
    assert target.session.verdicts.to_dict()["mismatched_requests"] == ["r"]
    assert "request r: 2 of 14 KV pages are wrong: layers [0, 1], blocks [3]" in caplog.text
    assert target.said["r"] != source.said["r"][:1]


def test_pages_that_never_came_are_wrong(make_rank: MakeRank) -> None:
    target = make_rank()
    target.add("r", prompt(48))
    target.take_as_received("r")
    target.first_step("r")
    assert target.verdicts() == (3 * len(LAYERS), 3 * len(LAYERS))


def test_without_verification_nothing_is_compared_or_written(make_rank: MakeRank) -> None:
    rank = make_rank({"verify": "off"})
    rank.add("r", prompt(48), max_tokens=2)
    rank.run()
    assert rank.verdicts() == (0, 0)
    assert not any(tensor.any() for tensor in rank.tensors)


def test_a_prefix_from_the_cache_is_compared_too(make_rank: MakeRank) -> None:
    """Blocks that decode has filled are as good a prefix as those of a prompt."""
    rank = make_rank()
    rank.add("first", prompt(40), max_tokens=30)
    rank.run()
    again = [*prompt(40), *rank.said["first"][:24], 1, 2, 3]
    rank.add("second", again, max_tokens=3)
    rank.run()
    assert rank.verdicts() == (4 * len(LAYERS), 0)


def test_a_preempted_request_goes_on_with_the_same_answer(make_rank: MakeRank) -> None:
    """Two requests that do not fit together: the later one loses its blocks and computes all anew."""
    roomy, tight = make_rank(blocks=64), make_rank(blocks=12, prefix_caching=False)
    for rank in (roomy, tight):
        for number in range(2):
            rank.add(f"r{number}", prompt(60, salt=number), max_tokens=60)
        rank.run()
    assert tight.preemptions > roomy.preemptions == 0
    assert tight.said == roomy.said
    assert tight.verdicts()[1] == 0


def test_an_aborted_request_is_forgotten(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.add("r", prompt(200), max_tokens=100)
    rank.step()
    rank.step()
    rank.abort("r")
    rank.add("next", prompt(10), max_tokens=3)
    rank.run()
    assert len(rank.said["next"]) == 3
    assert "r" not in rank.runner._sequences


def test_the_engines_events_are_reached_when_the_device_is_there(make_rank: MakeRank) -> None:
    """What a connector marks after a launch is reached at the modelled end of the step, and not before."""
    clock = FakeClock()
    costs = {"prefill_tokens_per_second": 64.0, "decode_seconds": 0.0, "step_seconds": 0.0}
    rank = make_rank({"costs": costs}, device=Device(clock))
    record = recorder_of(rank.tensors[0])
    assert record is not None
    assert record()(), "an idle device has nothing to wait for"
    rank.add("r", prompt(64), max_tokens=1)
    rank.step()
    ready = record()
    clock.advance(0.9995)
    assert not ready()
    rank.run()
    assert ready()
    assert rank.session.steps.intended_seconds == pytest.approx(1.0, rel=0.01)
    clock.advance(1e6)


def test_the_planted_fault_takes_every_mark_for_reached(make_rank: MakeRank) -> None:
    clock = FakeClock()
    costs = {"prefill_tokens_per_second": 64.0, "decode_seconds": 0.0, "step_seconds": 0.0}
    rank = make_rank({"costs": costs, "test_ignore_events": True}, device=Device(clock))
    record = recorder_of(rank.tensors[0])
    assert record is not None
    rank.add("r", prompt(64), max_tokens=1)
    rank.step()
    assert record()(), "the step has a second to go"
    clock.advance(1e6)
    rank.run()


def test_tensors_of_others_have_no_mark_here(make_rank: MakeRank) -> None:
    rank = make_rank()
    assert recorder_of(rank.tensors[0].clone()) is None


def test_the_journal_has_a_row_per_request_and_per_step(make_rank: MakeRank, tmp_path: Path) -> None:
    rank = make_rank({"journal": str(tmp_path / "rows"), "report": str(tmp_path / "report")})
    rank.add("r", prompt(100), max_tokens=3)
    rank.run()
    rank.session.close()
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    (row,) = [row for row in rows if row["kind"] == "request"]
    stages = ["arrived_ns", "scheduled_ns", "prefill_end_ns", "first_token_ns", "finished_ns"]
    assert [row[stage] for stage in stages] == sorted(row[stage] for stage in stages)
    steps = [row for row in rows if row["kind"] == "step"]
    assert [step["prefill_tokens"] for step in steps][:2] == [64, 36]
    assert sum(step["decodes"] for step in steps) >= 2
    report = json.loads((tmp_path / "report").read_text())
    assert report["steps"]["count"] == len(steps)
    assert report["mismatches"] == 0


def test_what_is_said_is_in_the_models_vocabulary(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.add("r", prompt(20), max_tokens=50)
    rank.run()
    assert set(rank.said["r"]) <= set(range(128, 256))
