"""Free lists as they look after hours of serving, so that block tables are scattered from the first request.

Whether a transfer has a handful of descriptors or tens of thousands depends on how scattered its blocks are;
a fresh engine hands out consecutive ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from kvferry.emulator.options import Fragmentation

CHURN_TURNOVER = 8
"""How many times each block is taken and given back, on average."""
CHURN_RUNNING_MAX = 16
CHURN_POOL_SHARE = 0.5
"""Of the pool, for the prompts of requests that run at once."""
PROMPT_BLOCKS_MAX = 1024
ANSWER_BLOCKS_MAX = 64


class FreeList(Protocol):
    """What we use of vLLM's queue of free blocks."""

    num_free_blocks: int

    def popleft_n(self, n: int) -> list[Any]:
        """Take the first `n`."""
        ...

    def append_n(self, blocks: list[Any]) -> None:
        """Put blocks at the end."""
        ...


def fragment(free: FreeList, kind: Fragmentation, seed: int) -> None:
    """Reorder the free blocks of an idle pool.

    `shuffled` leaves no two neighbours together but by chance. `churned` plays requests that come and go:
    each takes blocks for its prompt at once and for its answer one by one, in turn with the others, and gives
    them back last first, as vLLM does. Most blocks end up alone, some in runs of two or three.
    """
    random = Random(seed)
    if kind == "shuffled":
        blocks = free.popleft_n(free.num_free_blocks)
        random.shuffle(blocks)
        free.append_n(blocks)
    elif kind == "churned":
        _churn(free, random)


@dataclass(slots=True)
class _Request:
    blocks: list[Any]
    answer: int
    """Blocks that it will still take."""


def _churn(free: FreeList, random: Random) -> None:
    pool = free.num_free_blocks
    prompt_max = max(1, min(PROMPT_BLOCKS_MAX, int(pool * CHURN_POOL_SHARE / CHURN_RUNNING_MAX)))
    running: list[_Request] = []
    taken = 0
    while taken < CHURN_TURNOVER * pool:
        if len(running) < CHURN_RUNNING_MAX:
            prompt = min(_spread(random, prompt_max), free.num_free_blocks)
            running.append(_Request(free.popleft_n(prompt), _spread(random, ANSWER_BLOCKS_MAX)))
            taken += prompt
        for request in running:
            step = min(1, free.num_free_blocks)
            request.blocks += free.popleft_n(step)
            request.answer -= 1
            taken += 1
        for request in [one for one in running if one.answer <= 0]:
            free.append_n(request.blocks[::-1])
            running.remove(request)
    for request in running:
        free.append_n(request.blocks[::-1])


def _spread(random: Random, most: int) -> int:
    """A length from 1 to `most`; each order of magnitude is as likely as another."""
    return min(most, int(2 ** random.uniform(0, most.bit_length())))
