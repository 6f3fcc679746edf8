"""vLLM's asynchronous scheduler over a fragmented block pool, noting when requests come, start and end."""

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvferry.emulator.fragmentation import fragment
from kvferry.emulator.session import session_of


class EmulatedScheduler(AsyncScheduler):
    """Plans exactly as vLLM's does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # An engine applies its platform's rules to its configuration once more after this, and would undo
        # what the executor has set.
        self.scheduler_config: Any = copy.copy(self.vllm_config.scheduler_config)
        session = session_of(self.vllm_config)
        self._session = session
        fragment(
            self.kv_cache_manager.block_pool.free_block_queue,
            session.options.fragmentation,
            session.options.seed,
        )
        if self.connector is not None:
            session.watch_scheduler(self.connector)

    def add_request(self, request: Any) -> None:
        """A request has reached the scheduler."""
        self._session.timelines.arrive(request.request_id, request.num_prompt_tokens)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step."""
        output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            self._session.timelines.reach(new.req_id, "scheduled")
        return output

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._session.timelines.finish(request.request_id, request.status.name, request.num_output_tokens)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        """Stop the connector and write what is left of the journal."""
        super().shutdown()
        self._session.close()
