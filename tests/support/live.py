"""Real vLLM engines behind the real router, as `kvferry up` starts them, and a client for tests."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.cli.engines import Deployment, Endpoints, bring_up, engine_specs, router_spec
from kvferry.cli.fleet import Fleet
from kvferry.cli.ports import free_ports
from kvferry.cli.processes import ServerProcess, ServerSpec
from kvferry.cli.requests import fetch

MODEL = "tiny"
BLOCK_TOKENS = 128
CHUNK_TOKENS = 512
VOCABULARY = (430, 1020)
"""Token ids that are words of the tiny model."""
STARTUP_SECONDS = 240.0
REQUEST_SECONDS = 120.0
SETTLE_SECONDS = 60.0

Params = dict[str, Any]


def arguments(*more: str) -> tuple[str, ...]:
    """vLLM arguments of all engines: several chunks per long prompt, float32 so that answers can be equal."""
    return (
        *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
        *("--max-model-len", "8192"),
        *("--max-num-seqs", "32"),
        *("--dtype", "float32"),
        *more,
    )


@dataclass
class Live:
    """A running fleet."""

    fleet: Fleet
    deployment: Deployment
    endpoints: Endpoints
    seed: random.Random = field(default_factory=lambda: random.Random(7))

    def prompt(self, tokens: int) -> list[int]:
        """Token ids of a prompt that no other test has used."""
        return [self.seed.randrange(*VOCABULARY) for _ in range(tokens)]

    @property
    def prefill(self) -> str:
        """Where the first prefill engine answers."""
        return self.endpoints.prefill[0]

    @property
    def decode(self) -> str:
        """Where the first decode engine answers."""
        return self.endpoints.decode[0]

    @property
    def reference(self) -> str:
        """Where the engine without a connector answers."""
        assert self.endpoints.reference is not None
        return self.endpoints.reference

    def metric(self, url: str, name: str, **labels: str) -> float:
        """The sum of an engine's samples of one name with these labels."""
        return sample(fetch(url, "/metrics", seconds=10.0), name, **labels)

    def wait(self, condition: Callable[[], object], seconds: float = SETTLE_SECONDS, what: str = "") -> float:
        """Poll until `condition` holds; returns how long it took."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() > start + seconds:
                raise AssertionError(f"not within {seconds:g} s: {what}\n{self.state()}")
            time.sleep(0.05)
        return time.monotonic() - start

    async def until(self, condition: Callable[[], object], seconds: float = SETTLE_SECONDS) -> None:
        """As `wait`, while other requests go on."""
        await asyncio.to_thread(self.wait, condition, seconds)

    def is_empty(self) -> bool:
        """Whether no engine has a block in use, a transfer in a table or a block in quarantine."""
        return all(
            self.metric(url, "vllm:kv_cache_usage_perc") == 0
            and self.metric(url, "kvferry_transfers_in_flight") == 0
            and self.metric(url, "kvferry_quarantined_blocks") == 0
            for url in (*self.endpoints.prefill, *self.endpoints.decode)
        )

    def assert_empty(self) -> None:
        """Free blocks are as at the start and no transfer is left, soon."""
        self.wait(self.is_empty, what="empty tables and caches")

    def state(self) -> str:
        """What the engines say of their transfers, and the ends of their logs."""
        texts = []
        for url in (*self.endpoints.prefill, *self.endpoints.decode):
            try:
                lines = fetch(url, "/metrics", seconds=10.0).splitlines()
            except Exception as error:  # noqa: BLE001 - it may be the one that was killed
                texts.append(f"{url}: {error}")
                continue
            wanted = ("kvferry_transfers", "kvferry_quarantined", "vllm:kv_cache_usage")
            kept = [line for line in lines if line.startswith(wanted) and "_created" not in line]
            texts.append("\n".join([url, *kept]))
        texts += [f"--- {server.spec.name}\n{server.log_tail(15)}" for server in self.fleet.servers]
        return "\n".join(texts)

    def server(self, name: str) -> ServerProcess:
        """A server of the fleet."""
        return self.fleet[name]

    def restart(self, name: str) -> None:
        """Start a killed engine again: same address, same engine id, same arguments."""
        self.fleet.start([self.fleet[name].spec])
        self.fleet.wait_ready(STARTUP_SECONDS)


@contextmanager
def live(deployment: Deployment) -> Iterator[Live]:
    """Bring a deployment up for the block."""
    with Fleet(report=print) as fleet:
        endpoints = bring_up(fleet, deployment, startup_seconds=STARTUP_SECONDS)
        yield Live(fleet, deployment, endpoints)


@contextmanager
def one_more_engine(deployment: Deployment, name: str, place: int = 0) -> Iterator[str]:
    """Start the engine at a place of another deployment beside a running fleet, under another server name."""
    spec = replace(engine_specs(deployment)[place], name=name, log=deployment.logs / f"{name}.log")
    with one_more_server(spec) as url:
        yield url


@contextmanager
def one_more_server(spec: ServerSpec) -> Iterator[str]:
    """Start a server beside a running fleet."""
    with Fleet(report=print) as fleet:
        fleet.start([spec])
        fleet.wait_ready(STARTUP_SECONDS)
        yield spec.url


@contextmanager
def one_more_router(engines: Live, name: str, *arguments: str, decode: tuple[str, ...] = ()) -> Iterator[str]:
    """Start another router over the engines of a running fleet, and more decode engines."""
    deployment = replace(engines.deployment, router_arguments=arguments)
    urls = (*engines.endpoints.decode, *decode)
    spec = router_spec(deployment, engines.endpoints.prefill, urls, free_ports(1)[0])
    with one_more_server(replace(spec, name=name, log=deployment.logs / f"{name}.log")) as url:
        yield url


def sample(text: str, name: str, **labels: str) -> float:
    """The sum of the samples of one metric name that carry these labels."""
    total = 0.0
    for line in text.splitlines():
        found = re.match(r"(?P<name>[^{ ]+)(\{(?P<labels>.*)\})? (?P<value>\S+)$", line)
        if found and found["name"] == name:
            pairs = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', found["labels"] or ""))
            if all(pairs.get(key) == value for key, value in labels.items()):
                total += float(found["value"])
    return total


def completion(prompt: object, max_tokens: int = 8, **more: object) -> dict[str, Any]:
    """A greedy completion that tells its token ids."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        **more,
    }


