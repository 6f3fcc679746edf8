"""A modelled deployment: one prefill engine, and decode engines that differ. No HTTP, no KV: only time.

The prefill engine computes one prompt after the other, in steps; the KV of all but the last step can travel
while it computes, to a decode engine that has room by then. A decode engine has room for so many requests; a
request takes its place when it arrives and the room is there, and keeps it until its last token: a pushed one
through the rest of its prefill, too. The more requests an engine decodes, the longer is a step. Other clients
may use a decode engine besides, whom no router sees.

All time is the event loop's, virtual or real.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillModel:
    """The prefill engine, and the way from it."""

    tokens_per_second: float = 40_000.0
    step_tokens: int = 2048
    """What the last step computes travels after it, whoever moves it."""
    transfer_seconds_per_token: float = 5e-6
    """A quarter of a mebibyte per token at 50 GB/s."""
    fetch_seconds: float = 0.002
    """What a decode engine that is asked only after prefill needs to find the KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeModel:
    """A decode engine."""

    room: int = 64
    """Requests that it holds at once; others wait in the order of their arrival."""
    step_seconds: float = 0.01
    """Of an empty engine; a full one's takes twice as long."""
    other_requests_per_second: float = 0.0
    """What others send, while they do."""
    other_tokens: int = 100
    other_period_seconds: float = 0.0
    """Others send in the first half of each such period; 0 is always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolModel:
    """A deployment."""

    prefill: PrefillModel
    decode: tuple[DecodeModel, ...]


@dataclass(slots=True)
class _Decoder:
    model: DecodeModel
    room: asyncio.Semaphore
    decoding: int = 0

    @property
    def step_seconds(self) -> float:
        return self.model.step_seconds * (1 + self.decoding / self.model.room)


class ModelledPool:
    """A deployment that runs; `others` must run beside it for as long."""

    def __init__(self, model: PoolModel, seed: int) -> None:
        self._prefill = model.prefill
        self._turn = asyncio.Lock()
        self._prefilled: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._decoders = [_Decoder(each, asyncio.Semaphore(each.room)) for each in model.decode]
        self._seed = seed

    async def prefill(self, transfer: str, tokens: int) -> None:
        """Compute a prompt when it is its turn."""
        async with self._turn:
            await asyncio.sleep(tokens / self._prefill.tokens_per_second)
        self._prefilled[transfer].set()

    @asynccontextmanager
    async def decode(self, number: int, transfer: str, tokens: int) -> AsyncIterator[float]:
        """Hold a place at a decode engine; entered with the first token, told the seconds per further one."""
        decoder = self._decoders[number]
        prefilled = self._prefilled[transfer]
        fetches = prefilled.is_set()
        async with decoder.room:
            late_tokens = tokens if prefilled.is_set() else min(tokens, self._prefill.step_tokens)
            await prefilled.wait()
            del self._prefilled[transfer]
            await asyncio.sleep(
                late_tokens * self._prefill.transfer_seconds_per_token
                + (self._prefill.fetch_seconds if fetches else 0.0)
            )
            decoder.decoding += 1
            try:
                step_seconds = decoder.step_seconds
                # It waits for the step that runs. How long is the same for one prompt in every run.
                await asyncio.sleep(step_seconds * (1 + tokens * _GOLDEN % 1))
                yield step_seconds
            finally:
                decoder.decoding -= 1

    async def others(self) -> None:
        """Send what other clients send, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number, decoder in enumerate(self._decoders):
                if decoder.model.other_requests_per_second:
                    chance = Random(f"others {self._seed} {number}")
                    tasks.create_task(_send_others(decoder, chance, tasks))


async def _send_others(decoder: _Decoder, chance: Random, tasks: asyncio.TaskGroup) -> None:
    model = decoder.model
    clock = asyncio.get_running_loop().time
    started = clock()
    while True:
        await asyncio.sleep(chance.expovariate(model.other_requests_per_second))
        period = model.other_period_seconds
        if not period or (clock() - started) % period < period / 2:
            tasks.create_task(_other(decoder))


async def _other(decoder: _Decoder) -> None:
    async with decoder.room:
        decoder.decoding += 1
        try:
            await asyncio.sleep(decoder.step_seconds * decoder.model.other_tokens)
        finally:
            decoder.decoding -= 1
