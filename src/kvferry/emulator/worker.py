"""The worker of an emulated engine: vLLM's, without a device, a model or weights."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from kvferry.emulator.link import install
from kvferry.emulator.runner import EmulatedRunner
from kvferry.emulator.session import session_of
from kvferry.errors import UsageError


class EmulatedWorker(Worker):
    """One emulated rank."""

    def init_device(self) -> None:
        """Make the groups that connectors ask for their ranks, and the runner."""
        self.device = torch.device("cpu")
        # Names the shared memory of the ranks of one engine, by what they have in common; see `CPUWorker`.
        os.environ["VLLM_DIST_IDENT"] = str(self.distributed_init_method).rpartition("/")[2].replace(":", "-")
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        ranks = self.vllm_config.parallel_config.world_size
        self._session = session_of(self.vllm_config, self.rank if ranks > 1 else None)
        if self.vllm_config.kv_transfer_config is not None:
            options = self._session.options
            install(
                options.link,
                scale=options.content_scale,
                patience_microseconds=options.patience_microseconds,
                witness=None if options.journal is None else self._session.saw,
            )
        self.model_runner = EmulatedRunner(self.vllm_config, self._session)

    def load_model(self, **_: Any) -> None:
        """Declare the layers."""
        self.model_runner.load_model()

    def determine_available_memory(self) -> int:
        """What the operator has given to the KV cache.

        Raises:
            UsageError: nothing was given.
        """
        given = self.cache_config.kv_cache_memory_bytes
        if not given:
            raise UsageError(
                "an emulated engine has no device memory to measure; say how much of the host's its KV cache "
                "shall take: --kv-cache-memory-bytes"
            )
        return int(given)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing to compile."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Launch a step."""
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The launched step's tokens."""
        return self.model_runner.sample_tokens(grammar_output)

    def get_supported_tasks(self) -> tuple[Any, ...]:
        """Text generation."""
        return ("generate",)

    def reset_mm_cache(self) -> None:
        """Nothing is kept."""

    def reset_encoder_cache(self) -> None:
        """Nothing is kept."""

    def update_max_model_len(self, max_model_len: int) -> None:
        """vLLM has fitted the longest context to the memory."""
        self.model_config.max_model_len = max_model_len

    def synchronize_device(self) -> None:
        """Nothing to wait for that the engine does not wait for itself."""

    def shutdown(self) -> None:
        """Stop the connector and the device, and write what is left of the journal."""
        super().shutdown()
        self._session.close()
