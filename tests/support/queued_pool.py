"""A modelled pool on virtual time behind the router's real dispatch: one P, decode engines that differ.

P serves one prompt after the other. A decode engine has slots; a leg holds one from its arrival to its last
token, in a push through P's queue, too. KV that was not written while prefill ran is written afterwards: all
of it when the decode engine came late, else what the last step has computed, or what there was no time for.
No socket, no thread: what the engines are asked is what `Engines` would send.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvferry.bench.virtual_time import run_virtually
from kvferry.router.api.openai import Endpoint
from kvferry.router.dispatch.dispatcher import Dispatcher
from kvferry.router.dispatch.prompt import Prompt
from kvferry.router.engines.pool import Pool, Role, Worker
from kvferry.router.ground.settings import DecodeDispatch, RouterMode, RouterSettings
from kvferry.router.http.answers import Answer
from kvferry.router.legs.tasks import Call, DecodeStream, PrefillAnswer
from kvferry.router.record.metrics import RouterMetrics
from tests.support.fake_engine import source

STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeModel:
    """One decode engine: `first_seconds` is what it adds to a first token, whatever the reason."""

    slots: int = 64
    first_seconds: float = 0.01
    decode_seconds: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolModel:
    """A deployment and its load."""

    decode: tuple[DecodeModel, ...]
    prompt_tokens: tuple[int, int]
    """The shortest and the longest prompt; lengths between are equally likely."""
    requests_per_second: float
    requests: int = 600
    prefill_tokens_per_second: float = 40_000.0
    prefill_noise: float = 0.0
    """By which share, at most, a prefill takes more or less than its tokens say."""
    transfer_seconds_per_token: float = 5e-6


def _answered(worker: Worker, slot: ExitStack) -> DecodeStream:
    """An answered decode leg: nothing of it is read, its slot is given back."""
    nowhere: Any = None
    stream = DecodeStream(worker, Answer(nowhere, asyncio.get_running_loop()), 1)
    stream.closes(slot.close)
    return stream


@dataclass(slots=True)
class _Engines:
    """Stands where the router's `Engines` does."""

    model: PoolModel
    workers: Mapping[Worker, DecodeModel]
    chance: Random
    prefill_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    prefilled: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    slots: dict[Worker, asyncio.Semaphore] = field(default_factory=dict)

    async def prefill(self, worker: Worker, call: Call) -> PrefillAnswer:
        assert call.body is not None
        body = json.loads(call.body)
        with worker.leg(call.tokens):
            async with self.prefill_turn:
                seconds = len(body["prompt"]) / self.model.prefill_tokens_per_second
                noise = self.model.prefill_noise
                await asyncio.sleep(seconds * self.chance.uniform(1 - noise, 1 + noise))
        self.prefilled[body["kv_transfer_params"]["transfer_id"]].set()
        return PrefillAnswer(source(), None, source().to_params())

    async def stream(self, worker: Worker, call: Call) -> DecodeStream:
        assert call.body is not None
        body = json.loads(call.body)
        prefilled = self.prefilled[body["kv_transfer_params"]["transfer_id"]]
        tokens = len(body["prompt"])
        model = self.workers[worker]
        with ExitStack() as slot:
            slot.enter_context(worker.leg(call.tokens))
            await self.slots[worker].acquire()
            slot.callback(self.slots[worker].release)
            since = asyncio.get_running_loop().time()
            late = prefilled.is_set()
            await prefilled.wait()
            written = (asyncio.get_running_loop().time() - since) / self.model.transfer_seconds_per_token
            left = tokens if late else max(min(tokens, STEP_TOKENS), tokens - written)
            await asyncio.sleep(left * self.model.transfer_seconds_per_token + model.first_seconds)
            return _answered(worker, slot.pop_all())


def ttfts(model: PoolModel, mode: RouterMode, policy: str = "least_load", seed: int = 1) -> list[float]:
    """The times to the first token, in seconds, of all requests, sorted."""
    return run_virtually(_run(model, {"transfer_mode": mode, "decode_policy": policy}, Random(seed))).ttfts


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has come to."""

    ttfts: list[float]
    """Seconds, sorted."""
    held_block_seconds: float
    """What the router has measured of decode engines that waited for prefill."""


def dispatched(model: PoolModel, dispatch: DecodeDispatch, seed: int = 1) -> Outcome:
    """A run of pushes with one kind of `--decode-dispatch`."""
    return run_virtually(_run(model, {"decode_dispatch": dispatch}, Random(seed)))


def p95(sorted_seconds: list[float]) -> float:
    """The value that one in twenty exceeds."""
    return sorted_seconds[len(sorted_seconds) * 95 // 100]


async def _run(model: PoolModel, chosen: dict[str, Any], chance: Random) -> Outcome:
    urls = tuple(f"http://d{number}" for number in range(len(model.decode)))
    settings = RouterSettings(prefill=("http://p",), decode=urls, affinity="off", **chosen)
    clock = asyncio.get_running_loop().time
    pool = Pool(chance=chance, changed=lambda worker: None, clock=clock)
    pool.add(Role.PREFILL, settings.prefill, settings.prefill_policy)
    pool.add(Role.DECODE, settings.decode, settings.decode_policy)
    for worker in pool.workers():
        pool.alive(worker)
    pool.learn(pool.workers(Role.PREFILL)[0], source())
    models = dict(zip(pool.workers(Role.DECODE), model.decode, strict=True))
    engines: Any = _Engines(model, models, chance)
    engines.slots = {worker: asyncio.Semaphore(each.slots) for worker, each in models.items()}
    nobody: Any = None
    metrics = RouterMetrics()
    dispatcher = Dispatcher(settings, pool, engines, nobody, metrics)

    async def one() -> float:
        arrived = clock()
        served = await dispatcher.serve(_prompt(chance.randint(*model.prompt_tokens)))
        seconds = clock() - arrived
        await asyncio.sleep(models[served.route.decode].decode_seconds)
        served.finish()
        served.close()
        return seconds

    tasks = []
    for _ in range(model.requests):
        await asyncio.sleep(chance.expovariate(model.requests_per_second))
        tasks.append(asyncio.create_task(one()))
    seconds = sorted(await asyncio.gather(*tasks))
    held = metrics.registry.get_sample_value("kvferry_router_decode_held_block_seconds_total")
    return Outcome(seconds, held or 0.0)


def _prompt(tokens: int) -> Prompt:
    return Prompt(
        endpoint=Endpoint.COMPLETIONS,
        body={"prompt": [1] * tokens},
        n=1,
        stream=True,
        whole_prompt=False,
        request_id="r",
        headers={},
    )
