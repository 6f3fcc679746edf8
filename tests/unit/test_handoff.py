"""What router and engines tell each other: strict types, bounds, None, unknown keys, round trips, pairing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.errors import HandoffError
from kvferry.handoff import (
    CONSUMERS_MAX,
    LEASE_SECONDS_MAX,
    PREFIXES_MAX,
    RANKS_MAX,
    TEXT_CHARACTERS_MAX,
    TOKENS_MAX,
    TRANSFER_ID_PATTERN,
    DecodeParams,
    HeldParams,
    PrefillParams,
    Prefix,
    SourceParams,
    paired_by_request_id,
    parse_held,
    parse_request,
    parse_source,
)
from kvferry.ids import EngineId, Incarnation, TransferId

SECRET = "0123456789abcdef0123456789abcdef"
SOURCE = SourceParams(engine=EngineId("p"), host="10.0.0.1", port=5600)
FULL = SourceParams(
    engine=EngineId("p_dp1"),
    host="fe80::1%eth0",
    port=65535,
    tp=8,
    pp=2,
    incarnation=Incarnation("i-1"),
    mode="pull",
)
HELD = HeldParams(
    source=SOURCE,
    transfer=TransferId("the-turn-before"),
    tokens=300,
    lease_seconds=60.0,
    prefixes=(Prefix(160, "0f" * 16), Prefix(300, "a1" * 16)),
)
PREFILL = {"do_remote_decode": True, "transfer_id": SECRET}
DECODE = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "transfer_id": SECRET,
}


def over_http(params: dict[str, Any]) -> Any:
    """What the other side has after the params travelled as JSON."""
    return json.loads(json.dumps(params))


@pytest.mark.parametrize(
    "params",
    [
        PrefillParams(),
        PrefillParams(transfer=TransferId(SECRET), mode="push", consumers=CONSUMERS_MAX),
        DecodeParams(source=SOURCE),
        PrefillParams(transfer=TransferId(SECRET), mode="pull", history=HELD),
        DecodeParams(source=FULL, transfer=TransferId(SECRET), mode="pull", consumers=4),
        DecodeParams(source=FULL, mode="pull", prefilled_tokens=TOKENS_MAX),
        DecodeParams(
            source=SourceParams(engine=EngineId("p"), host="h", port=1, incarnation=Incarnation("i"))
        ),
    ],
)
def test_requests_survive_the_way(params: PrefillParams | DecodeParams) -> None:
    assert parse_request(over_http(params.to_params())) == params


@pytest.mark.parametrize("source", [SOURCE, FULL])
def test_a_source_survives_the_way(source: SourceParams) -> None:
    assert parse_source(over_http(source.to_params())) == source


def test_what_is_held_survives_the_way_and_is_the_next_turns_history() -> None:
    """Routers hand a decode engine's answer to the next turn's prefill engine as it is."""
    assert parse_held(over_http(HELD.to_params())) == HELD
    answer = over_http(HELD.to_params())
    assert parse_request(answer) == PrefillParams(history=HELD)
    assert parse_request(answer | {"transfer_id": SECRET}) == PrefillParams(
        transfer=TransferId(SECRET), history=HELD
    )


@pytest.mark.parametrize(
    "change",
    [
        {"remote_num_tokens": 0},
        {"remote_num_tokens": None},
        {"remote_engine_id": None},
        {"do_remote_decode": False},
    ],
)
def test_an_answer_that_holds_nothing_is_none(change: dict[str, Any]) -> None:
    assert parse_held(HELD.to_params() | change) is None


def test_the_nulls_of_the_published_proxies_are_no_history() -> None:
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    assert parse_request(PREFILL | nulls) == parse_request(PREFILL)


def test_what_another_connector_holds_is_known_by_its_request_id() -> None:
    params = HELD.to_params() | {"remote_transfer_id": None, "remote_request_id": "cmpl-a-0-0123abcd"}
    held = parse_held(params)
    assert held is not None
    assert held.transfer == paired_by_request_id("cmpl-a-0-deadbeef")
    with pytest.raises(HandoffError, match="remote_request_id: is missing"):
        parse_held(HELD.to_params() | {"remote_transfer_id": None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_num_tokens", -1),
        ("remote_num_tokens", "3"),
        ("remote_num_tokens", TOKENS_MAX + 1),
        ("remote_transfer_id", "short"),
        ("remote_transfer_id", 7),
        ("remote_lease_seconds", 0),
        ("remote_lease_seconds", True),
        ("remote_lease_seconds", float("nan")),
        ("remote_lease_seconds", "3"),
        ("remote_lease_seconds", LEASE_SECONDS_MAX * 2),
        ("remote_host", None),
        ("remote_port", 0),
        ("remote_prefixes", "0f" * 16),
        ("remote_prefixes", [[1, "0f" * 16]] * (PREFIXES_MAX + 1)),
        ("remote_prefixes", [[0, "0f" * 16]]),
        ("remote_prefixes", [[True, "0f" * 16]]),
        ("remote_prefixes", [[TOKENS_MAX + 1, "0f" * 16]]),
        ("remote_prefixes", [[1, "0F" * 16]]),
        ("remote_prefixes", [[1, "0f" * 16 + "\n"]]),
        ("remote_prefixes", [[1, 7]]),
        ("remote_prefixes", [[1]]),
        ("remote_prefixes", [None]),
    ],
)
def test_what_is_wrong_with_a_history_is_named(key: str, value: object) -> None:
    for parse in (parse_held, parse_request):
        with pytest.raises(HandoffError) as caught:
            parse(HELD.to_params() | {key: value})
        assert caught.value.field == key


def test_a_held_transfer_is_in_no_message() -> None:
    """It is the right to the KV, as `transfer_id` is."""
    with pytest.raises(HandoffError) as caught:
        parse_held(HELD.to_params() | {"remote_transfer_id": SECRET + "/"})
    assert SECRET[:8] not in str(caught.value)


def test_the_requests_mode_stands_before_the_sources() -> None:
    """A decode request names one mode; the answer's default is not silently put beside it."""
    params = DecodeParams(source=FULL, mode="push").to_params()
    assert params["transfer_mode"] == "push"
    parsed = parse_request(params)
    assert isinstance(parsed, DecodeParams)
    assert parsed.mode == "push"


