"""A worker for pipeline stages on the CPU: vLLM's own one lacks the buffer that later stages receive into."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class PipelineWorker(CPUWorker):  # type: ignore[misc]
    """Makes that buffer once the model is there."""

    def load_model(self, **options: Any) -> None:
        """Load the model, and make room for what the stage before sends."""
        super().load_model(**options)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
