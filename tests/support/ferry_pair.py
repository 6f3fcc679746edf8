"""Two engines with vLLM's schedulers, the real agents and real bytes, in one process.

The model is replaced by a function that writes KV which depends on the whole prefix, and checks, each time
a request is scheduled, every byte of what is said to be computed. So a late write, a stale block or a wrong
offset shows wherever it happens, on either engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from kvferry.agent.agent import Agent
from kvferry.agent.directory import Directory, RankEntry
from kvferry.agent.links import Identity
from kvferry.connector.caches import Model, Table, describe_caches
from kvferry.ids import EngineId, Incarnation, PeerName, Rank
from kvferry.layout.ranks import heads_of
from kvferry.layout.spec import CacheSpec, encode_spec
from kvferry.protocol.limits import Limits
from kvferry.transport.memory import MemoryFabric, MemoryTransport
from tests.support.vllm_engine import BLOCK_TOKENS, HEAD_SIZE, HEADS, LAYERS, Engine, Shape

FAST = Limits(
    lease_seconds=1.0,
    renew_seconds=0.1,
    write_seconds=0.4,
    silence_seconds=1.0,
    handshake_seconds=2.0,
    unknown_seconds=1.0,
    slice_seconds=2.0,
    slice_bytes=4 * BLOCK_TOKENS * HEADS * HEAD_SIZE * 4 * 2 * len(LAYERS),
)
_MODULUS = 1 << 20


class Phonebook:
    """All directories of the process; resolves at once."""

    def __init__(self) -> None:
        self.directories: dict[EngineId, Directory] = {}

    def resolve(
        self,
        host: str,
        port: int,
        engine: EngineId,
        callback: Callable[[Directory | Exception], None],
        *,
        patient: bool = True,
    ) -> None:
        """Look the engine up."""
        callback(self.directories.get(engine) or ConnectionError(f"{engine} is not in the book"))

    def close(self) -> None:
        """Nothing."""


class Member:
    """One engine: scheduler, and per rank worker side, agent and KV memory."""

    def __init__(self, name: str, model: Path, fabric: MemoryFabric, book: Phonebook, shape: Shape) -> None:
        self.shape = shape
        self.caches: list[dict[str, torch.Tensor]] = []
        """`[kernel block, head, token, content]` of each layer, by rank; of cache groups, over each other."""
        self.agents: list[Agent] = []
        self.peers: list[PeerName] = []
        entries = []
        for rank in shape.places:
            spec = self._describe(rank)
            identity = Identity(EngineId(name), Incarnation("first"), rank)
            agent = Agent(identity, spec, lambda peer: MemoryTransport(fabric, peer), FAST, book)
            self.agents.append(agent)
            self.peers.append(identity.peer)
            entries.append(
                RankEntry(
                    pp=rank.pp,
                    tp=rank.tp,
                    peer=identity.peer,
                    metadata=agent.start(),
                    cache=encode_spec(spec),
                )
            )
        book.directories[EngineId(name)] = Directory(
            engine=EngineId(name),
            incarnation=Incarnation("first"),
            tp_size=shape.ranks,
            pp_size=shape.stages,
            ranks=tuple(entries),
        )
        self.engine = Engine(model, self.agents, shape)
        self.engine.forward = self._forward
        self.computed_tokens: dict[str, int] = {}
        """Tokens that the engine has computed itself, by request."""

    @property
    def block_bytes(self) -> int:
        """Of a block of all layers, on one rank."""
        return sum(cache[0].numel() * cache.element_size() for cache in self.caches[0].values())

    def _describe(self, rank: Rank) -> CacheSpec:
        """Make a rank's memory, and describe it by the way of an engine's tensors."""
        shape = self.shape
        held = heads_of(rank.tp, shape.ranks, shape.heads)
        memory: dict[tuple[int, int], torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        tables = []
        for layers, block_tokens, window in shape.groups:
            stages = [
                tuple(name for name in shape.layers(stage) if name in layers) for stage in range(shape.stages)
            ]
            for place, name in enumerate(stages[rank.pp]):
                # A block belongs to one group at a time, so that their layers lie over each other.
                ratio = shape.ratio(block_tokens)
                sizes = shape.blocks * ratio, len(held), block_tokens // ratio, shape.content_size
                tensors[name] = memory.setdefault((place, block_tokens), torch.zeros(sizes))
            tables.append(Table(stages[rank.pp], block_tokens, window, stages=tuple(stages)))
        self.caches.append(tensors)
        return describe_caches(
            tensors,
            model=Model("tiny", "float32", shape.cache_type, shape.heads, is_mla=shape.latent, facts={}),
            rank=rank,
            tp=shape.ranks,
            pp=shape.stages,
            tables=tables,
            block_count=shape.blocks,
        ).spec

    def _forward(self, rank: int, planned: Any) -> None:
        place = self.shape.places[rank]
        held = torch.tensor(heads_of(place.tp, self.shape.ranks, self.shape.heads))
        for name, count in planned.num_scheduled_tokens.items():
            request = self.engine.scheduler.requests[name]
            stop = request.num_computed_tokens
            if rank == 0:
                self.computed_tokens[name] = self.computed_tokens.get(name, 0) + count
            # Under asynchronous scheduling the newest tokens are not known yet; the sampler always says 7.
            tokens = list(request.all_token_ids[:stop])
            expected = prefix_values(tokens + [7] * (stop - len(tokens)))[:, None, None] + held[:, None] / 4
            positions = torch.arange(stop)
            new = slice(stop - count, stop)
            for (layers, size, window), ids in zip(
                self.shape.groups, self.engine.tables_of(name), strict=True
            ):
                # The first token that is computed looks at as many before it as its window has, with itself.
                seen = slice(max(stop - count + 1 - window, 0) if window else 0, stop - count)
                ratio = self.shape.ratio(size)
                kernel = size // ratio
                block = torch.tensor(ids)[positions // size] * ratio + positions % size // kernel
                slot = positions % kernel
                for layer in layers:
                    if layer not in self.caches[rank]:
                        continue
                    memory = self.caches[rank][layer]
                    values = (expected + LAYERS.index(layer)).expand(stop, len(held), self.shape.content_size)
                    good = memory[block[seen], :, slot[seen], :] == values[seen]
                    if not bool(good.all()):
                        first = seen.start + int((~good).nonzero()[0][0])
                        raise AssertionError(f"{name}: KV of token {first} of {stop - count} is wrong")
                    memory[block[new], :, slot[new], :] = values[new]


class Pair:
    """A prefill and a decode engine. `close` at the end."""

    def __init__(self, model: Path, *, seed: int = 1, producer: Shape, consumer: Shape) -> None:
        self.fabric = MemoryFabric(random=Random(seed), clock=time.monotonic)
        self.book = Phonebook()
        self.producer = Member(producer.engine_id, model, self.fabric, self.book, producer)
        self.consumer = Member(consumer.engine_id, model, self.fabric, self.book, consumer)

    def decode_params(self, transfer: str) -> dict[str, Any]:
        """What a router sends to the consumer."""
        return {
            "do_remote_prefill": True,
            "remote_engine_id": self.producer.engine.shape.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "transfer_id": transfer,
        }

    def run_until(self, done: Callable[[], bool], seconds_max: float = 60.0) -> None:
        """Step both engines until `done`; a hang is an error."""
        stop = time.monotonic() + seconds_max
        while not done():
            assert time.monotonic() < stop, "the engines did not get there"
            self.step()

    def step(self) -> None:
        """One step of each engine that has something to do."""
        for member in (self.producer, self.consumer):
            if member.engine.scheduler.has_requests():
                member.engine.step()
        # Real engines sleep as long when a step had no model work.
        time.sleep(0.001)

    @property
    def is_clean(self) -> bool:
        """Whether both engines are as at their start."""
        return self.producer.engine.is_clean and self.consumer.engine.is_clean

    def close(self) -> None:
        """Stop the agents."""
        for member in (self.producer, self.consumer):
            for worker in member.engine.workers:
                worker.close(5.0)


def prefix_values(tokens: list[int]) -> torch.Tensor:
    """What the KV of each token holds: a value that depends on all tokens before it."""
    values, value = [], 1
    for token in tokens:
        value = (value * 31 + token + 1) % _MODULUS
        values.append(float(value))
    return torch.tensor(values)