def test_an_answer_is_a_decode_request() -> None:
    """Routers made for vLLM's own connectors hand the producer's answer to the consumer as it is."""
    parsed = parse_request(over_http(FULL.to_params()))
    assert isinstance(parsed, DecodeParams)
    assert parsed.source == FULL


def test_keys_are_those_of_the_published_connectors() -> None:
    params = DecodeParams(source=FULL, transfer=TransferId(SECRET), mode="push").to_params()
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p_dp1",
        "remote_host": "fe80::1%eth0",
        "remote_port": 65535,
        "tp_size": 8,
        "pp_size": 2,
        "kvferry_incarnation": "i-1",
        "transfer_mode": "push",
        "transfer_id": SECRET,
        "consumers": 1,
    }


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": False},
        {"do_remote_decode": None, "do_remote_prefill": None},
        {"do_remote_prefill": False, "transfer_id": 7},
    ],
)
def test_params_that_ask_for_nothing(params: object) -> None:
    """P31: empty params are none, and what else stands in them is nobody's business then."""
    assert parse_request(params) is None


@pytest.mark.parametrize("base", [PREFILL, DECODE])
def test_unknown_keys_are_ignored(base: dict[str, Any]) -> None:
    """X02: a newer router, or one made for another connector, sends keys that we do not know."""
    extra = {"remote_block_ids": [[1, 2]], "dcp_size": 1, "future": {"a": [None]}}
    assert parse_request(base | extra) == parse_request(base)


@pytest.mark.parametrize(
    "key", ["transfer_id", "transfer_mode", "consumers", "tp_size", "pp_size", "kvferry_incarnation"]
)
def test_none_is_absent_for_what_may_be_left_out(key: str) -> None:
    assert parse_request({**DECODE, key: None}) == parse_request(
        {name: value for name, value in DECODE.items() if name != key}
    )


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_host", "remote_port"])
@pytest.mark.parametrize("change", ["removed", "none"])
def test_what_is_needed_is_missed_by_name(key: str, change: str) -> None:
    """X02: each key in turn; the error names it."""
    params = {**DECODE, key: None}
    if change == "removed":
        del params[key]
    for parse in (parse_request, parse_source):
        with pytest.raises(HandoffError, match=rf"kv_transfer_params\.{key}: is missing") as caught:
            parse(params)
        assert caught.value.field == key


