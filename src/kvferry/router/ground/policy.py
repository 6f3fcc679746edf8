"""Which worker serves next, and by which mode: pure choices over what the router knows of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from kvferry.handoff import TransferMode

Policy = Callable[[Sequence[int], int, Random], int]
"""`(loads, turn, chance)` -> index into loads.

`loads` are tokens in flight, with a prompt's own part for `cache_aware`, or expected waits in microseconds,
and never empty; `turn` counts choices.
"""

KEEP_FACTOR = 2
KEEP_LEGS = 4
"""How many legs more than others an engine may have that a conversation returns to."""
OVERLAP_FROM_TOKENS = 2048
"""What is computed in the last step of a prefill leaves after it in either mode."""
TRANSFER_SECONDS_PER_TOKEN = 5e-6
"""About a quarter of a mebibyte of KV per token at 50 GB/s."""
COORDINATION_SECONDS = 0.002
"""What a decode leg takes to reach its engine's scheduler, and the engine to find the producer."""


def round_robin(loads: Sequence[int], turn: int, chance: Random) -> int:
    """One after the other."""
    del chance
    return turn % len(loads)


def at_random(loads: Sequence[int], turn: int, chance: Random) -> int:
    """Any, each as likely."""
    del turn
    return chance.randrange(len(loads))


def least_load(loads: Sequence[int], turn: int, chance: Random) -> int:
    """The one with the least load; equals take turns."""
    del chance
    least = min(loads)
    equals = [index for index, load in enumerate(loads) if load == least]
    return equals[turn % len(equals)]


def power_of_two(loads: Sequence[int], turn: int, chance: Random) -> int:
    """The less loaded of two picked at random."""
    del turn
    if len(loads) == 1:
        return 0
    first, second = chance.sample(range(len(loads)), 2)
    return first if loads[first] <= loads[second] else second


POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "random": at_random,
    "least_load": least_load,
    "power_of_two": power_of_two,
    "least_wait": least_load,
    "cache_aware": least_load,
}
MEASURED_POLICIES = frozenset({"least_wait"})
"""Those whose loads are expected waits."""
CACHE_POLICIES = frozenset({"cache_aware"})
"""Those whose loads are `prefix_costs`."""


@dataclass(frozen=True, slots=True)
class Queue:
    """What is known of a decode engine."""

    in_flight: int
    """The router's own legs to it."""
    wait_seconds: float | None
    """What it has lately added to the first token by itself; None when nobody knows."""
    usual_in_flight: float = 0.0
    """How many legs those met from which that is known."""


def expected_waits(queues: Sequence[Queue]) -> list[float]:
    """What each engine would add to the next request's first token, in seconds.

    A wait grows with the legs in flight, in relation to those that were in flight when it was measured: with
    their square, since all that an engine has no room for must wait. One that nobody knows counts as the
    least that is known, so that such an engine is tried; with none known the legs alone decide.
    """
    known = [queue.wait_seconds for queue in queues if queue.wait_seconds is not None]
    assumed = min(known, default=1.0)
    mean = sum(queue.in_flight for queue in queues) / len(queues)
    return [
        assumed * (1 + queue.in_flight) / (1 + mean)
        if queue.wait_seconds is None
        else queue.wait_seconds * ((1 + queue.in_flight) / (1 + queue.usual_in_flight)) ** 2
        for queue in queues
    ]


def prefix_costs(loads: Sequence[int], matched: Sequence[float], tokens: int) -> list[int]:
    """The tokens that stand between a prompt and its first token at each engine.

    `loads` are those in flight, `matched` is the share of the prompt's `tokens` that the engine has. So an
    engine that has a prefix is taken until others are idler by more than the prefix is long.
    """
    return [load + round(tokens * (1.0 - share)) for load, share in zip(loads, matched, strict=True)]


def rendezvous(names: Sequence[str], key: bytes) -> int:
    """The index of the name that a key belongs to: the same in every router, until that name is gone."""
    return max(range(len(names)), key=lambda index: blake2b(names[index].encode(), key=key[:64]).digest())


def worth_keeping(load: int, least: int) -> bool:
    """Whether an engine that knows the conversation is taken, another having the `least` legs in flight."""
    return load <= KEEP_LEGS + KEEP_FACTOR * least


def overlap_seconds(prompt_tokens: int) -> float:
    """What push saves by writing while prefill runs: all but the last step's KV, and the decode leg's way."""
    return COORDINATION_SECONDS + TRANSFER_SECONDS_PER_TOKEN * max(0, prompt_tokens - OVERLAP_FROM_TOKENS)


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A mode, and why: a label of `kvferry_router_transfers_total`."""

    mode: TransferMode
    reason: str


def transfer_mode(
    prompt_tokens: int, queues: Sequence[Queue], late_seconds: float | None, *, settled: bool = False
) -> ModeChoice:
    """The mode of one transfer: pull where choosing the decode engine late is worth more than overlap.

    `queues` are the decode engines that may be chosen. With fewer than two, or when affinity has `settled`
    which one it is, there is nothing to choose. With one that nobody has measured lately, an early choice is
    blind. Else push is worth `overlap_seconds`, and a late choice what it has lately been, `late_seconds`.
    """
    if len(queues) < 2:
        return ModeChoice("push", "one_decode")
    if settled:
        return ModeChoice("push", "affinity")
    if late_seconds is None or any(queue.wait_seconds is None for queue in queues):
        return ModeChoice("pull", "unknown")
    if late_seconds > overlap_seconds(prompt_tokens):
        return ModeChoice("pull", "late")
    return ModeChoice("push", "overlap")
