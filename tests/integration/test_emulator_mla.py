"""MLA between emulated engines of one and of two ranks: every rank has all latents, and one sends them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.emulated_pair import REPORT_SECONDS, EmulatedPair, emulated_pair

pytestmark = pytest.mark.engines

LAYERS = 27
BLOCK_TOKENS = 16
PAGE_BYTES = BLOCK_TOKENS * (576 // 4) * 2
"""A block of one layer: latents of 576 elements of two bytes, a fourth of them emulated."""
LENGTHS = [2, 17, 100, 1000, 3000]
PLANTED_BLOCK = 200
"""Only prompts that have this block are damaged: those of more than 3,200 tokens."""


def pages(lengths: list[int]) -> int:
    """Pages that each decode rank takes from elsewhere: all that hold more than the prompt's last token."""
    return sum(-(-(length - 1) // BLOCK_TOKENS) * LAYERS for length in lengths)


def sent_bytes(lengths: list[int]) -> int:
    """Of one copy of the prompts' blocks, that of the last token included, though it is computed anew."""
    return sum(-(-length // BLOCK_TOKENS) * LAYERS * PAGE_BYTES for length in lengths)


def names(engine: str, ranks: int) -> list[str]:
    """Whose reports and journals tell of an engine's memory."""
    return [engine] if ranks == 1 else [f"{engine}-rank{rank}" for rank in range(ranks)]


def compared(pair: EmulatedPair, name: str, least: int) -> tuple[int, int]:
    """Pages that a rank has compared, at least so many, and how many of them were wrong."""
    report = pair.report(name, lambda found: found["verified_pages"] >= least)
    return report["verified_pages"], report["mismatches"]


def moved(pair: EmulatedPair, engine: str, ranks: int, operation: str, least: int) -> list[int]:
    """Bytes that each rank has moved, as soon as they are at least so many together."""
    deadline = time.monotonic() + REPORT_SECONDS
    while True:
        sums = [
            sum(row["bytes"] for row in pair.rows(name, "transfer") if row["operation"] == operation)
            for name in names(engine, ranks)
        ]
        if sum(sums) >= least or time.monotonic() > deadline:
            return sums
        time.sleep(0.1)


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.long),
        pytest.param(2, 2, marks=pytest.mark.long),
        pytest.param(1, 1, marks=pytest.mark.long),
    ],
)
def test_one_rank_sends_the_latents_and_each_page_is_right(tmp_path: Path, prefill: int, decode: int) -> None:
    """V11: pushed and pulled; the bytes are those of one copy per decode rank, and no rank is waited for."""
    with emulated_pair(
        "FerryConnector",
        tmp_path,
        prefill={"test_corrupt_block": PLANTED_BLOCK},
        preset="deepseek-v2-lite-h200",
        ranks=(prefill, decode),
        step_tokens=512,
        options={"verify": "full"},
    ) as pair:
        receivers = names("decode", decode)
        for turn, mode in enumerate(("push", "pull"), start=1):
            for answer in pair.answers(LENGTHS, mode=mode):
                assert answer.decoded[:1] == answer.prefilled
            for name in receivers:
                assert compared(pair, name, turn * pages(LENGTHS)) == (turn * pages(LENGTHS), 0)
        copy = sent_bytes(LENGTHS)
        written = moved(pair, "prefill", prefill, "WRITE", copy * decode)
        read = moved(pair, "decode", decode, "READ", copy * decode)
        assert sum(written) == copy * decode
        # Two to two meet rank by rank; the one decode rank has all of it from one of two.
        assert max(written) == copy * max(1, decode // prefill)
        assert read == [copy] * decode

        (answer,) = pair.answers([(PLANTED_BLOCK + 2) * BLOCK_TOKENS])
        assert answer.decoded[:1] != answer.prefilled, "an answer from damaged KV is another one"
        for name in receivers:
            assert pair.report(name, lambda found: found["mismatches"] > 0)["mismatches"] == LAYERS
