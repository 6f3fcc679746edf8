"""Reading, splitting, rewriting and joining bodies: pure, no socket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.handoff import PrefillParams
from kvferry.ids import TransferId
from kvferry.router.api.openai import (
    Endpoint,
    cached_tokens_of,
    client_answer,
    decode_body,
    error_message,
    estimated_tokens,
    joined,
    prefill_body,
    read,
    shifted,
    summed,
)
from kvferry.router.ground.errors import RequestError

TEXT = Endpoint.COMPLETIONS
CHAT = Endpoint.CHAT


def read_text(**fields: Any) -> Any:
    return read(TEXT, json.dumps(fields).encode(), 8)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a"], [["a"]]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[[1, 2]]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_each_prompt_becomes_a_body_of_its_own(prompt: object, prompts: list[object]) -> None:
    """P20: token ids are one prompt, lists of them are many; a single prompt keeps the client's spelling."""
    asked = read_text(prompt=prompt, model="m", future_field={"kept": True})
    assert [body["prompt"] for body in asked.bodies] == prompts
    assert all(body["future_field"] == {"kept": True} for body in asked.bodies)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b'"x"', "body"),
        (b"\xff\xfe", "body"),
        (b"NaN", "body"),
        (b"[" * 100_000, "body"),
        (b'{"a":' * 100_000, "body"),
        (b"{}", "prompt"),
        (b'{"prompt": null}', "prompt"),
        (b'{"prompt": 5}', "prompt"),
        (b'{"prompt": {}}', "prompt"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": [[]]}', "prompt[0]"),
        (b'{"prompt": ["a", 1]}', "prompt[0]"),
        (b'{"prompt": [1, "a"]}', "prompt[1]"),
        (b'{"prompt": [1, -2]}', "prompt[1]"),
        (b'{"prompt": [1, true]}', "prompt[1]"),
        (b'{"prompt": [1, 2.5]}', "prompt[1]"),
        (b'{"prompt": [[1], ["a"]]}', "prompt[1][0]"),
        (b'{"prompt": ["1","2","3","4","5","6","7","8","9"]}', "prompt"),
        (b'{"prompt": "a", "n": 0}', "n"),
        (b'{"prompt": "a", "n": true}', "n"),
        (b'{"prompt": "a", "n": "2"}', "n"),
        (b'{"prompt": "a", "n": 1.5}', "n"),
        (b'{"prompt": "a", "stream": "yes"}', "stream"),
        (b'{"prompt": "a", "stream": 1}', "stream"),
        (b'{"prompt": "a", "stream_options": 1}', "stream_options"),
        (b'{"prompt": "a", "model": ["m"]}', "model"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(raw: bytes, field: str) -> None:
    """S01, X02: whatever a client sends ends in an error for its request alone."""
    with pytest.raises(RequestError) as caught:
        read(TEXT, raw, 8)
    assert caught.value.status == 400
    assert caught.value.param == field
    assert caught.value.shape()["error"]["kvferry"] == "invalid_request"


@pytest.mark.parametrize("messages", [None, "hi", {}])
def test_a_chat_needs_messages(messages: object) -> None:
    with pytest.raises(RequestError) as caught:
        read(CHAT, json.dumps({"messages": messages}).encode(), 8)
    assert caught.value.param == "messages"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "prompt",
    "n",
    "stream",
    "logprobs",
    "echo",
    "vllm_xargs",
    "kv_transfer_params",
    "stop",
    "min_tokens",
]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.sampled_from(Endpoint))
def test_any_object_is_read_or_refused(body: dict[str, Any], endpoint: Endpoint) -> None:
    """No body does anything but pass or raise the error that names its field."""
    body["messages"] = []
    refused: RequestError | None = None
    bodies: tuple[dict[str, Any], ...] = ()
    try:
        bodies = read(endpoint, json.dumps(body).encode(), 8).bodies
    except RequestError as error:
        refused = error
    assert bodies or (refused is not None and refused.status == 400 and refused.param)
    for each in bodies:
        prefill = prefill_body(endpoint, each, {})
        assert (prefill["max_tokens"], prefill["n"], prefill["stream"]) == (1, 1, False)
        assert "kv_transfer_params" not in decode_body(each, None)


def test_the_clients_body_is_never_edited() -> None:
    body = {"prompt": "a", "min_tokens": 3, "max_completion_tokens": 9}
    before = json.dumps(body)
    prefill_body(TEXT, body, PrefillParams(transfer=TransferId("t" * 8)).to_params())
    decode_body(body, {"x": 1})
    assert json.dumps(body) == before


