"""The executor of an emulated engine: the worker in the engine's own process, with asynchronous scheduling.

That is what vLLM uses for one GPU. On its CPU platform it puts a worker behind a queue in shared memory, and
turns asynchronous scheduling off; an emulated device is asynchronous, so this turns it on again before the
engine reads it.
"""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from kvferry.emulator.compat import check_version
from kvferry.emulator.options import read_options
from kvferry.errors import UsageError


class EmulatedExecutor(UniProcExecutor):
    """One emulated rank, in this process."""

    def _init_executor(self) -> None:
        check_version()
        read_options(self.vllm_config.additional_config)
        parallel = self.vllm_config.parallel_config
        if parallel.world_size > 1:
            raise UsageError(
                f"{parallel.world_size} ranks (tensor parallel {parallel.tensor_parallel_size}, pipeline "
                f"parallel {parallel.pipeline_parallel_size}) are asked for; an emulated engine is one rank "
                "at its true shape: take the shape of one rank from a preset and leave both sizes at 1"
            )
        self.vllm_config.scheduler_config.async_scheduling = True
        super()._init_executor()
