"""vLLM's real scheduler with the connector, over workers that run no model.

The steps go through the same calls as in an engine: metadata is pickled, every rank's worker side runs its
hooks, vLLM's own aggregator joins the ranks' reports. `depth` 2 plans a step before the previous one's
output is processed, as asynchronous scheduling does.
"""

from __future__ import annotations

import json
import math
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.connector import compat
from kvferry.connector.metadata import Handshake, WorkerReport
from kvferry.connector.scheduler import FerryScheduler
from kvferry.connector.stats import FerryStats, moved_stats
from kvferry.host.worker import AgentFace, FerryWorker
from kvferry.ids import EngineId, Incarnation, Rank

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

BLOCK_TOKENS = 16
HEADS = 2
HEAD_SIZE = 32
LATENT_SIZE = 36
"""Elements of one token's latent, the rotated key among them."""
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


class FakeDirectory:
    """A directory that listens nowhere."""

    port = 5600

    def close(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Shape:
    """What an engine is started with."""

    blocks: int = 64
    step_tokens: int = 64
    role: str = "kv_both"
    engine_id: str = "engine-under-test"
    policy: str = "recompute"
    ranks: int = 1
    """Tensor-parallel ranks of each stage."""
    stages: int = 1
    kv_heads: int = 0
    """The model's; 0: `HEADS` on each rank."""
    block_tokens: int = BLOCK_TOKENS
    depth: int = 1
    prefix_caching: bool = True
    latent: bool = False
    """A model with MLA."""
    window: int = 0
    """The second layer keeps so many tokens, in a cache group of its own; 0: all, in one group."""
    cache_type: str = "float32"
    """What its ranks say of their caches."""
    window_block_tokens: int = 0
    """Its block size; 0: that of the first."""
    kernel_tokens: int = 0
    """Tokens of a block of the attention kernel; 0: the engine's blocks are the kernel's."""
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def heads(self) -> int:
        """The model's KV heads; with MLA the latents of one, on every rank."""
        return 1 if self.latent else self.kv_heads or HEADS * self.ranks

    @property
    def content_size(self) -> int:
        """Elements of one token of one head."""
        return LATENT_SIZE if self.latent else 2 * HEAD_SIZE

    @property
    def places(self) -> list[Rank]:
        """All of its ranks, stage by stage."""
        return [Rank(pp, tp) for pp in range(self.stages) for tp in range(self.ranks)]

    def layers(self, stage: int) -> tuple[str, ...]:
        """The layers of a pipeline stage."""
        count = len(LAYERS) // self.stages
        return LAYERS[stage * count : (stage + 1) * count]

    def ratio(self, block_tokens: int) -> int:
        """Kernel blocks in a block of the engine."""
        return block_tokens // (self.kernel_tokens or block_tokens)

    @property
    def groups(self) -> tuple[tuple[tuple[str, ...], int, int], ...]:
        """Layers, block size and window of each cache group."""
        if not self.window:
            return ((LAYERS, self.block_tokens, 0),)
        second = self.window_block_tokens or self.block_tokens
        return (LAYERS[:1], self.block_tokens, 0), (LAYERS[1:], second, self.window)


def write_config(directory: Path) -> Path:
    """A model directory that holds a configuration and no weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def vllm_config(model: Path, shape: Shape) -> VllmConfig:
    """vLLM's configuration of such an engine."""
    model_config = ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="float32", seed=0)
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=shape.step_tokens,
            max_model_len=model_config.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=shape.block_tokens, enable_prefix_caching=shape.prefix_caching),
        kv_transfer_config=KVTransferConfig(
            kv_connector="FerryConnector",
            kv_role=shape.role,
            engine_id=shape.engine_id,
            kv_load_failure_policy=shape.policy,
            kv_connector_module_path="kvferry.connector.connector",
            kv_connector_extra_config=dict(shape.extra),
        ),
        device_config=DeviceConfig("cpu"),
    )
    # Set on the finished configuration: vLLM would look for the devices of a parallel engine.
    config.parallel_config.tensor_parallel_size = shape.ranks
    config.parallel_config.pipeline_parallel_size = shape.stages
    config.scheduler_config.async_scheduling = shape.depth > 1
    config.cache_config.num_gpu_blocks = shape.blocks
    assert isinstance(config.parallel_config, ParallelConfig)
    return config


