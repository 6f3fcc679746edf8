"""One emulated prefill and one emulated decode engine, and requests whose two legs are sent at once."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from kvferry.cli.emulated import SERVED_NAME, EmulatedEngine, write_emulated_model
from kvferry.cli.engines import KV_ROLES
from kvferry.cli.fleet import Fleet
from kvferry.cli.ports import free_ports
from kvferry.emulator.presets import DEFAULT

ROOT = Path(__file__).parents[2]
POLITE = ROOT / "tests" / "support" / "polite_queue"
BUSY = {"PYTHONPATH": os.pathsep.join((str(POLITE), str(ROOT), os.environ.get("PYTHONPATH", "")))}
"""For engines of several ranks, whose queues would spin on every core of a small machine."""
STARTUP_SECONDS = 240.0
REQUEST_SECONDS = 90.0
REPORT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the two engines said to one prompt."""

    prefilled: list[int]
    decoded: list[int]


@dataclass(frozen=True, slots=True)
class EmulatedPair:
    """A running pair."""

    prefill: str
    decode: str
    connector: str
    side_channel: int
    """Port of the prefill engine's, for vLLM's connectors."""
    files: Path

    def report(self, engine: str, until: Callable[[dict[str, Any]], bool] = bool) -> dict[str, Any]:
        """The engine's counters, as soon as `until` holds for them.

        Raises:
            TimeoutError: it did not within a bound; shows the last ones.
        """
        deadline = time.monotonic() + REPORT_SECONDS
        while True:
            found: dict[str, Any] = json.loads((self.files / f"{engine}.json").read_text())
            if until(found):
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"{engine}'s counters did not come to what was waited for: {found}")
            time.sleep(0.1)

    def rows(self, engine: str, kind: str) -> list[dict[str, Any]]:
        """The engine's journal so far."""
        # The last line may still be written.
        lines = (self.files / f"{engine}.jsonl").read_text().rpartition("\n")[0].splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def answers(self, lengths: list[int], output_tokens: int = 4, mode: str = "push") -> list[Answer]:
        """Send prompts of these lengths, all at once, and wait for their answers; `mode` is kvferry's.

        Each mode has prompts of its own: what an engine knows from another turn does not travel again.
        """
        return asyncio.run(self._answers(lengths, output_tokens, mode))

    async def _answers(self, lengths: list[int], output_tokens: int, mode: str) -> list[Answer]:
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            source = await self._source(session)
            if self.connector == "FerryConnector":
                source = {**source, "transfer_mode": mode}
            legs = [
                self._answer(session, source, _prompt(length, f"{mode} {place}"), output_tokens)
                for place, length in enumerate(lengths)
            ]
            return list(await asyncio.gather(*legs))

    async def _source(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """Where the prefill engine's KV can be had."""
        if self.connector != "FerryConnector":
            return {
                "remote_engine_id": "prefill",
                "remote_host": "127.0.0.1",
                "remote_port": self.side_channel,
                "remote_block_ids": None,
                "tp_size": 1,
            }
        # As routers ask. Else it would keep what it has computed for a while, and step the whole time.
        params: dict[str, Any] = {"do_remote_decode": True, "probe": True}
        body = {"prompt": [400, 401], "max_tokens": 1, "kv_transfer_params": params}
        answer = await _post(session, self.prefill, body, secrets.token_hex(8))
        source: dict[str, Any] = answer["kv_transfer_params"]
        return source

    async def _answer(
        self, session: aiohttp.ClientSession, source: Mapping[str, Any], prompt: list[int], tokens: int
    ) -> Answer:
        request, transfer = secrets.token_hex(8), secrets.token_hex(16)
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        decode = {**source, "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer}
        if self.connector != "FerryConnector":
            decode["remote_request_id"] = request
        answers = await asyncio.gather(
            _post(session, self.prefill, {**body, "max_tokens": 1, "kv_transfer_params": prefill}, request),
            _post(
                session, self.decode, {**body, "max_tokens": tokens, "kv_transfer_params": decode}, request
            ),
        )
        prefilled, decoded = (answer["choices"][0]["token_ids"] for answer in answers)
        return Answer(prefilled, decoded)


@contextmanager
def emulated_pair(
    connector: str, files: Path, *, prefill: Mapping[str, Any] | None = None, **engine: Any
) -> Iterator[EmulatedPair]:
    """Start a pair; `prefill` has the emulator's options for that engine alone, `engine` is both's."""
    write_emulated_model(files / "model", preset=engine.get("preset", DEFAULT))
    ports, ranks = free_ports(4), engine.get("ranks", (1, 1))
    specs = []
    for at, (name, role) in enumerate(KV_ROLES.items()):
        options = {
            "journal": str(files / f"{name}.jsonl"),
            "report": str(files / f"{name}.json"),
            **((prefill or {}) if name == "prefill" else {}),
        }
        one = EmulatedEngine(
            name=name,
            transfer=_transfer(connector, role, name),
            options={**engine.get("options", {}), **options},
            cache_bytes=engine.get("cache_bytes", 768 << 20),
            step_tokens=engine.get("step_tokens", 2048),
            ranks=ranks[at],
            preset=engine.get("preset", DEFAULT),
            environment={
                "KVFERRY_TESTING": "1",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[2 + at]),
                **(BUSY if max(ranks) > 1 else {}),
            },
        )
        specs.append(one.server(files / "model", ports[at], files / f"{name}.log"))
    with Fleet(report=print) as fleet:
        fleet.start(specs)
        fleet.wait_ready(STARTUP_SECONDS)
        yield EmulatedPair(specs[0].url, specs[1].url, connector, ports[2], files)


def _transfer(connector: str, role: str, name: str) -> dict[str, Any]:
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": role, "engine_id": name}
    if connector == "FerryConnector":
        extra = {"side_channel_host": "127.0.0.1", "side_channel_port": 0}
        return {**config, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
    return {**config, "kv_buffer_device": "cpu"}


def _prompt(length: int, salt: str) -> list[int]:
    random = Random(f"{length} {salt}")
    return [random.randrange(300, 1000) for _ in range(length)]


async def _post(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], request: str
) -> dict[str, Any]:
    headers = {"X-Request-Id": request}
    whole = {"model": SERVED_NAME, **body}
    async with session.post(f"{url}/v1/completions", json=whole, headers=headers) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer
