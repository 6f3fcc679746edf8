"""Real engines under load: mixed requests with disconnects, many at once, and nothing to do at all."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from tests.support.live import Client, Live, completion, make_deployment, one_more_engine, run

pytestmark = pytest.mark.engines

CLOCK_TICKS = 100


def test_mixed_requests_with_disconnects(engines: Live, pull_router: str) -> None:
    """P02, P16, P63: 200 requests at concurrency 16, pushed or pulled, some clients leave; no leak."""
    chance = random.Random(11)
    stems = [engines.prompt(600) for _ in range(4)]
    bodies = []
    for _ in range(200):
        stem = chance.choice(stems)[: chance.randrange(600)]
        prompt = stem + engines.prompt(chance.randrange(1, 900))
        bodies.append(completion(prompt, chance.randrange(1, 12)))
    gate = asyncio.Semaphore(16)

    async def one(client: Client, body: dict[str, object]) -> str:
        async with gate:
            router = chance.choice((engines.endpoints.router, pull_router))
            if chance.random() < 0.25:
                left = await client.abandon(router, body, chance.random() * 2.0)
                return "left" if left else "answered"
            answer = await client.tokens(router, body)
        expected = await client.tokens(engines.reference, body)
        return "equal" if answer == expected else f"{answer} instead of {expected}"

    async def work(client: Client) -> list[str]:
        return list(await asyncio.gather(*(one(client, body) for body in bodies)))

    outcomes = run(work)
    assert set(outcomes) <= {"equal", "left", "answered"}, outcomes
    assert outcomes.count("equal") > 100
    assert outcomes.count("left") > 10
    for mode in ("push", "pull"):
        done = engines.metric(engines.decode, "kvferry_transfers_total", mode=mode, outcome="completed")
        assert done > 30, mode
    engines.assert_empty()


def test_many_prefills_that_end_together(engines: Live) -> None:
    """24 short prompts are prefilled in one step or two and handed over at once."""
    prompts = [engines.prompt(20) for _ in range(24)]

    async def work(client: Client) -> None:
        async def both(prompt: list[int]) -> None:
            body = completion(prompt, 6)
            assert await client.tokens(engines.endpoints.router, body) == await client.tokens(
                engines.reference, body
            )

        await asyncio.gather(*(both(prompt) for prompt in prompts))

    run(work)
    engines.assert_empty()


def test_preempted_prefills_are_delivered_right(engines: Live, tmp_path: Path) -> None:
    """P28, P44, G08: a prefill engine with too small a cache preempts; every answer is right."""
    few = make_deployment(
        Path(engines.deployment.model),
        tmp_path,
        reference=False,
        prefill_arguments=(
            *engines.deployment.prefill_arguments,
            *("--num-gpu-blocks-override", "14", "--no-scheduler-reserve-full-isl"),
            *("--no-enable-prefix-caching", "--max-model-len", "1600"),
        ),
    )
    bodies = [completion(engines.prompt(length), 6) for length in (900, 1000, 1100, 800, 1200, 700)]

    async def one(client: Client, small: str, number: int) -> None:
        body = bodies[number]
        transfer = f"preempted-{number:04}-{time.monotonic_ns()}"
        probe = completion([500], 1, kv_transfer_params={"do_remote_decode": True, "probe": True})
        source = (await client.post(small, probe))["kv_transfer_params"]
        prefill = {"do_remote_decode": True, "transfer_id": transfer}
        decode = source | {"transfer_id": transfer}
        answer, _ = await asyncio.gather(
            client.tokens(engines.decode, body | {"kv_transfer_params": decode}),
            client.post(small, body | {"max_tokens": 1, "kv_transfer_params": prefill}),
        )
        assert answer == await client.tokens(engines.reference, body)

    with one_more_engine(few, "prefill-small") as small:

        async def work(client: Client) -> None:
            await asyncio.gather(*(one(client, small, number) for number in range(len(bodies))))

        run(work)
        assert engines.metric(small, "vllm:num_preemptions_total") > 0
        engines.wait(lambda: engines.metric(small, "vllm:kv_cache_usage_perc") == 0, what="P's cache")
        engines.wait(lambda: engines.metric(small, "kvferry_transfers_in_flight") == 0, what="P's table")
    engines.assert_empty()


def thread_seconds(guard_pid: int) -> dict[str, float]:
    """CPU seconds so far of each thread of kvferry's below a server's guard, by process and thread."""
    seconds = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or group_of(process) != guard_pid:
            continue
        for task in process.glob("task/*"):
            if not (task / "comm").read_text().startswith("kvferry"):
                continue
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            seconds[f"{process.name}/{task.name}"] = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
    return seconds


def group_of(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[2])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def test_idle_engines_cost_next_to_nothing(engines: Live) -> None:
    """G09: ten idle seconds: kvferry's threads use under 2 % of one core per engine."""
    engines.assert_empty()
    time.sleep(2.0)
    pids = [engines.server(name).pid for name in ("prefill-0", "decode-0")]
    before = [thread_seconds(pid) for pid in pids]
    time.sleep(10.0)
    for pid, earlier in zip(pids, before, strict=True):
        now = thread_seconds(pid)
        assert earlier, "kvferry's threads are found"
        used = sum(seconds - earlier.get(thread, 0.0) for thread, seconds in now.items())
        assert used < 0.2, f"{used:.2f} s in 10 s: {now}"
