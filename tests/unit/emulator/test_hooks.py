"""The meter of a connector's hooks: counts every call once, and changes nothing of what the hooks do."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import KVConnectorOutput

from kvferry.connector.metadata import NO_ORDERS, FerryMetadata
from kvferry.connector.stats import FerryStats
from kvferry.emulator.hooks import SCHEDULER_HOOKS, WORKER_HOOKS, Meter, is_empty
from kvferry.host.orders import Sender
from kvferry.ids import TransferId
from kvferry.protocol.commands import Preempt


class Connector:
    """Has some hooks."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, name: str, *, size: int = 0) -> str:
        self.calls.append((name, size))
        return name * 2

    def results(self) -> tuple[str, ...]:
        return (self.begin("inner"),)

    def fail(self) -> None:
        raise ValueError("on purpose")


def wrapped(observers: dict[str, Any] | None = None) -> tuple[Connector, Meter]:
    connector, meter = Connector(), Meter()
    meter.wrap(connector, "worker", ("begin", "results", "fail", "not_there"), observers or {})
    return connector, meter


def counts(meter: Meter) -> dict[str, float]:
    return {name: cost["count"] for name, cost in meter.to_dict().items()}


def test_arguments_and_results_pass_through() -> None:
    connector, meter = wrapped()
    assert connector.begin("a", size=3) == "aa"
    assert connector.calls == [("a", 3)]
    assert counts(meter) == {"worker.begin": 1}


def test_a_hook_that_calls_another_is_charged_once() -> None:
    connector, meter = wrapped()
    connector.results()
    assert counts(meter) == {"worker.results": 1}


def test_an_error_passes_and_is_counted() -> None:
    connector, meter = wrapped()
    with pytest.raises(ValueError, match="on purpose"):
        connector.fail()
    connector.begin("after")
    assert counts(meter) == {"worker.fail": 1, "worker.begin": 1}


def test_observers_hear_of_arguments_and_result() -> None:
    heard: list[Any] = []
    connector, _ = wrapped({"begin": lambda args, result: heard.append((args, result))})
    connector.begin("a", size=1)
    assert heard == [(("a",), "aa")]


def test_calls_on_other_threads_are_not_the_main_threads_cost() -> None:
    connector, meter = wrapped()
    other = threading.Thread(target=connector.begin, args=("b",))
    other.start()
    other.join()
    assert connector.calls == [("b", 0)]
    assert counts(meter) == {}


def test_times_add_up() -> None:
    connector, meter = wrapped()
    for _ in range(3):
        connector.begin("a")
    cost = meter.costs["worker.begin"]
    assert cost.count == 3
    assert 0 < cost.max_seconds <= cost.seconds


class Metadata:
    """A step's, of a connector that stamps it with a clock and keeps the rest in containers."""

    def __init__(self, *requests: str) -> None:
        self.clock = 12.5
        self.requests = list(requests)
        self.heartbeats: dict[str, str] = {}


class Steps:
    """Every hook of a step; what each brings is set by its name."""

    def __init__(self, **brings: Any) -> None:
        self.brings = brings

    def __getattr__(self, name: str) -> Any:
        if name not in (*SCHEDULER_HOOKS, *WORKER_HOOKS):
            raise AttributeError(name)
        return lambda *_: self.brings.get(name)


def idle(hook: str, *args: Any, brings: Any = None) -> bool:
    """Whether one call of a hook counts as idle."""
    connector, meter = Steps(**{hook: brings}), Meter()
    meter.wrap(connector, "x", (hook,), {})
    getattr(connector, hook)(*args)
    cost = meter.costs[f"x.{hook}"]
    assert cost.count == 1
    assert cost.idle_seconds == (cost.seconds if cost.idle_count else 0.0)
    return bool(cost.idle_count)


def results(**ended: set[str]) -> SimpleNamespace:
    """As vLLM 0.31 and later have it."""
    kinds: dict[str, set[str]] = {
        "finished_sending": set(),
        "finished_recving": set(),
        "failed_recving": set(),
    }
    return SimpleNamespace(**kinds | ended)