@pytest.mark.parametrize("key", ["remote_port", "tp_size", "pp_size", "consumers"])
@pytest.mark.parametrize(
    "value",
    [
        -1,
        0,
        10**9,
        pytest.param(10**5000, id="huge"),
        "1",
        "x",
        1.0,
        float("nan"),
        True,
        False,
        [],
        [1],
        {},
        b"1",
    ],
)
def test_numbers_are_whole_and_bounded(key: str, value: object) -> None:
    """S01: no list is ever built from an untrusted size, and no text from a huge number."""
    with pytest.raises(HandoffError, match=rf"kv_transfer_params\.{key}: must be a whole number from 1") as e:
        parse_request({**DECODE, key: value})
    assert e.value.field == key
    assert len(str(e.value)) < 200


@pytest.mark.parametrize(
    ("key", "most"),
    [("remote_port", 65535), ("tp_size", RANKS_MAX), ("pp_size", RANKS_MAX), ("consumers", CONSUMERS_MAX)],
)
def test_bounds_are_included(key: str, most: int) -> None:
    for value in (1, most):
        assert parse_request({**DECODE, key: value}) is not None
    with pytest.raises(HandoffError, match=f"from 1 to {most}, not {most + 1}"):
        parse_request({**DECODE, key: most + 1})


@pytest.mark.parametrize("key", ["do_remote_decode", "do_remote_prefill"])
@pytest.mark.parametrize("value", [0, 1, "", "true", [], [True], {}])
def test_flags_are_flags(key: str, value: object) -> None:
    with pytest.raises(HandoffError, match=f"{key}: must be true or false") as caught:
        parse_request({key: value})
    assert caught.value.field == key


def test_both_roles_at_once_are_refused() -> None:
    with pytest.raises(HandoffError, match="together with do_remote_prefill") as caught:
        parse_request({**DECODE, "do_remote_decode": True})
    assert caught.value.field == "do_remote_decode"


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_host", "kvferry_incarnation"])
@pytest.mark.parametrize(
    "value", ["", 7, 1.5, True, ["p"], {"a": 1}, b"p", "x" * (TEXT_CHARACTERS_MAX + 1), "a\nb", "a\0b"]
)
def test_texts_are_printable_and_bounded(key: str, value: object) -> None:
    with pytest.raises(HandoffError) as caught:
        parse_request({**DECODE, key: value})
    assert caught.value.field == key
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)
    assert "\0" not in str(caught.value)


def test_a_text_of_the_full_length_passes() -> None:
    parsed = parse_request({**DECODE, "remote_engine_id": "x" * TEXT_CHARACTERS_MAX})
    assert isinstance(parsed, DecodeParams)
    assert parsed.source.engine == "x" * TEXT_CHARACTERS_MAX


@pytest.mark.parametrize(
    "value", ["short", "has space" + SECRET, SECRET + "\n", SECRET + "/", "é" * 16, SECRET * 9, "", "a" * 7]
)
@pytest.mark.parametrize("base", [PREFILL, DECODE])
def test_a_transfer_id_has_one_form(base: dict[str, Any], value: str) -> None:
    with pytest.raises(HandoffError) as caught:
        parse_request({**base, "transfer_id": value})
    assert caught.value.field == "transfer_id"


@pytest.mark.parametrize("value", ["a" * 8, SECRET, "a.b-c_d:e" * 20, "A" * TEXT_CHARACTERS_MAX])
def test_a_transfer_id_in_that_form_passes(value: str) -> None:
    parsed = parse_request({**PREFILL, "transfer_id": value})
    assert isinstance(parsed, PrefillParams)
    assert parsed.transfer == value


@pytest.mark.parametrize(
    "value",
    [SECRET + " ", [SECRET], {"id": SECRET}, int(SECRET, 16), SECRET + "\n", SECRET * 10, SECRET.encode()],
)
@pytest.mark.parametrize("base", [PREFILL, DECODE])
def test_a_transfer_id_is_in_no_message(base: dict[str, Any], value: object) -> None:
    """It is the right to the KV, and messages go to logs and to clients."""
    with pytest.raises(HandoffError) as caught:
        parse_request({**base, "transfer_id": value})
    assert caught.value.field == "transfer_id"
    assert SECRET[:8] not in str(caught.value)
    assert str(int(SECRET, 16))[:8] not in str(caught.value)


