"""Late against eager decode legs, from outside: clients' time to the first token, engines' held room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import aiohttp

from kvferry.bench.arrivals import schedule

HELD_RATIO_MAX = 0.5
TTFT_RATIO_MAX = 1.05
_FIRST_PROMPTS = 8
"""Sent one by one before the load: a router that has measured nothing dispatches as if it were eager."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked, by a seed."""

    requests: int
    requests_per_second: float
    tokens: tuple[int, int]
    """The shortest and the longest prompt."""
    seed: int

    def prompts(self) -> list[int]:
        """The length of each prompt."""
        chance = Random(f"prompts {self.seed}")
        return [chance.randint(*self.tokens) for _ in range(self.requests)]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one kind of dispatch has come to."""

    ttfts: tuple[float, ...]
    """Seconds from when a request was due, sorted."""
    held_block_seconds: float

    def ttft(self, share: float) -> float:
        """The value that so large a share does not exceed."""
        return self.ttfts[min(int(len(self.ttfts) * share), len(self.ttfts) - 1)]


async def measure(router: str, decode: str, load: Load) -> Measured:
    """Send the load to a router; `decode` is any decode engine, for they count together.

    Raises:
        aiohttp.ClientError: a request failed.
    """
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        for tokens in load.prompts()[:_FIRST_PROMPTS]:
            await _first_token(session, router, tokens)
        before = await _held(session, decode)
        due = schedule(load.requests, load.requests_per_second, 1.0, load.seed) or [0.0] * load.requests
        start = asyncio.get_running_loop().time()
        waits = [
            _at(session, router, start + at, tokens) for at, tokens in zip(due, load.prompts(), strict=True)
        ]
        ttfts = await asyncio.gather(*waits)
        return Measured(tuple(sorted(ttfts)), await _held(session, decode) - before)


def table(kinds: dict[str, Measured]) -> list[str]:
    """The figures as text."""
    lines = [f"{'decode legs':<12}{'held block-seconds':>20}{'TTFT p50':>12}{'TTFT p95':>12}"]
    for name, kind in kinds.items():
        p50, p95 = (f"{kind.ttft(share) * 1e3:.0f} ms" for share in (0.5, 0.95))
        lines.append(f"{name:<12}{kind.held_block_seconds:>20.0f}{p50:>12}{p95:>12}")
    return lines


def problems(eager: Measured, late: Measured) -> Sequence[str]:
    """Which targets are missed, in words."""
    held = late.held_block_seconds / max(eager.held_block_seconds, 1e-9)
    waits = late.ttft(0.95) / eager.ttft(0.95)
    missed = []
    if held > HELD_RATIO_MAX:
        missed.append(f"late holds {held:.2f} of eager's block-seconds; the target is {HELD_RATIO_MAX}")
    if waits > TTFT_RATIO_MAX:
        missed.append(f"late's TTFT p95 is {waits:.3f} of eager's; the target is {TTFT_RATIO_MAX}")
    return missed


async def _at(session: aiohttp.ClientSession, router: str, due: float, tokens: int) -> float:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(max(due - clock(), 0.0))
    return await _first_token(session, router, tokens, due)


async def _first_token(
    session: aiohttp.ClientSession, router: str, tokens: int, due: float | None = None
) -> float:
    clock = asyncio.get_running_loop().time
    since = clock() if due is None else due
    body = {"model": "bench", "prompt": [1] * tokens, "max_tokens": 8, "stream": True}
    async with session.post(f"{router}/v1/completions", json=body, raise_for_status=True) as response:
        await response.content.readany()
        seconds = clock() - since
        await response.read()
    return seconds


async def _held(session: aiohttp.ClientSession, decode: str) -> float:
    async with session.get(f"{decode}/held", raise_for_status=True) as response:
        return float((await response.json())["block_seconds"])