def output(**ended: Any) -> KVConnectorOutput:
    return KVConnectorOutput(**ended)


@pytest.mark.parametrize(
    ("hook", "args", "brings"),
    [
        ("build_connector_meta", (object(),), Metadata()),
        ("build_connector_meta", (object(),), NO_ORDERS),
        ("update_connector_output", (output(finished_sending=set()),), None),
        ("has_pending_push_work", (), True),
        ("has_pending_block_frees", (), False),
        ("take_events", (), ()),
        ("get_kv_connector_stats", (), None),
        ("get_kv_connector_stats", (), FerryStats()),
        ("handle_preemptions", (Metadata(),), None),
        ("bind_connector_metadata", (Metadata(),), None),
        ("get_transfer_results", (set(),), results()),
        ("get_finished", (set(),), (None, set())),
        ("get_block_ids_with_load_errors", (), set()),
        ("get_kv_connector_kv_cache_events", (), None),
        ("build_connector_worker_meta", (), None),
    ],
)
def test_a_hook_that_is_told_nothing_and_brings_nothing_was_idle(
    hook: str, args: tuple[Any, ...], brings: Any
) -> None:
    assert idle(hook, *args, brings=brings)


COUNTED = FerryStats({"counters": {"kvferry_transfers": 1}, "observations": {}, "gauges": {}})


@pytest.mark.parametrize(
    ("hook", "args", "brings"),
    [
        ("on_new_request", (object(),), None),
        ("get_num_new_matched_tokens", (object(), 0), (0, False)),
        ("update_state_after_alloc", (object(), object(), 0), None),
        ("request_finished_all_groups", (object(), ()), (False, None)),
        ("build_connector_meta", (object(),), Metadata("r")),
        ("build_connector_meta", (object(),), FerryMetadata(senders=[Sender(TransferId("t"), "r")])),
        ("update_connector_output", (output(finished_recving={"r"}),), None),
        ("take_events", (), (object(),)),
        ("get_kv_connector_stats", (), COUNTED),
        ("handle_preemptions", (FerryMetadata(preempt=Preempt((), 1)),), None),
        ("bind_connector_metadata", (Metadata("r"),), None),
        ("get_transfer_results", ({"ended"},), results()),
        ("get_transfer_results", (set(),), results(failed_recving={"r"})),
        ("get_finished", (set(),), (None, {"r"})),
        ("get_block_ids_with_load_errors", (), {7}),
        ("build_connector_worker_meta", (), object()),
    ],
)
def test_a_hook_that_has_to_do_with_a_request_was_busy(hook: str, args: tuple[Any, ...], brings: Any) -> None:
    assert not idle(hook, *args, brings=brings)


@pytest.mark.parametrize(
    ("value", "asks"),
    [
        (np.zeros(3), True),
        (np.zeros(0), False),
        (Preempt((), 1), True),
        ("", False),
        (None, False),
        (7, False),
        (12.5, False),
    ],
)
def test_a_field_of_metadata_asks_for_something_by_what_it_holds(value: Any, asks: bool) -> None:
    metadata = Metadata()
    metadata.requests = value
    assert is_empty(metadata) is not asks


def test_hooks_without_arguments_are_as_idle_as_their_steps_metadata() -> None:
    connector, meter = Steps(), Meter()
    meter.wrap(connector, "worker", WORKER_HOOKS, {})
    for metadata in (Metadata(), Metadata("r"), Metadata()):
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        connector.clear_connector_metadata()
    for name in ("start_load_kv", "wait_for_save", "clear_connector_metadata"):
        cost = meter.costs[f"worker.{name}"]
        assert (cost.count, cost.idle_count) == (3, 2)
        assert cost.idle_seconds < cost.seconds
        assert meter.to_dict()[f"worker.{name}"]["idle_count"] == 2


def test_a_call_that_raises_was_busy() -> None:
    connector, meter = wrapped()
    with pytest.raises(ValueError, match="on purpose"):
        connector.fail()
    assert meter.costs["worker.fail"].idle_count == 0
