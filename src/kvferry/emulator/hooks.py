"""What a connector's hooks cost the engine's main thread, whichever connector it is.

The connector object's own methods are replaced by timed ones, so vLLM calls what it always calls. A hook that
calls another is charged once.

Most hooks are called in every step, and mostly have nothing to do. Whether they had is judged by what went in
and what came out, so that a request's cost can be told from that of a step: a call was idle when the step's
metadata was empty, or when the hook brought nothing and was told of no request. Hooks that are called for one
request are never idle, those that only ask whether something is pending always are.
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
Judge = Callable[[tuple[Any, ...], Any], bool]
"""Says of a hook's positional arguments and its result whether it had nothing to do."""


def is_empty(metadata: Any) -> bool:
    """Whether a step's metadata, of whichever connector, asks its workers for nothing.

    Numbers in it, such as the scheduler's clock, ask for nothing either.
    """
    if metadata is None:
        return True
    fields = getattr(metadata, "__dict__", None)
    if fields is None:
        return False
    return not any(map(_asks, fields.values()))


def _asks(value: Any) -> bool:
    """Whether a field of metadata asks for something; an array's own truth is not asked for."""
    if value is None or isinstance(value, int | float):
        return False
    try:
        return len(value) > 0
    except TypeError:
        return bool(value)


def _told_nothing(args: tuple[Any, ...], _: Any) -> bool:
    return is_empty(args[0] if args else None)


def _built_nothing(_: tuple[Any, ...], result: Any) -> bool:
    return is_empty(result)


def _brought_nothing(_: tuple[Any, ...], result: Any) -> bool:
    return not result


def _counted_nothing(_: tuple[Any, ...], result: Any) -> bool:
    return result is None or result.is_empty()


def _ended_nothing(args: tuple[Any, ...], result: Any) -> bool:
    """`get_transfer_results` or `get_finished`, told of no end of a request and with nothing to tell."""
    told = args[0] if args else None
    return not told and (not any(result) if isinstance(result, tuple) else is_empty(result))


def _heard_nothing(args: tuple[Any, ...], _: Any) -> bool:
    return bool(args) and args[0].is_empty()


def _asked(_: tuple[Any, ...], __: Any) -> bool:
    return True


_JUDGES: dict[str, Judge] = {
    "build_connector_meta": _built_nothing,
    "update_connector_output": _heard_nothing,
    "has_pending_push_work": _asked,
    "has_pending_block_frees": _asked,
    "take_events": _brought_nothing,
    "get_kv_connector_stats": _counted_nothing,
    "handle_preemptions": _told_nothing,
    "bind_connector_metadata": _told_nothing,
    "get_transfer_results": _ended_nothing,
    "get_finished": _ended_nothing,
    "get_block_ids_with_load_errors": _brought_nothing,
    "get_kv_connector_kv_cache_events": _brought_nothing,
    "build_connector_worker_meta": _brought_nothing,
}
_BEGINS_STEP = "bind_connector_metadata"
_OF_STEP = frozenset(("start_load_kv", "wait_for_save", "clear_connector_metadata"))
"""They are given nothing, and work on the metadata that their step began with."""


@dataclass(slots=True)
class Cost:
    """What one hook has cost so far; `idle_*` is the part of the calls that had nothing to do."""

    count: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    max_seconds: float = 0.0
    idle_count: int = 0
    idle_seconds: float = 0.0
    idle_cpu_seconds: float = 0.0

    def add(self, seconds: float, cpu_seconds: float, *, idle: bool) -> None:
        """One more call."""
        self.count += 1
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds
        self.max_seconds = max(self.max_seconds, seconds)
        if idle:
            self.idle_count += 1
            self.idle_seconds += seconds
            self.idle_cpu_seconds += cpu_seconds

    def to_dict(self) -> dict[str, float]:
        """For the report."""
        return {
            "count": self.count,
            "seconds": round(self.seconds, 6),
            "cpu_seconds": round(self.cpu_seconds, 6),
            "max_seconds": round(self.max_seconds, 6),
            "idle_count": self.idle_count,
            "idle_seconds": round(self.idle_seconds, 6),
            "idle_cpu_seconds": round(self.idle_cpu_seconds, 6),
        }


class Meter:
    """Times the hooks of the connector objects of one engine. Their thread is the one that wraps them."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}
        self._inside = False
        self._step_is_empty = False

    def wrap(
        self, connector: Any, side: str, hooks: tuple[str, ...], observers: Mapping[str, Observer]
    ) -> None:
        """Time those of `hooks` that the connector has; `observers` hear of calls, outside of the time."""
        for name in hooks:
            method = getattr(connector, name, None)
            if callable(method):
                cost = self.costs.setdefault(f"{side}.{name}", Cost())
                setattr(connector, name, self._timed(name, method, cost, observers.get(name)))

    def to_dict(self) -> dict[str, dict[str, float]]:
        """For the report: what has been called at all."""
        return {name: cost.to_dict() for name, cost in list(self.costs.items()) if cost.count}

    def _judge(self, hook: str) -> Judge:
        if hook == _BEGINS_STEP:

            def begins(args: tuple[Any, ...], result: Any) -> bool:
                self._step_is_empty = _told_nothing(args, result)
                return self._step_is_empty

            return begins
        if hook in _OF_STEP:
            return lambda _, __: self._step_is_empty
        return _JUDGES.get(hook, lambda _, __: False)

    def _timed(
        self, name: str, method: Callable[..., Any], cost: Cost, observer: Observer | None
    ) -> Callable[..., Any]:
        thread, is_idle = threading.get_ident(), self._judge(name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != thread:
                return method(*args, **kwargs)
            self._inside = True
            cpu, began = time.thread_time(), time.perf_counter()
            try:
                result = method(*args, **kwargs)
            except BaseException:
                cost.add(time.perf_counter() - began, time.thread_time() - cpu, idle=False)
                raise
            else:
                seconds, cpu_seconds = time.perf_counter() - began, time.thread_time() - cpu
            finally:
                self._inside = False
            cost.add(seconds, cpu_seconds, idle=is_idle(args, result))
            if observer is not None:
                observer(args, result)
            return result

        return timed
