"""Real vLLM servers with FerryConnector, as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

START_SECONDS_MAX = 240.0
STOP_SECONDS_MAX = 20.0
SETTLE_SECONDS_MAX = 60.0


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class EngineProcess:
    """One server. `role` is its kv_role; `core` the CPU that computes."""

    model: Path
    log: Path
    role: str
    engine_id: str
    core: str = "0"
    extra: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    side_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server; `wait_ready` says when it serves."""
        transfer = {
            "kv_connector": "FerryConnector",
            "kv_role": self.role,
            "engine_id": self.engine_id,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"side_channel_port": self.side_port} | self.extra,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", "tiny", "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        command += ["--max-model-len", "2048", "--max-num-batched-tokens", "256"]
        command += ["--kv-transfer-config", json.dumps(transfer), *self.arguments]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": self.core,
            "UCX_TLS": "tcp",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=environment | self.environment,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it serves; the end of its log is the error's text."""
        assert self.process is not None
        stop = time.monotonic() + START_SECONDS_MAX
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > stop:
                tail = self.log.read_text(errors="replace")[-4000:]
                raise RuntimeError(f"{self.engine_id} did not start:\n{tail}")
            time.sleep(0.5)

    def kill(self) -> None:
        """SIGKILL to the server and all its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """SIGINT, and SIGKILL to what is left."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS_MAX)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    status: int
    body: dict[str, Any]

    @property
    def texts(self) -> list[str]:
        """The choices' texts."""
        return [choice["text"] for choice in self.body["choices"]]


async def complete(session: aiohttp.ClientSession, url: str, request_id: str = "", **body: Any) -> Answer:
    """A completion; greedy unless told otherwise."""
    headers = {"X-Request-Id": request_id} if request_id else {}
    body = {"model": "tiny", "temperature": 0} | body
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        return Answer(answer.status, await answer.json())


async def metric(session: aiohttp.ClientSession, url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry these labels."""
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    total = 0.0
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] != name:
            continue
        if all(f'{key}="{wanted}"' in head for key, wanted in labels.items()):
            total += float(value)
    return total


class Fleet:
    """A prefill and a decode engine, and what a router does with them."""

    def __init__(
        self, session: aiohttp.ClientSession, producer: EngineProcess, consumer: EngineProcess
    ) -> None:
        self.session, self.producer, self.consumer = session, producer, consumer
        self._source: dict[str, Any] | None = None

    async def source(self) -> dict[str, Any]:
        """The producer's coordinates, by probe."""
        if self._source is None:
            params = {"do_remote_decode": True, "probe": True}
            answer = await complete(
                self.session, self.producer.url, prompt=[5], max_tokens=1, kv_transfer_params=params
            )
            self._source = answer.body["kv_transfer_params"]
        assert self._source is not None
        return self._source

    def forget_source(self) -> None:
        """The producer was started anew."""
        self._source = None

    async def prefill(self, prompt: list[int], transfer: str, **changes: Any) -> Answer:
        """The prefill leg."""
        params = {"do_remote_decode": True, "transfer_id": transfer} | changes
        return await complete(
            self.session, self.producer.url, prompt=prompt, max_tokens=1, kv_transfer_params=params
        )

    async def decode(self, prompt: list[int], transfer: str, max_tokens: int = 8, **body: Any) -> Answer:
        """The decode leg."""
        params = await self.source() | {"transfer_id": transfer, "consumers": body.get("n", 1)}
        return await complete(
            self.session,
            self.consumer.url,
            prompt=prompt,
            max_tokens=max_tokens,
            kv_transfer_params=params,
            **body,
        )

    async def both(self, prompt: list[int], **body: Any) -> Answer:
        """Both legs at once; the decode leg's answer."""
        transfer = secrets.token_hex(16)
        _, answer = await asyncio.gather(
            self.prefill(prompt, transfer, consumers=body.get("n", 1)), self.decode(prompt, transfer, **body)
        )
        return answer

    async def reference(self, prompt: list[int], max_tokens: int = 8, **body: Any) -> Answer:
        """What the prefill engine answers alone."""
        return await complete(self.session, self.producer.url, prompt=prompt, max_tokens=max_tokens, **body)

    async def until(self, condition: Callable[[], Awaitable[object]]) -> None:
        """Wait until `condition`; a hang is an error."""
        async with asyncio.timeout(SETTLE_SECONDS_MAX):
            while not await condition():  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(0.1)

    async def settled(self) -> bool:
        """Whether both engines hold nothing: no block in use, no transfer in a table."""
        for engine in (self.producer, self.consumer):
            for name in (
                "vllm:kv_cache_usage_perc",
                "vllm:num_requests_running",
                "kvferry_transfers_in_flight",
                "kvferry_quarantined_blocks",
            ):
                if await metric(self.session, engine.url, name):
                    return False
        return True

    async def received(self) -> float:
        """Transfers that the consumer has received whole."""
        name = "kvferry_transfers_total"
        return await metric(self.session, self.consumer.url, name, outcome="completed", reason="written")

    async def receiving(self) -> float:
        """Transfers that the consumer waits for."""
        name = "kvferry_transfers_in_flight"
        return await metric(self.session, self.consumer.url, name, state="receiving")


def tokens(count: int, seed: int) -> list[int]:
    """A prompt."""
    random = Random(seed)
    return [random.randrange(10, 900) for _ in range(count)]
