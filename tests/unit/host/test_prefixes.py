"""Which beginning of a prompt is what another engine holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvferry.handoff import PREFIXES_MAX, HeldParams, Prefix, SourceParams
from kvferry.host.facts import EngineFacts
from kvferry.host.histories import wanted_history
from kvferry.host.prefixes import common_tokens, salt_of, told_prefixes
from kvferry.ids import EngineId, TransferId

FACTS = EngineFacts(EngineId("p"), tp=1, pp=1, produces=True, consumes=True, block_tokens=16, block_count=64)
HELD = list(range(1000, 1300))


def request(tokens: list[int], **changes: Any) -> Any:
    plain = {"mm_features": [], "prompt_embeds": None, "lora_request": None, "cache_salt": None}
    return SimpleNamespace(num_prompt_tokens=len(tokens), all_token_ids=tokens, **(plain | changes))


def held(salt: bytes | None = None, **changes: Any) -> HeldParams:
    told = told_prefixes(HELD, 200, 16, salt or salt_of(request([])) or b"")
    source = SourceParams(engine=EngineId("d"), host="10.0.0.2", port=5600)
    params = HeldParams(source=source, transfer=TransferId("held-0001"), tokens=len(HELD), prefixes=told)
    return msgspec.structs.replace(params, **changes)


def usable(prompt: list[int], params: HeldParams, **changes: Any) -> int:
    return wanted_history(request(prompt, **changes), params, "push", FACTS).stop


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ([*HELD, 1, 2, 3], 288),
        ([*HELD[:299], 0, 1], 288),
        (HELD, 288),
        (HELD[:200], 192),
        ([*HELD[:200], *[0] * 100], 192),
        ([*HELD[:33], *[0] * 300], 32),
        (HELD[:33], 32),
        (HELD[:32], 16),
        ([0, *HELD], 0),
        ([1], 0),
    ],
)
def test_the_longest_equal_beginning_is_used_in_whole_blocks(prompt: list[int], tokens: int) -> None:
    """V01, P01: and one token of the prompt at least is computed, to sample from."""
    assert usable(prompt, held()) == tokens


def test_a_change_anywhere_is_noticed() -> None:
    for at in range(0, len(HELD), 7):
        changed = [*HELD[:at], -1, *HELD[at + 1 :], 5, 5]
        assert usable(changed, held()) <= at


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 300, 5000, 100_000])
def test_few_beginnings_are_told_and_the_whole_is_one_of_them(tokens: int) -> None:
    ids = list(range(tokens))
    told = told_prefixes(ids, tokens // 2, 16, b"")
    assert len(told) <= PREFIXES_MAX
    assert told[-1].tokens == tokens
    assert common_tokens(ids, told[::-1], b"") == tokens, "in any order"


def test_what_else_shapes_the_kv_is_compared_too() -> None:
    """Another adapter or salt, or an image behind the placeholders: the tokens alone say nothing."""
    adapter = SimpleNamespace(lora_name="a")
    for changes in (
        {"lora_request": adapter},
        {"cache_salt": "s"},
        {"mm_features": [1]},
        {"prompt_embeds": 1},
    ):
        assert usable([*HELD, 1], held(), **changes) == 0
    salted = salt_of(request([], lora_request=adapter, cache_salt="s"))
    assert usable([*HELD, 1], held(salt=salted), lora_request=adapter, cache_salt="s") == 288


def test_what_is_told_beyond_what_is_held_is_not_believed() -> None:
    assert usable([*HELD, 1], held(tokens=100)) == 96
    assert usable([*HELD, 1], held(prefixes=())) == 0
    assert usable([*HELD, 1], held(prefixes=(Prefix(64, "0" * 32), *held().prefixes))) == 48
