"""What a step computes of a request, which pages that fills, and what the request says."""

from __future__ import annotations

import pytest

from kvferry.emulator.pattern import TokenChain
from kvferry.emulator.sequences import Part, Sequence, Vocabulary

SIZE = 4
WORDS = Vocabulary(1000)


def sequence(prompt: int = 10, blocks: int = 8) -> Sequence:
    return Sequence("r", [7 * token % 251 for token in range(prompt)], prompt, list(range(50, 50 + blocks)))


@pytest.mark.parametrize(
    ("start", "tokens", "part"),
    [
        (0, 6, Part(0, 6, samples=False, decodes=False)),
        (6, 4, Part(6, 10, samples=True, decodes=False)),
        (0, 10, Part(0, 10, samples=True, decodes=False)),
        (9, 1, Part(9, 10, samples=True, decodes=True)),
        (10, 1, Part(10, 11, samples=True, decodes=True)),
        (5, 1, Part(5, 6, samples=False, decodes=False)),
    ],
)
def test_a_part_says_a_token_only_when_it_reaches_all_that_is_known(
    start: int, tokens: int, part: Part
) -> None:
    assert sequence().plan(start, tokens) == part


def test_after_a_preemption_the_answer_counts_as_known() -> None:
    one = sequence()
    one.known = 13
    assert not one.plan(0, 10).samples
    assert one.plan(10, 3).samples


@pytest.mark.parametrize(
    ("start", "tokens", "places"),
    [
        (0, 4, [0]),
        (0, 6, [0]),
        (4, 4, [1]),
        (6, 2, [1]),
        (6, 4, [1, 2]),
        (0, 10, [0, 1, 2]),
        (9, 1, []),
        (10, 1, []),
        (11, 1, [2]),
        (12, 1, []),
    ],
)
def test_blocks_get_content_when_they_are_full_or_the_prompt_ends(
    start: int, tokens: int, places: list[int]
) -> None:
    """A prompt of ten tokens: its third block is half full at its end, and full two tokens later."""
    one = sequence()
    assert list(one.written(one.plan(start, tokens), SIZE)) == places


def test_values_are_those_of_the_whole_chain() -> None:
    one = sequence()
    assert (
        one.values(range(1, 3), 10, SIZE, WORDS).tolist() == TokenChain(one.prompt, SIZE).values[1:].tolist()
    )


def test_values_of_the_answer_are_those_of_a_prompt_with_the_answer() -> None:
    """So a block that decode has filled can be another request's prefix."""
    one = sequence()
    said = one.said(10, 16, SIZE, WORDS)
    whole = TokenChain([*one.prompt, *said], SIZE)
    assert one.values(range(2, 4), 16, SIZE, WORDS).tolist() == whole.values[2:].tolist()


def test_two_engines_say_the_same_and_other_prompts_say_something_else() -> None:
    ours, theirs, other = sequence(), sequence(), sequence(11)
    assert ours.said(10, 30, SIZE, WORDS) == theirs.said(10, 30, SIZE, WORDS)
    assert ours.said(11, 30, SIZE, WORDS) != other.said(11, 30, SIZE, WORDS)


def test_an_answer_does_not_depend_on_how_it_is_asked_for() -> None:
    one = sequence()
    whole = one.said(10, 210, SIZE, WORDS)
    assert [one.said(at, at + 1, SIZE, WORDS)[0] for at in range(10, 210)] == whole
    assert [one.next(at, SIZE, WORDS) for at in range(10, 210)] == whole
    assert one.next(10, SIZE, WORDS) == whole[0], "again, as after a preemption"


def test_an_answer_from_damaged_kv_is_another_one() -> None:
    right, damaged = sequence(), sequence()
    damaged.damaged = True
    assert right.said(10, 14, SIZE, WORDS) != damaged.said(10, 14, SIZE, WORDS)


def test_only_the_upper_half_of_the_vocabulary_is_said() -> None:
    said = sequence().said(10, 5000, SIZE, WORDS)
    assert min(said) >= 500
    assert max(said) < 1000
    assert len(set(said)) > 400


def test_blocks_are_given_by_place() -> None:
    assert sequence().block_ids(range(2, 4)).tolist() == [52, 53]
