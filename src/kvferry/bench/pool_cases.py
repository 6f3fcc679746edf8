"""The cases of `kvferry bench pool`: pools of one prefill engine and four decode engines, and their loads."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import msgspec

from kvferry.bench.dispatch import Ask
from kvferry.bench.pool_engines import TOKEN_BYTES
from kvferry.bench.pool_model import DecodeModel, PoolModel, PrefillModel
from kvferry.bench.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """What is sent to a pool."""

    requests_per_second: float
    prompt_tokens: tuple[int, int]
    """The shortest and the longest prompt; lengths between are equally likely."""
    requests: int
    """How many, unless somebody wants others."""
    output_tokens: tuple[int, int] = (50, 150)


@dataclass(frozen=True, slots=True)
class PoolCase:
    """A pool and its load."""

    name: str
    model: PoolModel
    load: PoolLoad


def _pool(*decode: DecodeModel) -> PoolModel:
    return PoolModel(prefill=PrefillModel(), decode=decode)


_PLAIN = DecodeModel()
_SLOW = DecodeModel(step_seconds=0.03)
_BUSY = DecodeModel(other_requests_per_second=25.0)
_BURSTS = DecodeModel(other_requests_per_second=50.0, other_period_seconds=10.0)
_SMALL = DecodeModel(room=6)
_SMALL_SLOW = DecodeModel(room=6, step_seconds=0.03)
_SMALL_BUSY = DecodeModel(room=6, other_requests_per_second=1.0)

SKEWED = _pool(_PLAIN, _PLAIN, _SLOW, _BUSY)
BURSTING = _pool(_PLAIN, _PLAIN, _SLOW, _BURSTS)
FULL = _pool(_SMALL, _SMALL, _SMALL_SLOW, _SMALL_BUSY)
ALIKE = _pool(_PLAIN, _PLAIN, _PLAIN, _PLAIN)

_SHORT = PoolLoad(prompt_tokens=(100, 500), requests_per_second=50.0, requests=1500)
_LONG = PoolLoad(prompt_tokens=(4000, 16_000), requests_per_second=3.0, requests=400)
_MIXED = PoolLoad(prompt_tokens=(100, 16_000), requests_per_second=3.8, requests=500)
_MEDIUM = PoolLoad(prompt_tokens=(1500, 7500), requests_per_second=7.2, requests=700)

CASES = (
    PoolCase("skewed, short", SKEWED, _SHORT),
    PoolCase("skewed, long", SKEWED, _LONG),
    PoolCase("skewed, mixed", SKEWED, _MIXED),
    PoolCase("bursts, short", BURSTING, _SHORT),
    PoolCase("bursts, mixed", BURSTING, _MIXED),
    PoolCase("full, medium", FULL, _MEDIUM),
    PoolCase("alike, long", ALIKE, _LONG),
)


def planned(case: PoolCase, seed: int, requests: int) -> tuple[list[Ask], list[float]]:
    """The requests of one run and when each is due: the same for every router that is tried."""
    chance = Random(f"pool {case.name} {seed}")
    asks, due, at = [], [], 0.0
    for position in range(requests):
        tokens = chance.randint(*case.load.prompt_tokens)
        # The number in front keeps prompts apart; what a router sees of the rest is its length.
        text = f"{position:08}".ljust(tokens * TOKEN_BYTES, "x")
        asks.append(
            Ask(
                request=f"pool-{seed}-{position}",
                prompt=Prompt(msgspec.Raw(msgspec.json.encode(text)), tokens),
                output_tokens=chance.randint(*case.load.output_tokens),
            )
        )
        due.append(at)
        at += chance.expovariate(case.load.requests_per_second)
    return asks, due
