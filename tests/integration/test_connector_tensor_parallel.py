"""TP 2 to TP 2 on real engines: four ranks, each with an agent of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import aiohttp
import pytest

from tests.support.engine_processes import EngineProcess, Fleet, tokens

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

# Four ranks wait for each other by spinning; on two cores a step takes up to half a minute, agents included.
PATIENT = {
    "silence_seconds": 200,
    "handshake_seconds": 200,
    "unknown_seconds": 200,
    "permission_seconds": 200,
    "slice_seconds": 200,
    "kv_lease_duration": 400,
}


async def test_every_rank_gets_its_part(tmp_path):
    model = tmp_path / "model"
    command = [sys.executable, "-m", "kvferry.cli.main", "tiny-model", str(model)]
    await asyncio.to_thread(subprocess.run, command, check=True)
    engines = [
        EngineProcess(
            model,
            tmp_path / f"{name}.log",
            role,
            name,
            core="0|1",
            extra=PATIENT,
            arguments=("--tensor-parallel-size", "2"),
        )
        for name, role in (("p", "kv_producer"), ("d", "kv_consumer"))
    ]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            await asyncio.to_thread(engine.wait_ready)
        async with aiohttp.ClientSession() as session:
            fleet = Fleet(session, *engines)
            for count in (1, 130, 700):
                prompt = tokens(count, seed=count)
                answer = await fleet.both(prompt)
                assert answer.texts == (await fleet.reference(prompt)).texts
            assert await fleet.received() == 2
            await fleet.until(fleet.settled)
    finally:
        for engine in engines:
            engine.stop()
