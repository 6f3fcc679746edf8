"""Requests in the shape of the proxies that go with vLLM's own connectors: no router minted a `transfer_id`.

Goal: legs that such a proxy sends, one after the other or at once, meet under one key. Method: build each
leg's params as the proxy does, let the engines add to the request id what vLLM adds, and compare the keys.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.handoff import (
    DecodeParams,
    HeldParams,
    PrefillParams,
    SourceParams,
    paired_by_request_id,
    parse_request,
)
from kvferry.ids import EngineId, Incarnation, TransferId

P_ENGINE = SourceParams(
    engine=EngineId("p"), host="10.0.0.1", port=5600, incarnation=Incarnation("first"), mode="pull"
)
FIRST_LEG: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def engine_id(kind: str, request_id: str, position: int | None, random_part: str) -> str:
    """A request's id inside an engine: kind, the header's value, the prompt's position, 8 random digits."""
    middle = "" if position is None else f"-{position}"
    return f"{kind}-{request_id}{middle}-{random_part}"


def key(params: PrefillParams | DecodeParams, request_id: str) -> TransferId:
    """What an engine keeps a transfer by."""
    return params.transfer or paired_by_request_id(request_id)


@pytest.mark.parametrize(("kind", "position"), [("cmpl", 0), ("chatcmpl", None)])
@pytest.mark.parametrize("request_id", ["7f9c1c1e-66d1-4f6a-8e0a-8e3d0b6c2d11", "mine", "x-deadbeef"])
def test_one_leg_after_the_other_paired_by_the_request_id(
    kind: str, position: int | None, request_id: str
) -> None:
    """P20: the second leg's params are the first one's answer, passed on whole."""
    producing = parse_request(FIRST_LEG)
    assert producing == PrefillParams()
    at_p = engine_id(kind, request_id, position, "0a1b2c3d")
    answer = P_ENGINE.to_params() | {
        "remote_block_ids": [[1, 2, 3]],
        "remote_request_id": at_p,
        "remote_num_tokens": 300,
        "dcp_size": 1,
    }
    consuming = parse_request(answer)
    assert isinstance(consuming, DecodeParams)
    assert consuming.source == P_ENGINE
    assert (consuming.mode, consuming.prefilled_tokens) == ("pull", 300)
    at_d = engine_id(kind, request_id, position, "ffffffff")
    assert key(producing, at_p) == key(consuming, at_d)


def test_both_legs_at_once_with_an_address_that_the_proxy_knows() -> None:
    """The push proxies: the decode leg cannot know that prefill has ended, so it is patient."""
    consuming = parse_request(
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "p",
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "remote_block_ids": None,
            "remote_request_id": None,
            "tp_size": 1,
        }
    )
    assert isinstance(consuming, DecodeParams)
    assert consuming.prefilled_tokens is None
    producing = parse_request(FIRST_LEG)
    assert producing is not None
    one, other = (engine_id("cmpl", "mine", 0, random) for random in ("0a1b2c3d", "ffffffff"))
    assert key(producing, one) == key(consuming, other)


def test_an_answer_that_carries_an_id_pairs_by_it_whatever_the_request_ids_are() -> None:
    """A producer names the key that it made of the request id; a proxy that changes that id still pairs."""
    at_p = engine_id("cmpl", "mine", 0, "0a1b2c3d")
    made = paired_by_request_id(at_p)
    consuming = parse_request(P_ENGINE.to_params() | {"transfer_id": made})
    assert consuming is not None
    assert key(consuming, "cmpl-another-0-ffffffff") == made


def test_a_producers_own_id_pairs_where_the_proxy_lets_each_engine_name_its_request() -> None:
    """One that passes on the keys it knows, and no `X-Request-Id`: the ids have nothing in common."""
    at_p = engine_id("cmpl", "8c1d", 0, "0a1b2c3d")
    consuming = parse_request(P_ENGINE.to_params() | {"remote_request_id": at_p, "remote_num_tokens": 9})
    assert consuming is not None
    assert key(consuming, engine_id("cmpl", "f00f", 0, "ffffffff")) == paired_by_request_id(at_p)
    minted = parse_request(P_ENGINE.to_params() | {"remote_request_id": at_p, "transfer_id": "transfer-one"})
    assert minted is not None
    assert minted.transfer == "transfer-one"


def test_an_id_that_a_proxy_has_guessed_pairs_nothing() -> None:
    """Both legs at once: `x-deadbeef` is what a client wrote, and loses nothing here."""
    at_p = engine_id("chatcmpl", "x-deadbeef", None, "0a1b2c3d")
    consuming = parse_request(P_ENGINE.to_params() | {"remote_request_id": "chatcmpl-x-deadbeef"})
    assert consuming is not None
    at_d = engine_id("chatcmpl", "x-deadbeef", None, "ffffffff")
    assert key(consuming, at_d) == paired_by_request_id(at_p)


def test_the_next_turns_prefill_leg_is_the_decode_engines_answer() -> None:
    """KV that flows back: such a proxy sends the answer of one turn as the params of the next."""
    source = SourceParams(engine=EngineId("d"), host="10.0.0.2", port=5600)
    held = HeldParams(source=source, transfer=TransferId("the-turn-before"), tokens=300)
    answer = held.to_params() | {"remote_block_ids": [[4, 5]], "remote_blocks_expiry_time": 12.5}
    producing = parse_request(answer)
    assert isinstance(producing, PrefillParams)
    assert producing.history == held
    assert producing.transfer is None
    at_p = engine_id("chatcmpl", "second-turn", None, "0a1b2c3d")
    assert key(producing, at_p) != held.transfer


def test_two_requests_of_one_client_id_prefix_do_not_meet() -> None:
    producing = parse_request(FIRST_LEG)
    assert producing is not None
    ids = [engine_id("cmpl", "mine", position, "0a1b2c3d") for position in (0, 1)]
    assert len({key(producing, each) for each in ids}) == 2