def token_ids(answer: Mapping[str, Any]) -> list[list[int]]:
    """The token ids of every choice, in order."""
    return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


class Client:
    """Requests to any server of the fleet, many at a time."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(
        self, url: str, body: Params, path: str = "/v1/completions", **headers: str
    ) -> dict[str, Any]:
        """The answer's body; another status than 200 fails the test."""
        status, answer = await self.attempt(url, body, path, **headers)
        assert status == 200, (status, answer)
        return answer

    async def attempt(
        self, url: str, body: Params, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """Status and body; headers are written with `_` for `-`."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(url + path, json=body, headers=sent) as response:
            text = await response.text()
        return response.status, json.loads(text)

    async def tokens(self, url: str, body: Params) -> list[list[int]]:
        """The token ids of each choice."""
        return token_ids(await self.post(url, body))

    async def streamed(self, url: str, body: Params, headers: Mapping[str, str]) -> list[int]:
        """The token ids of one choice, from a stream that must end in good order."""
        tokens: list[int] = []
        done = False
        async with self.session.post(
            url + "/v1/completions", json=body | {"stream": True}, headers=headers
        ) as response:
            assert response.status == 200, (response.status, await response.text())
            async for line in response.content:
                if line.strip() == b"data: [DONE]":
                    done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
        assert done
        return tokens

    async def abandon(self, url: str, body: Params, seconds: float) -> bool:
        """Disconnect after so long; whether it had not been answered by then."""
        try:
            await asyncio.wait_for(self.post(url, body), seconds)
        except TimeoutError:
            return True
        return False


def run(work: Callable[[Client], Any]) -> Any:
    """Run `await work(client)` with a client of its own."""

    async def main() -> Any:
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        # vLLM's server closes a connection that is idle for 5 s, whatever has just been sent on it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            return await work(Client(session))

    return asyncio.run(main())


def make_deployment(model: Path, logs: Path, **changes: Any) -> Deployment:
    """One prefill engine, one decode engine and the reference."""
    fields: dict[str, Any] = {
        "model": str(model),
        "served_name": MODEL,
        "reference": True,
        "prefill_arguments": arguments(),
        "decode_arguments": arguments(),
        "logs": logs,
    }
    return Deployment(**(fields | changes))
