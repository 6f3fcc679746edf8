"""Emulated engines as deployments run them: vLLM's server, scheduler and connectors, NIXL, and real bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.emulated_pair import EmulatedPair, emulated_pair

pytestmark = pytest.mark.engines

LAYERS = 64
BLOCK_TOKENS = 16
PLANTED_BLOCK = 600
"""Only prompts that have this block are damaged: those of more than 9,600 tokens."""
LENGTHS = [17, 100, 1000, 3000, 5000]


def pages(lengths: list[int]) -> int:
    """Pages that the decode engine takes from elsewhere: all that hold more than the prompt's last token."""
    return sum(-(-(length - 1) // BLOCK_TOKENS) * LAYERS for length in lengths)


STOCK = pytest.param("NixlPushConnector", marks=pytest.mark.long)
"""`test_bench_compare` runs it in every `make test`, with pages compared, too."""


@pytest.fixture(scope="module", params=["FerryConnector", STOCK])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedPair]:
    """A pair over each connector; one block of long prompts is damaged on purpose."""
    files = tmp_path_factory.mktemp(request.param)
    with emulated_pair(request.param, files, prefill={"test_corrupt_block": PLANTED_BLOCK}) as running:
        yield running


def test_kv_that_leaves_before_its_event_is_found_wrong(tmp_path: Path) -> None:
    """FerryConnector publishes a chunk when it is launched; only the device's event keeps its bytes back."""
    # Chunks of 0.2 s, so that the agent is never behind the device; and the engines know each other before.
    slow = {"test_ignore_events": True, "costs": {"prefill_tokens_per_second": 10_000.0}}
    with emulated_pair("FerryConnector", tmp_path, prefill=slow) as hasty:
        hasty.answers([100])
        hasty.answers([8000])
        report = hasty.report("decode", lambda found: found["verified_pages"] >= pages([100, 8000]))
        assert report["mismatches"] > 0


def test_kv_arrives_whole_and_both_engines_say_the_same(pair: EmulatedPair) -> None:
    before = pair.report("decode")["verified_pages"]
    for answer in pair.answers(LENGTHS):
        assert len(answer.decoded) == 4
        assert answer.decoded[:1] == answer.prefilled
    report = pair.report("decode", lambda found: found["verified_pages"] >= before + pages(LENGTHS))
    assert report["verified_pages"] == before + pages(LENGTHS)
    assert report["mismatches"] == 0


def test_a_planted_fault_is_found_on_the_other_engine(pair: EmulatedPair) -> None:
    before = pair.report("decode")["mismatches"]
    (answer,) = pair.answers([(PLANTED_BLOCK + 2) * BLOCK_TOKENS])
    assert answer.decoded[:1] != answer.prefilled, "an answer from damaged KV is another one"
    report = pair.report("decode", lambda found: found["mismatches"] > before)
    assert report["mismatches"] == before + LAYERS
    assert pair.report("prefill")["mismatches"] == 0


def test_the_journals_tell_where_a_requests_time_went(pair: EmulatedPair) -> None:
    pair.answers([2500])
    pair.report("decode", lambda found: bool(pair.rows("decode", "request")))
    prefill, decode = (pair.rows(name, "request")[-1] for name in ("prefill", "decode"))
    for row, stages in (
        (prefill, ["arrived_ns", "scheduled_ns", "prefill_end_ns", "finished_ns"]),
        (decode, ["arrived_ns", "allocated_ns", "received_ns", "first_step_ns", "first_token_ns"]),
    ):
        assert [row[stage] for stage in stages] == sorted(row[stage] for stage in stages)
    assert decode["received_ns"] > prefill["arrived_ns"]
    hooks = {row["hook"] for row in pair.rows("decode", "hook")}
    assert {"update_state_after_alloc", "build_connector_meta"} <= hooks
    assert hooks & {"get_transfer_results", "get_finished"}, "by whichever name this vLLM asks"


def test_prefill_took_what_the_device_would_take(pair: EmulatedPair) -> None:
    """The modelled time is a lower bound of the real one, for each step and each request."""
    steps = pair.rows("prefill", "step")
    assert steps
    assert all(step["actual_seconds"] >= step["intended_seconds"] - 1e-4 for step in steps)
