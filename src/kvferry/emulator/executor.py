"""The executors of an emulated engine: its workers where vLLM puts them, with asynchronous scheduling.

One worker is in the engine's own process, as vLLM has it for one GPU. On its CPU platform vLLM puts it behind
a queue in shared memory, and turns asynchronous scheduling off; an emulated device is asynchronous, so this
turns it on again before the engine reads it. What the platform does because its MLA kernels lack something is
undone, too: there is no kernel here.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from kvferry.emulator.compat import check_version
from kvferry.emulator.options import Options, read_options
from kvferry.errors import UsageError

NO_ROTATION = "-rotary_embedding"


class EmulatedExecutor(UniProcExecutor):
    """One emulated rank, in this process."""

    def _init_executor(self) -> None:
        options = _checked(self.vllm_config)
        parallel = self.vllm_config.parallel_config
        if parallel.world_size > 1:
            raise UsageError(
                f"{parallel.world_size} ranks (tensor parallel {parallel.tensor_parallel_size}, pipeline "
                f"parallel {parallel.pipeline_parallel_size}) are asked for; an emulated engine is one rank "
                "at its true shape: take the shape of one rank from a preset and leave both sizes at 1"
            )
        _prepare(self.vllm_config, options)
        super()._init_executor()


class EmulatedRanksExecutor(MultiprocExecutor):
    """Tensor-parallel ranks of a model with MLA, each in a process: all of them hold the same.

    For proofs, not for measurements: the ranks share a host.
    """

    def _init_executor(self) -> None:
        options = _checked(self.vllm_config)
        stages = self.vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1 or not self.vllm_config.model_config.use_mla:
            raise UsageError(
                "several emulated ranks need a model with MLA, whose cache is the same on each, and one "
                f"stage; MLA is {self.vllm_config.model_config.use_mla} and pipeline parallel {stages}. Take "
                "EmulatedExecutor, and leave both sizes at 1"
            )
        _prepare(self.vllm_config, options)
        super()._init_executor()


def _checked(vllm_config: Any) -> Options:
    check_version()
    return read_options(vllm_config.additional_config)


def _prepare(vllm_config: Any, options: Options) -> None:
    """Have the engine schedule as on a GPU."""
    scheduler = vllm_config.scheduler_config
    scheduler.async_scheduling = True
    if not vllm_config.model_config.use_mla:
        return
    scheduler.enable_chunked_prefill = True
    if options.step_tokens is not None:
        scheduler.max_num_batched_tokens = options.step_tokens
        scheduler.max_num_scheduled_tokens = options.step_tokens
    # Connectors may refuse MLA where vLLM's own operation for it is wrong, which is not used here.
    if NO_ROTATION not in vllm_config.compilation_config.custom_ops:
        vllm_config.compilation_config.custom_ops.append(NO_ROTATION)
