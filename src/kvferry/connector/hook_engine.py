"""An engine without a model, for measuring what kvferry's hooks cost: both sides of the connector, its agent.

vLLM's own values go through the real `FerryConnector` in the order of a step, as in an engine whose scheduler
and worker share one thread (one GPU, in-process executor), so a step's cost is that of both sides. The agent
runs on its own thread, and competes for the interpreter as it does in an engine.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvferry.agent.agent import Agent
from kvferry.agent.links import Identity
from kvferry.connector import compat
from kvferry.connector.connector import FerryConnector
from kvferry.connector.launch import make_agent
from kvferry.connector.metadata import FerryMetadata, Handshake
from kvferry.host.settings import Settings, read_settings
from kvferry.host.worker import FerryWorker
from kvferry.ids import BlockId, EngineId, Incarnation, Rank
from kvferry.layout.describe import describe
from kvferry.layout.spec import CacheSpec, encode_spec

BLOCK_TOKENS = 16
LAYERS = 64
"""Attention layers, each of which calls two hooks per step."""
CONTENT_BYTES = 4
"""Per token and layer; hooks do not see bytes, so there are few."""
FORWARD_SECONDS = 0.0005
BYSTANDERS = 16
"""Requests without a transfer that are in every step, as on a busy engine."""
CLOSE_SECONDS = 10.0

MakeAgent = Callable[[Identity, CacheSpec, Settings], Agent]


@dataclass(frozen=True, slots=True)
class Cost:
    """Nanoseconds of one call or of several: elapsed, and of this thread's CPU time."""

    wall: int
    cpu: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall - other.wall, self.cpu - other.cpu)

    def __floordiv__(self, count: int) -> Cost:
        return Cost(self.wall // count, self.cpu // count)


NO_COST = Cost(0, 0)


class Meter:
    """The costs of one engine's hooks. `spent` is the sum since it was last set to `NO_COST`."""

    def __init__(self) -> None:
        self.spent = NO_COST
        self.hooks: dict[str, list[Cost]] = {}

    def call(self, hook: Callable[..., Any], *arguments: Any, name: str | None = None) -> Any:
        """Call a hook and note what it cost."""
        cpu = time.thread_time_ns()
        wall = time.perf_counter_ns()
        result = hook(*arguments)
        wall = time.perf_counter_ns() - wall
        cost = Cost(wall, time.thread_time_ns() - cpu)
        self.spent += cost
        self.hooks.setdefault(name or hook.__name__, []).append(cost)
        return result

    def take(self) -> Cost:
        """What has been spent since the last call."""
        spent, self.spent = self.spent, NO_COST
        return spent


@dataclass(frozen=True, slots=True)
class Step:
    """What a step cost and brought. `eventful`: the connector was told or had to tell something.

    `failed`: KV of a request that was to be received has not come.
    """

    cost: Cost
    eventful: bool
    failed: bool
    sent: set[str]
    received: set[str]


@dataclass(slots=True)
class Chunk:
    """A request's part in a step: the tokens that it has, those it computes, and its new blocks."""

    request: Request
    computed: int
    scheduled: int
    blocks: Sequence[BlockId]


class Engine:
    """One engine. `close` at the end."""

    def __init__(self, name: str, role: str, cache_blocks: int, make_agent: MakeAgent) -> None:
        self.meter = Meter()
        self._pool = BlockPool(cache_blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self._held: dict[str, list[BlockId]] = {}
        self._finished: set[str] = set()
        self._bystanders = [f"{name}-bystander-{index}" for index in range(BYSTANDERS)]
        # Id 0 is the pool's null block. In no order, so that a request's blocks hardly ever are neighbours.
        self._free = Random(0).sample(range(1, cache_blocks), cache_blocks - 1)
        transfer = KVTransferConfig(
            kv_connector="FerryConnector",
            kv_role=role,
            engine_id=name,
            # Every request shall get its memory at once, and the port shall be free.
            kv_connector_extra_config={"side_channel_port": 0, "waiting_blocks_share": 1.0},
        )
        config, caches = _vllm_config(transfer), _kv_cache_config(cache_blocks)
        self._scheduler = FerryConnector(config, KVConnectorRole.SCHEDULER, caches)
        self._worker = _WorkerSide(config, KVConnectorRole.WORKER, caches)
        identity = Identity(EngineId(name), Incarnation(secrets.token_hex(8)), Rank(0, 0))
        self._memory, spec = _cache(cache_blocks)
        self.agent = make_agent(
            identity, spec, read_settings(transfer.kv_connector_extra_config, environment={})
        )
        handshake = Handshake(
            identity.engine, identity.incarnation, 0, 0, metadata=self.agent.start(), cache=encode_spec(spec)
        )
        self._worker.use(FerryWorker(self.agent, rank=0, block_tokens=BLOCK_TOKENS, moved=self.agent.moved))
        self._scheduler.bind_gpu_block_pool(self._pool)
        self._scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})

    @property
    def is_clean(self) -> bool:
        """Whether every block is free and the connector has nothing left to do."""
        return (
            not self._held
            and not self._scheduler.has_pending_push_work()
            and self._pool.get_num_free_blocks() == len(self._free) == len(self._pool.blocks) - 1
        )

    def coordinates(self) -> dict[str, Any]:
        """What a router learns by its probe: where this engine's KV can be had."""
        probe = self.request("probe", 1, {"do_remote_decode": True, "probe": True})
        self._scheduler.on_new_request(probe)
        probe.status = RequestStatus.FINISHED_LENGTH_CAPPED
        _, params = self._scheduler.request_finished_all_groups(probe, ([],))
        assert params is not None, "the directory is open"
        return dict(params)

    def request(self, name: str, tokens: int, params: dict[str, Any]) -> Request:
        """A request of so many prompt tokens."""
        return Request(
            request_id=name,
            prompt_token_ids=[7] * tokens,
            sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}),
            pooling_params=None,
        )

    def arrive(self, request: Request) -> int:
        """The request reaches the scheduler; the tokens that it will not compute itself."""
        self.meter.call(self._scheduler.on_new_request, request)
        external, _ = self.meter.call(self._scheduler.get_num_new_matched_tokens, request, 0)
        assert external is not None, "the cache has room for everything"
        return int(external)

    def allocate(
        self, request: Request, blocks: int, external_tokens: int = 0, *, announced: bool = True
    ) -> list[BlockId]:
        """Give the request blocks from all over the cache; `announced` to the connector, as the first are."""
        chosen = [self._free.pop() for _ in range(blocks)]
        self._held.setdefault(request.request_id, []).extend(chosen)
        granted = [self._pool.blocks[block] for block in chosen]
        self._pool.touch(granted)
        if not announced:
            return chosen
        if external_tokens:
            self.meter.call(self._scheduler.get_loaded_kv_cache_group_ids, request)
        self.meter.call(
            self._scheduler.update_state_after_alloc, request, KVCacheBlocks((granted,)), external_tokens
        )
        return chosen

    def finish(self, request: Request) -> dict[str, Any]:
        """The request ends; its blocks go back now, or when we say so. Returns what its answer carries."""
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        name = request.request_id
        keep, answer = self.meter.call(
            self._scheduler.request_finished_all_groups, request, (self._held.get(name, []),)
        )
        self._finished.add(name)
        if not keep:
            self._free_blocks(name)
        return answer or {}

    def step(self, chunks: Iterable[Chunk] = ()) -> Step:
        """One step with the bystanders and these."""
        self.meter.take()
        planned = self._planned(list(chunks))
        metadata = self.meter.call(self._scheduler.build_connector_meta, planned)
        output = self._run(metadata, planned.finished_req_ids)
        self.meter.call(self._scheduler.update_connector_output, output)
        self.meter.call(self._scheduler.get_kv_connector_stats, name="get_kv_connector_stats (scheduler)")
        self.meter.call(self._scheduler.has_pending_push_work)
        sent, received = output.finished_sending or set(), output.finished_recving or set()
        for name in sent:
            self._free_blocks(name)
        told = metadata.senders or metadata.commands or metadata.advances or planned.finished_req_ids
        heard = sent or received or output.invalid_block_ids or output.kv_connector_worker_meta
        failed = output.invalid_block_ids or getattr(output, "failed_recving", None)
        return Step(self.meter.take(), bool(told or heard), bool(failed), sent, received)

    def close(self) -> bool:
        """Stop both sides; whether the agent ended in time."""
        self._scheduler.shutdown()
        return self.agent.close(CLOSE_SECONDS)

    def _run(self, metadata: FerryMetadata, finished: set[str]) -> KVConnectorOutput:
        call, worker = self.meter.call, self._worker
        call(worker.handle_preemptions, metadata)
        call(worker.bind_connector_metadata, metadata)
        # The model runs, and leaves the interpreter to the agent.
        time.sleep(FORWARD_SECONDS)
        call(worker.run_layers, name="wait_for_layer_load, save_kv_layer (all layers)")
        call(worker.start_load_kv, None)
        call(worker.wait_for_save)
        output = KVConnectorOutput()
        if compat.can_fail_receives():
            results = call(worker.get_transfer_results, finished)
            output.finished_sending, output.finished_recving = (
                results.finished_sending,
                results.finished_recving,
            )
            output.failed_recving = results.failed_recving
        else:
            output.finished_sending, output.finished_recving = call(worker.get_finished, finished)
        output.invalid_block_ids = call(worker.get_block_ids_with_load_errors)
        output.kv_connector_stats = call(
            worker.get_kv_connector_stats, name="get_kv_connector_stats (worker)"
        )
        output.kv_connector_worker_meta = call(worker.build_connector_worker_meta)
        call(worker.clear_connector_metadata)
        return output

    def _planned(self, chunks: list[Chunk]) -> SchedulerOutput:
        planned = SchedulerOutput.make_empty()
        planned.scheduled_new_reqs = [_new(chunk) for chunk in chunks if not chunk.computed]
        going_on = [chunk for chunk in chunks if chunk.computed]
        planned.scheduled_cached_reqs = CachedRequestData(
            req_ids=[*self._bystanders, *(chunk.request.request_id for chunk in going_on)],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[*(None for _ in self._bystanders), *((list(chunk.blocks),) for chunk in going_on)],
            num_computed_tokens=[*(100 for _ in self._bystanders), *(chunk.computed for chunk in going_on)],
            num_output_tokens=[*(10 for _ in self._bystanders), *(0 for _ in going_on)],
        )
        planned.num_scheduled_tokens = dict.fromkeys(self._bystanders, 1) | {
            chunk.request.request_id: chunk.scheduled for chunk in chunks
        }
        planned.total_num_scheduled_tokens = sum(planned.num_scheduled_tokens.values())
        planned.finished_req_ids, self._finished = self._finished, set()
        return planned

    def _free_blocks(self, name: str) -> None:
        blocks = self._held.pop(name, [])
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])
        self._free += blocks


