"""`FerryConnector`: the class that vLLM loads. It delegates to one of its sides and decides nothing."""

# ruff: noqa: E402 - the version is checked before anything of a vLLM that may be too old is imported.
from __future__ import annotations

from kvferry.connector import compat
from kvferry.host.reports import NOTHING
from kvferry.host.worker import FerryWorker

compat.check_version()

import logging
import sys
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from kvferry.connector.cache_layout import asked
from kvferry.connector.facts import check_both_directions, read_facts
from kvferry.connector.metadata import FerryMetadata, Handshake, WorkerReport
from kvferry.connector.scheduler import Directory, FerryScheduler
from kvferry.connector.stats import FerryPromMetrics, FerryStats, moved_stats
from kvferry.host.settings import Settings, read_settings

if TYPE_CHECKING:
    from kvferry.connector.startup import WorkerStart

logger = logging.getLogger(__name__)


class FerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Carries KV from the engine that prefilled a request to the one that decodes it, by push or by pull."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        facts = read_facts(vllm_config, kv_cache_config)
        settings = read_settings(
            vllm_config.kv_transfer_config.kv_connector_extra_config,
            vllm_config.parallel_config.data_parallel_index,
        )
        if settings.bidirectional_kv_xfer:
            check_both_directions(vllm_config.kv_transfer_config)
        self._settings = settings
        self._scheduler: FerryScheduler | None = None
        self._start: WorkerStart | None = None
        self._worker: FerryWorker | None = None
        self._handshake: Handshake | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = FerryScheduler(facts, settings, _open_directory)
        else:
            # Here, because the front end loads this class for its metrics and has no use for NIXL.
            from kvferry.connector.startup import WorkerStart  # noqa: PLC0415

            self._start = WorkerStart(vllm_config, kv_cache_config, facts, settings)

    @property
    def scheduler(self) -> FerryScheduler:
        """The scheduler side."""
        assert self._scheduler is not None, "vLLM calls scheduler hooks on the scheduler side"
        return self._scheduler

    @property
    def worker(self) -> FerryWorker:
        """The worker side; exists from `register_kv_caches` on."""
        assert self._worker is not None, "vLLM registers the KV caches before it runs a step"
        return self._worker

    # --- both sides ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop what this side has started."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close(self._settings.close_seconds)

    def get_kv_connector_stats(self) -> FerryStats | None:
        """What has happened since the last call."""
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        moved = self.worker.take_moved()
        return moved_stats(moved) if moved else None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The order that posts fewest descriptors; every other one can be carried too."""
        settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return asked(settings.cache_layout, vllm_config.device_config.device_type)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        """Statistics from their plain data."""
        return FerryStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryPromMetrics:
        """The Prometheus metrics."""
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- worker side ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describe the caches and start the agent."""
        assert self._start is not None, "vLLM registers KV caches on the worker side"
        self._worker, self._handshake = self._start.run(kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        """What the directory shall say of this rank."""
        return self._handshake

    def handle_preemptions(self, kv_connector_metadata: FerryMetadata) -> None:
        """Wait, bounded, for writes that read blocks which have been taken away."""
        if kv_connector_metadata.preempt is not None:
            self.worker.preempt(kv_connector_metadata.preempt)

    def bind_connector_metadata(self, connector_metadata: FerryMetadata) -> None:
        """The step begins."""
        super().bind_connector_metadata(connector_metadata)
        self.worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads have been asked for when the step began, and are never waited for."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: see `start_load_kv`."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a step's KV is published when its forward pass has ended."""

    def wait_for_save(self) -> None:
        """The forward pass has been launched, or has raised."""
        orders: FerryMetadata | None = self._connector_metadata
        if orders is not None and orders.advances:
            # vLLM calls this from a `finally`: while an exception passes, nothing has been computed.
            self.worker.save(orders, succeeded=sys.exception() is None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """What has ended on this rank (0.29 and 0.30)."""
        finished = self.worker.collect(finished_req_ids).finished
        return finished.sending or None, finished.receiving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What has ended on this rank (0.31 and later)."""
        report = self.worker.collect(finished_req_ids)
        if report is NOTHING:
            return compat.no_transfer_results()
        return compat.transfer_results(report.finished)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose KV has not come, of requests that `get_transfer_results` has just named."""
        return self.worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> Any:
        """What the scheduler side must hear of this step."""
        events = self.worker.take_events()
        return WorkerReport(events) if events else None

    # --- scheduler side ------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The block pool in which blocks can be pinned."""
        self.scheduler.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Every rank of a single pipeline stage has described itself."""
        self.scheduler.publish(list(metadata.values()))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Every rank has described itself."""
        self.scheduler.publish(list(metadata.values()))

    def on_new_request(self, request: Any) -> None:
        """A request has reached the scheduler."""
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that will come from the producer."""
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups: what is loaded must not be zeroed under the writer."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks."""
        if request.kv_transfer_params:
            self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> FerryMetadata:
        """What the workers are told with this step."""
        return self.scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What all ranks have reported for a step."""
        self.scheduler.results(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The engine ends a request."""
        return self.scheduler.finish(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The engine ends a request: whether its blocks must be kept, and what its answer carries."""
        return self.scheduler.finish(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        """Whether waiting is better than preempting another request."""
        return self.scheduler.has_pending_frees()

    def reset_cache(self) -> bool | None:
        """What is kept after turns is stale, as the prefix cache is: give it back."""
        self.scheduler.holding.give_all_back()
        return True

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping for us."""
        return self.scheduler.needs_steps


def _open_directory(settings: Settings, handshakes: list[Handshake]) -> Directory:
    from kvferry.connector.startup import open_directory  # noqa: PLC0415

    return open_directory(settings, handshakes)