@pytest.mark.parametrize(
    "broken",
    [
        {"remote_port": 0},
        {"remote_host": ""},
        {"transfer_mode": "both"},
        {"consumers": "x"},
        {"do_remote_decode": True},
    ],
)
def test_an_error_in_another_key_does_not_show_it_either(broken: dict[str, Any]) -> None:
    with pytest.raises(HandoffError) as caught:
        parse_request(DECODE | broken)
    assert SECRET[:8] not in str(caught.value)


@pytest.mark.parametrize("value", ["PUSH", "both", "", 1, True, ["push"], "x" * 250])
def test_modes_are_push_and_pull(value: object) -> None:
    with pytest.raises(HandoffError) as caught:
        parse_request({**DECODE, "transfer_mode": value})
    assert caught.value.field == "transfer_mode"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("params", [[], ["do_remote_decode"], "do_remote_decode", 7, True, b"{}"])
def test_params_are_an_object(params: object) -> None:
    for parse in (parse_request, parse_source):
        with pytest.raises(HandoffError, match="must be an object") as caught:
            parse(params)
        assert caught.value.field == "*"


def test_a_huge_value_is_not_rendered() -> None:
    """S01: memory stays flat, whatever stands where a number should."""

    class Huge(list[int]):
        def __repr__(self) -> str:
            raise AssertionError("a hostile value was rendered whole")

    for key in ("remote_port", "do_remote_prefill", "transfer_mode", "remote_host", "transfer_id"):
        with pytest.raises(HandoffError) as caught:
            parse_request({**DECODE, key: Huge([1])})
        assert caught.value.field == key


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        ("cmpl-abc-0-0123abcd", "cmpl-abc-0-89ef4567"),
        ("cmpl-abc-0-0123abcd", "1_cmpl-abc-0-89ef4567"),
        ("cmpl-abc-0-0123abcd", "12_cmpl-abc-0-89ef4567"),
        ("chatcmpl-abc", "chatcmpl-abc"),
        ("chatcmpl-abc", "0_chatcmpl-abc"),
        # What a client chose stays, even when it looks like the engine's own suffix.
        ("cmpl-abc-deadbeef-0-0123abcd", "cmpl-abc-deadbeef-0-89ef4567"),
    ],
)
def test_legs_of_one_request_are_paired(producer: str, consumer: str) -> None:
    """P20, P21: whatever suffix each engine appends, and for each child of n > 1."""
    assert paired_by_request_id(producer) == paired_by_request_id(consumer)


@pytest.mark.parametrize(
    ("one", "another"),
    [
        ("cmpl-abc-0-0123abcd", "cmpl-abc-1-0123abcd"),
        ("cmpl-abc-0-0123abcd", "cmpl-abd-0-0123abcd"),
        ("cmpl-abc-0123abcde", "cmpl-abc-0123abcdf"),
        ("cmpl-abc-0123ABCD", "cmpl-abc-0123ABCE"),
        ("cmpl-1_abc", "cmpl-2_abc"),
    ],
)
def test_legs_of_different_requests_are_not(one: str, another: str) -> None:
    """P20: only the engine's own suffix and prefix are taken off, once each."""
    assert paired_by_request_id(one) != paired_by_request_id(another)


@pytest.mark.parametrize("told", ["with spaces", "a/b?c", "ü" * 9, "x" * 300, "\ud800"])
def test_whatever_a_client_calls_its_request_the_key_is_a_transfer_id(told: str) -> None:
    """The producer's answer names the key, and the decode leg that carries it must be accepted."""
    key = paired_by_request_id(f"cmpl-{told}-0-0123abcd")
    assert key == paired_by_request_id(f"1_cmpl-{told}-0-ffffffff")
    assert TRANSFER_ID_PATTERN.fullmatch(key)
    assert key != paired_by_request_id(f"cmpl-{told}-1-0123abcd")


def test_a_pairing_key_is_never_a_transfer_id_of_a_router() -> None:
    """A client that sends a transfer id must not meet a pair by request id; routers mint no such prefix."""
    assert paired_by_request_id("r-0123abcd").startswith("x-request-id:")