def test_a_completions_prompt_does_not_depend_on_its_grammar() -> None:
    """A chat template may read response_format, so a chat's prefill leg keeps it; a literal one drops it."""
    fields = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a*"}}
    assert not fields.keys() & prefill_body(TEXT, {"prompt": "a", **fields}, {}).keys()
    assert fields.keys() <= prefill_body(CHAT, {"messages": [], **fields}, {}).keys()


def test_an_absent_max_completion_tokens_stays_absent() -> None:
    assert "max_completion_tokens" not in prefill_body(CHAT, {"messages": []}, {})
    assert prefill_body(CHAT, {"max_completion_tokens": None}, {})["max_completion_tokens"] is None


@pytest.mark.parametrize(
    ("fields", "whole"),
    [
        ({}, False),
        ({"echo": True}, False),
        ({"logprobs": 5}, False),
        ({"echo": True, "logprobs": 0}, True),
        ({"echo": True, "logprobs": False}, False),
        ({"echo": True, "top_logprobs": 1}, True),
        ({"prompt_logprobs": 0}, True),
        ({"use_beam_search": True}, True),
        ({"n": 128}, False),
        ({"n": 129}, True),
    ],
)
def test_what_needs_the_whole_prompt(fields: dict[str, Any], whole: bool) -> None:
    assert read_text(prompt="a", **fields).whole_prompt is whole


def test_answers_are_joined_in_order_with_indices_and_usage() -> None:
    answers = [
        {
            "id": f"x{number}",
            "model": "m",
            "choices": [{"index": 0, "text": f"{number}a"}, {"index": 1, "text": f"{number}b"}],
            "usage": {
                "prompt_tokens": 3 + number,
                "total_tokens": 10,
                "prompt_tokens_details": {"cached_tokens": number},
            },
        }
        for number in range(3)
    ]
    whole = joined(answers, 2, "cmpl-all")
    assert whole["id"] == "cmpl-all"
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "0a"),
        (1, "0b"),
        (2, "1a"),
        (3, "1b"),
        (4, "2a"),
        (5, "2b"),
    ]
    assert whole["usage"] == {
        "prompt_tokens": 12,
        "total_tokens": 30,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_usages_that_some_answers_lack_are_summed_from_the_others() -> None:
    assert summed(
        [None, {"prompt_tokens": 1, "details": None}, {"prompt_tokens": 2, "details": {"a": 1}}]
    ) == {
        "prompt_tokens": 3,
        "details": {"a": 1},
    }
    assert summed([None]) is None


def test_a_chunk_without_choices_is_left_as_it_is() -> None:
    assert shifted({"usage": {}}, 1, 2) == {"usage": {}}
    assert shifted({"choices": [{"text": "x"}, 5]}, 1, 2) == {"choices": [{"text": "x"}, 5]}


def test_the_client_is_told_the_prefill_engines_cached_tokens_and_nothing_of_the_hand_over() -> None:
    """X12."""
    answer = {"usage": {"prompt_tokens": 5, "prompt_tokens_details": None}, "kv_transfer_params": {"a": 1}}
    assert client_answer(answer, 3) == {
        "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
    }
    assert client_answer(answer, None) == {"usage": answer["usage"]}


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ({}, None),
        ({"usage": None}, None),
        ({"usage": {"prompt_tokens_details": None}}, None),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": True}}}, None),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}, 0),
    ],
)
def test_cached_tokens_are_read_with_care(answer: dict[str, Any], count: int | None) -> None:
    assert cached_tokens_of(answer) == count


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"error": "m"}', "m"),
        (b'{"error": {}}', None),
        (b"[]", None),
        (b"<html>", None),
        (b"[" * 100_000, None),
    ],
)
def test_an_engines_error_is_understood_or_left(raw: bytes, message: str | None) -> None:
    assert error_message(raw) == message


@pytest.mark.parametrize(
    ("endpoint", "body", "tokens"),
    [
        (Endpoint.COMPLETIONS, {"prompt": "abcde"}, 2),
        (Endpoint.COMPLETIONS, {"prompt": ["abcd"]}, 1),
        (Endpoint.COMPLETIONS, {"prompt": "\u4e2d\u6587\u5b57\u7b26"}, 3),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3]}, 3),
        (Endpoint.COMPLETIONS, {"prompt": [[1, 2, 3]]}, 3),
        (Endpoint.COMPLETIONS, {"prompt": "\ud800"}, 1),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": "x" * 370}]}, 100),
    ],
)
def test_a_prompts_length_is_estimated(endpoint: Endpoint, body: dict[str, object], tokens: int) -> None:
    assert estimated_tokens(endpoint, body) == tokens
