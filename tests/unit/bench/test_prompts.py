"""Prompts have the length that was asked for, and no two begin alike."""

from __future__ import annotations

import json

import pytest

from kvferry.bench.prompts import text_prompts, token_prompts
from kvferry.errors import UsageError


def test_token_prompts_have_their_length_and_stay_in_the_vocabulary() -> None:
    for prompt in token_prompts(5, 40, (100, 200), seed=1):
        ids = json.loads(bytes(prompt.encoded))
        assert len(ids) == prompt.tokens == 40
        assert set(ids) <= set(range(100, 200))


def test_no_two_prompts_share_their_first_block() -> None:
    starts = [tuple(json.loads(bytes(p.encoded))[:16]) for p in token_prompts(200, 64, (1000, 30000), 1)]
    assert len(set(starts)) == 200


def test_a_seed_decides_the_prompts() -> None:
    first, again, other = (list(token_prompts(3, 8, (0, 1000), seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_text_prompts_have_one_word_per_token() -> None:
    (prompt,) = text_prompts(1, 25, seed=1)
    assert len(json.loads(bytes(prompt.encoded)).split()) == 25


@pytest.mark.parametrize("vocabulary", [(5, 5), (9, 3), (-1, 5)])
def test_an_empty_vocabulary_is_refused(vocabulary: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="--vocabulary must be FIRST:END"):
        next(token_prompts(1, 8, vocabulary, seed=0))


def test_a_prompt_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="--random-input-len must be at least 1, not 0"):
        next(token_prompts(1, 0, (0, 9), seed=0))
    with pytest.raises(UsageError, match="--random-input-len must be at least 1, not 0"):
        next(text_prompts(1, 0, seed=0))
