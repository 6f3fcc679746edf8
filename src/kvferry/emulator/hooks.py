"""What a connector's hooks cost the engine's main thread, whichever connector it is.

The connector object's own methods are replaced by timed ones, so vLLM calls what it always calls. A hook that
calls another is charged once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_loaded_kv_cache_group_ids",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "has_pending_block_frees",
    "take_events",
    "get_kv_connector_stats",
)
WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)

Observer = Callable[[tuple[Any, ...], Any], None]
"""Gets a hook's positional arguments and its result."""


@dataclass(slots=True)
class Cost:
    """What one hook has cost so far."""

    count: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    max_seconds: float = 0.0

    def add(self, seconds: float, cpu_seconds: float) -> None:
        """One more call."""
        self.count += 1
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds
        self.max_seconds = max(self.max_seconds, seconds)

    def to_dict(self) -> dict[str, float]:
        """For the report."""
        return {
            "count": self.count,
            "seconds": round(self.seconds, 6),
            "cpu_seconds": round(self.cpu_seconds, 6),
            "max_seconds": round(self.max_seconds, 6),
        }


class Meter:
    """Times the hooks of the connector objects of one engine. Their thread is the one that wraps them."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}
        self._inside = False

    def wrap(
        self, connector: Any, side: str, hooks: tuple[str, ...], observers: Mapping[str, Observer]
    ) -> None:
        """Time those of `hooks` that the connector has; `observers` hear of calls, outside of the time."""
        for name in hooks:
            method = getattr(connector, name, None)
            if callable(method):
                cost = self.costs.setdefault(f"{side}.{name}", Cost())
                setattr(connector, name, self._timed(method, cost, observers.get(name)))

    def to_dict(self) -> dict[str, dict[str, float]]:
        """For the report: what has been called at all."""
        return {name: cost.to_dict() for name, cost in list(self.costs.items()) if cost.count}

    def _timed(self, method: Callable[..., Any], cost: Cost, observer: Observer | None) -> Callable[..., Any]:
        thread = threading.get_ident()

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != thread:
                return method(*args, **kwargs)
            self._inside = True
            cpu, began = time.thread_time(), time.perf_counter()
            try:
                result = method(*args, **kwargs)
            finally:
                cost.add(time.perf_counter() - began, time.thread_time() - cpu)
                self._inside = False
            if observer is not None:
                observer(args, result)
            return result

        return timed