class _WorkerSide(FerryConnector):
    """The worker side, handed over by its maker instead of made from vLLM's process groups."""

    def use(self, worker: FerryWorker) -> None:
        """What `register_kv_caches` does in an engine."""
        self._worker = worker

    def run_layers(self) -> None:
        """The hooks that the attention layers call."""
        for _ in range(LAYERS):
            self.wait_for_layer_load("layer")
            self.save_kv_layer("layer", None, None)


def _new(chunk: Chunk) -> NewRequestData:
    request = chunk.request
    return NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=request.sampling_params,
        pooling_params=None,
        block_ids=(list(chunk.blocks),),
        num_computed_tokens=0,
        lora_request=None,
    )


def _vllm_config(transfer: KVTransferConfig) -> Any:
    """What the connector reads of vLLM's configuration; the rest would need a model."""
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_index=0
        ),
        model_config=SimpleNamespace(disable_cascade_attn=True),
    )


def _kv_cache_config(cache_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=CONTENT_BYTES // 2, dtype=torch.uint8
    )
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    return KVCacheConfig(
        num_blocks=cache_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )


def _cache(cache_blocks: int) -> tuple[Any, CacheSpec]:
    """The KV memory, block by block, and its description."""
    memory = np.zeros(LAYERS * cache_blocks * BLOCK_TOKENS * CONTENT_BYTES, dtype=np.uint8)
    group, region = describe(
        "BLHNC",
        layers=LAYERS,
        blocks=cache_blocks,
        heads=1,
        block_tokens=BLOCK_TOKENS,
        content_bytes=CONTENT_BYTES,
        address=int(memory.ctypes.data),
    )
    spec = CacheSpec(
        model="hooks",
        dtype="uint8",
        kv_dtype="uint8",
        rank=Rank(0, 0),
        tp_size=1,
        pp_size=1,
        groups=(group,),
        regions=(region,),
    )
    return memory, spec


@contextlib.contextmanager
def engine_pair(cache_blocks: int, make_agent: MakeAgent = make_agent) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine in this process.

    Raises:
        TransportError: an agent could not be started.
    """
    with contextlib.ExitStack() as stack:
        engines = []
        for name, role in (("hooks-prefill", "kv_producer"), ("hooks-decode", "kv_consumer")):
            engine = Engine(name, role, cache_blocks, make_agent)
            stack.callback(engine.close)
            engines.append(engine)
        yield engines[0], engines[1]
