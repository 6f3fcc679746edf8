"""What a soak does, drawn from a seed: the rounds with their faults, and the requests of its clients."""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

STOP_SECONDS_MIN, STOP_SECONDS_MAX = 1.0, 25.0
DOWN_SECONDS_MAX = 4.0
"""How long a killed engine's address stays empty before the engine is started again."""
# Ids of syllables and words of the tiny model; a larger model has other tokens there, which serve as well.
TOKEN_FIRST, TOKEN_LAST = 430, 1000
ROUNDS_WHOLE = 20
"""So many rounds hold every stage, side and fault once, and lives long enough to judge memory by."""
VICTIM_SHARE = 0.75
"""Of the context: the prompt of a request that is to be caught in the middle of its prefill."""


class Stage(enum.StrEnum):
    """Where a fault strikes, as the engines' metrics show it."""

    WAITING = "waiting"
    """D waits for KV of which P knows nothing yet."""
    HALF = "half"
    """P has pushed a part of a prompt's chunks and computes the others."""
    HELD = "held"
    """P has finished a prompt and holds its KV; D has not asked for it yet."""
    DECODING = "decoding"
    """D has the KV and has sent the client its first tokens."""
    IDLE = "idle"
    """There is no request, and nothing is in any table."""


class Fault(enum.StrEnum):
    """What is done to an engine."""

    KILL = "kill"
    """SIGKILL to the server and its children, and a new start at the same address with the same engine id."""
    STOP = "stop"
    """SIGSTOP to the server and its children, and SIGCONT after a while."""


class Target(enum.StrEnum):
    """Which side it is done to."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """One round. `seconds`: how long the engine is stopped, or its address is empty."""

    number: int
    stage: Stage
    target: Target
    fault: Fault
    seconds: float


def plan_rounds(seed: int) -> Iterator[RoundPlan]:
    """Endless rounds. Each `ROUNDS_WHOLE` of them hold every stage, side and fault once.

    The first four take sides and faults in turn, at four stages, so that a short run sees all of them. The
    others strike one side eight times in a row and then the other, so that the engines of the side that is
    spared live long enough to show whether their memory grows.
    """
    source = random.Random(f"rounds {seed}")
    numbers = itertools.count(1)
    while True:
        for plan in _whole(source):
            yield replace(plan, number=next(numbers))


def _whole(source: random.Random) -> list[RoundPlan]:
    """Every stage, side and fault once, not numbered yet."""
    first, second = source.sample(list(Target), len(Target))
    one, other = source.sample(list(Fault), len(Fault))
    plans = [*_side(source, first), *_side(source, second)]
    turns = ((first, one), (second, other), (first, other), (second, one))
    stages = source.sample(list(Stage), len(turns))
    in_turn = [
        next(plan for plan in plans if (plan.target, plan.fault, plan.stage) == (*turn, stage))
        for turn, stage in zip(turns, stages, strict=True)
    ]
    return [*in_turn, *(plan for plan in plans if plan not in in_turn)]


def _side(source: random.Random, target: Target) -> list[RoundPlan]:
    """Every stage and fault of a side. Its stops take their lengths from five equal parts of the range."""
    pairs = list(itertools.product(Stage, Fault))
    source.shuffle(pairs)
    stops = _stop_seconds(source)
    plans = []
    for stage, fault in pairs:
        down = source.uniform(0.0, DOWN_SECONDS_MAX)
        seconds = stops.pop() if fault is Fault.STOP else down
        plans.append(RoundPlan(number=0, stage=stage, target=target, fault=fault, seconds=seconds))
    return plans


def _stop_seconds(source: random.Random) -> list[float]:
    part = (STOP_SECONDS_MAX - STOP_SECONDS_MIN) / len(Stage)
    lengths = [STOP_SECONDS_MIN + part * (index + source.random()) for index in range(len(Stage))]
    source.shuffle(lengths)
    return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One client request. `leaves_after_seconds`: when the client hangs up, None if it waits."""

    prompt: tuple[int, ...]
    answer_tokens: int
    stream: bool = False
    n: int = 1
    leaves_after_seconds: float | None = None

    def body(self, model: str) -> dict[str, Any]:
        """What to send: greedy, with a fixed length of the answer and its token ids."""
        common = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.answer_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
        }
        # Greedy sampling refuses n > 1; with a choice of one, every answer is the greedy one.
        greedy = {"temperature": 0} if self.n == 1 else {"n": self.n, "temperature": 1, "top_k": 1}
        return common | greedy


class Mix:
    """The clients' requests, one after the other, from a seed: no two of its prompts are alike."""

    def __init__(self, seed: str, context_tokens: int) -> None:
        self._source = random.Random(seed)
        self._context_tokens = context_tokens

    def draw(self) -> Ask:
        """A request of the load: most are short, some leave early, some want two answers."""
        chance = self._source
        longest = self._context_tokens // 2
        limits = chance.choices([(1, 300), (300, 1500), (1500, longest)], [0.65, 0.25, 0.1])[0]
        leaves = chance.uniform(0.0, 3.0) if chance.random() < 0.2 else None
        return Ask(
            prompt=self.prompt(chance.randint(*limits)),
            answer_tokens=chance.choice([1, 4, 8, 16, 48]),
            stream=chance.random() < 0.5,
            n=2 if chance.random() < 0.15 else 1,
            leaves_after_seconds=leaves,
        )

    def long(self) -> Ask:
        """A request whose prefill takes as long as the context allows."""
        return Ask(prompt=self.prompt(int(self._context_tokens * VICTIM_SHARE)), answer_tokens=8)

    def short(self) -> Ask:
        """A request that is over soon."""
        return Ask(prompt=self.prompt(self._source.randint(40, 200)), answer_tokens=2)

    def middling(self) -> Ask:
        """A prompt of some blocks."""
        return Ask(prompt=self.prompt(self._source.randint(600, 1500)), answer_tokens=8)

    def talkative(self) -> Ask:
        """A streamed request whose answer takes a while."""
        prompt = self.prompt(self._source.randint(200, 900))
        return Ask(prompt=prompt, answer_tokens=min(240, self._context_tokens // 4), stream=True)

    def prompt(self, tokens: int) -> tuple[int, ...]:
        """Token ids."""
        return tuple(self._source.choices(range(TOKEN_FIRST, TOKEN_LAST), k=tokens))

    def pause_seconds(self) -> float:
        """How long a client thinks between two requests."""
        return self._source.uniform(0.05, 0.5)

    def pick(self, count: int) -> int:
        """One of so many engines."""
        return self._source.randrange(count)
