"""Hashes of a prompt's beginning: pure, and true of every prompt and its continuations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.api.conversation import PIECE_BYTES, PIECES_MAX, fingerprint
from kvferry.router.api.openai import Endpoint

TEXT = Endpoint.COMPLETIONS
CHAT = Endpoint.CHAT
LONG = "x" * PIECE_BYTES
MESSAGES = st.lists(
    st.builds(lambda text: {"role": "user", "content": text}, st.text(max_size=900)), max_size=6
)


def of_text(prompt: object, **fields: Any) -> Any:
    return fingerprint(TEXT, {"prompt": prompt, **fields}, None)


@given(turn=MESSAGES, more=MESSAGES)
def test_a_chat_continues_its_own_beginning(turn: list[object], more: list[object]) -> None:
    before = fingerprint(CHAT, {"messages": turn}, None)
    after = fingerprint(CHAT, {"messages": turn + more}, None)
    assert after.chain[: len(before.chain)] == before.chain
    assert after.continues(before.end) == bool(before.chain)


@given(tokens=st.lists(st.integers(0, 1 << 17), min_size=1, max_size=600), more=st.lists(st.integers(0, 9)))
def test_token_ids_continue_their_own_beginning(tokens: list[int], more: list[int]) -> None:
    before, after = of_text(tokens), of_text(tokens + more)
    assert after.chain[: len(before.chain)] == before.chain


@given(text=st.text(min_size=1, max_size=2000), at=st.integers(0, 1999))
def test_another_beginning_shares_nothing_from_there_on(text: str, at: int) -> None:
    at %= len(text)
    other = text[:at] + ("a" if text[at] != "a" else "b") + text[at + 1 :]
    same = len(text[:at].encode("utf-8", "surrogatepass")) // PIECE_BYTES
    one, two = of_text(text).chain, of_text(other).chain
    assert one[:same] == two[:same]
    assert not set(one[same:]) & set(two[same:])


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "other"},
        {"cache_salt": "mine"},
        {"tools": [{"type": "function"}]},
        {"chat_template_kwargs": {"thinking": True}},
    ],
)
def test_what_shapes_a_prompt_is_in_every_hash(fields: dict[str, object]) -> None:
    """S01: another model's KV, or another tenant's salted one, is never that of this prompt."""
    assert not set(of_text(LONG).chain) & set(of_text(LONG, **fields).chain)


def test_what_does_not_shape_it_is_in_none() -> None:
    assert of_text(LONG) == of_text(LONG, temperature=0.5, max_tokens=7, stream=True)


@pytest.mark.parametrize("prompt", ["", "x" * (PIECE_BYTES - 1), None])
def test_a_short_prompt_has_no_end_and_is_continued_by_nothing(prompt: object) -> None:
    assert of_text(prompt).end is None
    assert not of_text(LONG).continues(of_text(prompt).end)


def test_a_list_of_one_prompt_is_that_prompt() -> None:
    assert of_text([LONG]) == of_text(LONG)
    assert of_text([[1] * 600]) == of_text([1] * 600)


def test_what_is_hashed_is_bounded() -> None:
    whole = of_text("x" * PIECE_BYTES * (PIECES_MAX + 5))
    assert len(whole.chain) == PIECES_MAX


def test_a_session_is_asked_first_then_the_longest_beginning() -> None:
    named = fingerprint(TEXT, {"prompt": LONG * 3}, "mine")
    first, *rest = named.known_by()
    assert first == named.session
    assert rest == list(reversed(named.chain))
    assert fingerprint(TEXT, {"prompt": ""}, "other").session != named.session
    assert list(of_text("").known_by()) == []
