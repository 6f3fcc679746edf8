"""A step in which nothing happens makes nothing, and what stands for nothing stays empty."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.connector import compat, connector, scheduler
from kvferry.connector.hook_engine import Engine, engine_pair
from kvferry.connector.metadata import NO_ORDERS, FerryMetadata
from kvferry.connector.scheduler import FerryScheduler
from kvferry.host import worker
from kvferry.host.reports import NOTHING, Reported
from kvferry.protocol.commands import Abandon, Received, ReceiveFailed, Released
from tests.support.legs import DECODE, PREFILL
from tests.support.memory_agents import agents_in_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = 64


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A prefill engine that has nothing to do any more, its first gauges told."""
    with engine_pair(BLOCKS, agents_in_memory()) as (prefill, _):
        prefill.step()
        yield prefill


class MadeError(Exception):
    """Something was made that an idle step does without."""


def forbid_making(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise MadeError

    for module, name in (
        (worker, "Reported"),
        (scheduler, "FerryMetadata"),
        (scheduler, "FerryStats"),
        (connector, "WorkerReport"),
        (connector, "moved_stats"),
    ):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(FerryScheduler, "_current_gauges", refuse)


def test_an_idle_step_makes_no_report_no_metadata_and_no_statistics(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_making(monkeypatch)
    for _ in range(3):
        assert not engine.step().eventful
    engine.arrive(engine.request("r", 16, {"do_remote_decode": True, "transfer_id": "t"}))
    with pytest.raises(MadeError):
        engine.step()


def test_an_idle_steps_metadata_travels_as_a_name() -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(NO_ORDERS, protocol)) is NO_ORDERS
    assert len(pickle.dumps(NO_ORDERS)) < 80
    assert copy.deepcopy(NO_ORDERS) is NO_ORDERS


def test_metadata_is_empty_until_it_asks_for_something(engine_of: Any) -> None:
    prefill = engine_of()
    assert FerryMetadata().is_empty
    prefill.add("r", 40, PREFILL)
    assert not prefill.step().kv_connector_metadata.is_empty, "it is expected and computed"
    assert not prefill.step().kv_connector_metadata.is_empty, "it has ended"
    prefill.flush()
    assert prefill.side.needs_steps, "it is held"
    assert prefill.step().kv_connector_metadata is NO_ORDERS
    prefill.add("local", 40, max_tokens=3)
    assert prefill.step().kv_connector_metadata is NO_ORDERS


def test_what_stands_for_nothing_stays_empty_whatever_happens(engine_of: Any) -> None:
    engine = engine_of()
    engine.add("sent", 40, PREFILL)
    engine.steps(3)
    engine.agent.say(Released("transfer-one", "written"))
    engine.steps(2)
    for name, result in (
        ("received", Received("transfer-one", "received", 640)),
        ("failed", ReceiveFailed("transfer-one", "failed", "peer_lost", 16, fenced=True)),
    ):
        engine.add(name, 40, DECODE)
        engine.steps(2)
        engine.agent.say(result)
        engine.steps(4)
    assert engine.is_clean
    assert NO_ORDERS.is_empty
    assert Reported() == NOTHING


@pytest.mark.skipif(not compat.can_fail_receives(), reason="this vLLM has no such value")
def test_an_idle_steps_results_are_the_engines_own(engine: Engine) -> None:
    """Other connectors and runners may add to the sets that they are given."""
    first = engine._worker.get_transfer_results(set())
    first.finished_sending.add("another connector's")
    second = engine._worker.get_transfer_results(set())
    assert (second.finished_sending, second.finished_recving, second.failed_recving) == (set(), set(), set())


class Unreadable:
    """Blocks that nobody may ask for their ids: that takes as long as there are many."""

    def get_block_ids(self) -> Any:
        raise MadeError


def test_blocks_are_read_only_for_a_request_whose_kv_shall_come(engine_of: Any) -> None:
    engine = engine_of()
    hook = engine.scheduler.connector.update_state_after_alloc
    hook(engine.add("sends", 40, PREFILL), Unreadable(), 0)
    receives = engine.add("receives", 40, DECODE | {"transfer_id": "transfer-two"})
    with pytest.raises(MadeError):
        hook(receives, Unreadable(), 39)
    hook(receives, Unreadable(), 0)
    hook(receives, Unreadable(), 39)


def test_memory_for_what_shall_come_is_told_though_nothing_else_has_happened(engine_of: Any) -> None:
    """A request may wait for its memory for many steps after its arrival has been told."""
    side = engine_of().side
    request = SimpleNamespace(
        request_id="r", kv_transfer_params=DECODE, num_prompt_tokens=40, sampling_params=None
    )
    side.arrived(request)
    assert side.take_stats() is not None
    assert side.take_stats() is None
    side.allocated(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 40)
    told = side.take_stats()
    assert told is not None
    assert told.data["gauges"] == {"kvferry_transfers_in_flight\x1freceiving": 1}


def test_the_end_of_a_prefill_that_was_never_computed_is_told(engine_of: Any) -> None:
    """Its request is gone from the tables when the next step is planned."""
    engine = engine_of(step_tokens=32)
    engine.add("first", 32, max_tokens=1)
    engine.add("waits", 40, PREFILL)
    engine.step()
    engine.agent.take()
    engine.abort("waits")
    engine.step()
    [abandoned] = engine.agent.take()
    assert isinstance(abandoned, Abandon)


def gauge(engine: Any, state: str) -> float | None:
    value: float | None = engine.stats.data["gauges"].get(f"kvferry_transfers_in_flight\x1f{state}")
    return value


def test_gauges_follow_every_stage_of_a_transfer(engine_of: Any) -> None:
    """The report is made only when something has happened; whatever moves a gauge must count as such."""
    engine = engine_of()
    engine.steps(1)
    assert (gauge(engine, "sending"), gauge(engine, "held"), gauge(engine, "receiving")) == (0, 0, 0)
    engine.add("sent", 100, PREFILL)
    engine.steps(1)
    assert (gauge(engine, "sending"), gauge(engine, "held")) == (1, 0)
    engine.steps(2)
    assert (gauge(engine, "sending"), gauge(engine, "held")) == (0, 1)
    engine.agent.say(Released("transfer-one", "written"))
    engine.steps(1)
    assert gauge(engine, "held") == 0
    engine.add("received", 40, DECODE)
    engine.steps(1)
    assert gauge(engine, "receiving") == 1
    engine.agent.say(Received("transfer-one", "received", 640))
    engine.steps(1)
    assert gauge(engine, "receiving") == 0