def kv_cache_config(shape: Shape) -> KVCacheConfig:
    """One group of full attention, or one more with a window that lies over it in memory."""
    groups, tensors = [], []
    for layers, block_tokens, window in shape.groups:
        spec = _spec(shape, block_tokens, window)
        page = spec.page_size_bytes
        tensors.append(
            KVCacheTensor(
                size=page * shape.blocks * len(layers),
                layers=list(layers),
                layer_stride=page * shape.blocks,
                block_stride=page,
            )
        )
        groups.append(KVCacheGroupSpec(list(layers), spec))
    return KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def _spec(shape: Shape, block_tokens: int, window: int) -> AttentionSpec:
    if shape.latent:
        return MLAAttentionSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=LATENT_SIZE, dtype=torch.float32
        )
    sizes = {"num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32}
    if window:
        return SlidingWindowSpec(block_size=block_tokens, sliding_window=window, **sizes)
    return FullAttentionSpec(block_size=block_tokens, **sizes)


class Engine:
    """A scheduler with its connector and `shape.ranks` worker sides, one agent each."""

    def __init__(self, model: Path, agents: Sequence[AgentFace], shape: Shape | None = None) -> None:
        self.shape = shape or Shape(ranks=len(agents))
        config = vllm_config(model, self.shape)
        init_none_hash(sha256)
        sizes = [size for _, size, _ in self.shape.groups]
        self._hasher = get_request_block_hasher(math.gcd(*sizes), sha256)
        self.scheduler = (AsyncScheduler if self.shape.depth > 1 else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_cache_config(self.shape),
            structured_output_manager=StructuredOutputManager(config),
            block_size=math.lcm(*sizes),
            **({"hash_block_size": math.gcd(*sizes)} if len(sizes) > 1 else {}),
            log_stats=True,
        )
        self.side: FerryScheduler = self.scheduler.connector.scheduler
        self.side._open_directory = lambda settings, handshakes: FakeDirectory()
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {
                (rank.pp, rank.tp): Handshake(
                    EngineId(self.shape.engine_id), Incarnation("first"), rank.pp, rank.tp, b"", b""
                )
                for rank in self.shape.places
            }
        )
        self.workers = [
            FerryWorker(
                agent,
                rank=rank,
                block_tokens=self.shape.block_tokens,
                can_start_over=compat.can_fail_receives(),
                group_tokens=tuple(size for _, size, _ in self.shape.groups),
                ratios=tuple(self.shape.ratio(size) for _, size, _ in self.shape.groups),
                keeps_good_prefixes=self.side._facts.keeps_good_prefixes,
            )
            for rank, agent in enumerate(agents)
        ]
        self._aggregator = KVOutputAggregator(len(self.workers))
        self._planned: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.stats = FerryStats()
        """Everything that the connector's statistics have said so far."""
        self.forward: Callable[[int, Any], None] | None = None
        """Runs on each rank between a step's `begin` and `save`, in place of a model."""
        self.fail_forward = False
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.blocks_free_at_start = self.pool.get_num_free_blocks()

    def add(
        self,
        name: str,
        prompt: Sequence[int] | int,
        params: dict[str, Any] | None = None,
        max_tokens: int = 1,
        **sampling: Any,
    ) -> Request:
        """A request; `prompt` as tokens or as their number."""
        tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
        extra = None if params is None else {"kv_transfer_params": params}
        request = Request(
            request_id=name,
            prompt_token_ids=[token % 251 for token in tokens],
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **sampling
            ),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        request.sampling_params.update_from_generation_config({}, 2)
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """Plan a step, run it on the workers, process the output of the oldest step that is due."""
        planned = self.scheduler.schedule()
        self._planned.append((planned, self._run(planned)))
        if len(self._planned) >= self.shape.depth:
            self._process()
        return planned

    def flush(self) -> None:
        """Process the outputs of all planned steps."""
        while self._planned:
            self._process()

    def steps(self, count: int) -> None:
        """So many steps, and all their outputs."""
        for _ in range(count):
            self.step()
        self.flush()

    def abort(self, name: str) -> None:
        """The client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def answer(self, name: str) -> dict[str, Any] | None:
        """The `kv_transfer_params` that the request's last output carries."""
        params: dict[str, Any] | None = self.outputs[name][-1].kv_transfer_params
        return params

    def finish_reason(self, name: str) -> FinishReason | None:
        """How the request ended, None while it has not."""
        outputs = self.outputs.get(name)
        return outputs[-1].finish_reason if outputs else None

    def blocks_of(self, name: str) -> list[int]:
        """The request's block ids, of the first cache group."""
        return self.tables_of(name)[0]

    def tables_of(self, name: str) -> list[list[int]]:
        """The request's block ids, of each cache group."""
        return [list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(name)]

    def counters(self, name: str) -> dict[tuple[str, ...], int]:
        """The counter's values by labels."""
        entries = ((key.split("\x1f"), value) for key, value in self.stats.data["counters"].items())
        return {tuple(labels): value for (found, *labels), value in entries if found == name}

    @property
    def is_clean(self) -> bool:
        """Whether every block is free, no request is left and the connector's tables are empty."""
        return (
            self.pool.get_num_free_blocks() == self.blocks_free_at_start
            and not self.scheduler.requests
            and not len(self.side.producer)
            and not len(self.side.consumer)
            and not self.side.needs_steps
            and not any(len(worker._producer) + len(worker._consumer) for worker in self.workers)
        )

    def _process(self) -> None:
        planned, output = self._planned.popleft()
        for outputs in self.scheduler.update_from_output(planned, output).values():
            for one in outputs.outputs:
                self.outputs.setdefault(one.request_id, []).append(one)
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self.stats.aggregate(FerryStats(outputs.scheduler_stats.kv_connector_stats))

    def _run(self, planned: Any) -> ModelRunnerOutput:
        names = list(planned.num_scheduled_tokens)
        outputs = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[self._sampled(name, planned) for name in names],
                kv_connector_output=self._hooks(rank, planned),
            )
            for rank in range(len(self.workers))
        ]
        output = self._aggregator.aggregate(list(outputs))
        assert output is not None
        return output

    def _hooks(self, rank: int, planned: Any) -> KVConnectorOutput:
        worker = self.workers[rank]
        metadata = pickle.loads(pickle.dumps(planned.kv_connector_metadata))
        worker.preempt(metadata.preempt)
        worker.begin(metadata)
        if self.forward is not None:
            self.forward(rank, planned)
        worker.save(metadata, succeeded=not self.fail_forward)
        finished = worker.collect(planned.finished_req_ids).finished
        events = worker.take_events()
        fields: dict[str, Any] = {}
        if hasattr(KVConnectorOutput(), "failed_recving"):
            fields["failed_recving"] = finished.failed
        return KVConnectorOutput(
            finished_sending=finished.sending or None,
            finished_recving=finished.receiving or None,
            invalid_block_ids=worker.take_bad_blocks(),
            kv_connector_worker_meta=WorkerReport(events) if events else None,
            kv_connector_stats=moved_stats(worker.take_moved()),
            **fields,
        )

    def _sampled(self, name: str, planned: Any) -> list[int]:
        request = self.scheduler.requests[name]
        # The scheduler has advanced the count already; only a step that reaches the end samples.
        return [] if request.is_prefill_chunk else [7]
