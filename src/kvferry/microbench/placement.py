"""Which blocks a transfer has on a side: in one piece, none beside another, or as after hours of serving."""

from __future__ import annotations

from collections import deque
from random import Random

from kvferry.ids import BlockId
from kvferry.microbench.cells import POOL_SHARE, Fragmentation

TURNOVER = 8
"""How many times each block of a churned pool was taken and given back, on average."""
RUNNING = 16
"""Requests that ran at once while it was churned."""


def place(
    fragmentation: Fragmentation, pool_blocks: int, blocks: int, transfers: int, random: Random
) -> list[list[BlockId]]:
    """The block ids of each transfer, in the order of their tokens; no block is in two.

    "contiguous" is one run per transfer. "scattered" is in any order, and no block is next to another.
    "churned" is what the free list of a pool holds in front after requests have come and gone.
    """
    wanted = blocks * transfers
    assert POOL_SHARE * wanted <= pool_blocks, "the grid holds only what fits"
    if fragmentation == "contiguous":
        first = random.randrange(pool_blocks - wanted + 1)
        taken = list(range(first, first + wanted))
    elif fragmentation == "scattered":
        taken = random.sample(range(0, pool_blocks - 1, 2), wanted)
    else:
        taken = _churned(pool_blocks, wanted, random)
    return [taken[start : start + blocks] for start in range(0, wanted, blocks)]


def _churned(pool_blocks: int, wanted: int, random: Random) -> list[BlockId]:
    """Requests take blocks, for prompts at once and for answers one by one, and give them back last first."""
    free = deque(range(pool_blocks))
    prompt_max = max(1, pool_blocks // (2 * RUNNING))
    running: list[list[BlockId]] = []
    taken = 0
    while taken < TURNOVER * pool_blocks:
        if len(running) == RUNNING:
            free.extend(reversed(running.pop(random.randrange(RUNNING))))
        running.append([free.popleft() for _ in range(min(random.randint(1, prompt_max), len(free)))])
        taken += len(running[-1])
        for request in running:
            if free:
                request.append(free.popleft())
                taken += 1
    for request in running:
        free.extend(reversed(request))
    return [free.popleft() for _ in range(wanted)]
