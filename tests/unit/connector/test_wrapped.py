"""FerryConnector as one of several under vLLM's own `MultiConnector`, on both sides."""

from __future__ import annotations

import pickle

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput

from kvferry.connector import compat
from kvferry.connector.stats import FerryStats
from kvferry.protocol.commands import (
    Abandon,
    Finish,
    Preempt,
    Receive,
    Received,
    ReceiveFailed,
    Released,
)
from tests.support import vllm_engine
from tests.support.legs import DECODE, PREFILL, of
from tests.support.vllm_engine import kv_cache_config

pytestmark = pytest.mark.skipif(
    not compat.can_fail_receives(), reason="this vLLM's wrapper does not pass failed receives on"
)


class Separated(FerryStats):
    """Statistics of several connectors, of which ours are taken."""

    def aggregate(self, other):
        return super().aggregate(FerryStats(other.data["FerryConnector"]))


class Wrapped:
    """An engine whose connector is the wrapper, with ours and another child on both sides."""

    def __init__(self, engine_of, monkeypatch, order, **shape):
        ours = {
            "kv_connector": "FerryConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_module_path": "kvferry.connector.connector",
        }
        other = {
            "kv_connector": "OtherConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "tests.support.other_connector",
        }
        made = []
        plain = vllm_engine.vllm_config

        def config(model, wanted):
            config = plain(model, wanted)
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role="kv_both",
                engine_id=wanted.engine_id,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "connectors": [ours, other] if order == "ours first" else [other, ours]
                },
            )
            made.append(config)
            return config

        self.at = 0 if order == "ours first" else 1
        monkeypatch.setattr(vllm_engine, "vllm_config", config)
        monkeypatch.setattr(
            MultiConnector,
            "scheduler",
            property(lambda wrapper: wrapper._connectors[self.at].scheduler),
            raising=False,
        )
        self.engine = engine_of(**shape)
        self.agent = self.engine.agent
        self.worker = MultiConnector(made[0], KVConnectorRole.WORKER, kv_cache_config(self.engine.shape))
        self.worker._connectors[self.at]._worker = self.engine.workers[0]
        self.other = self.worker._connectors[1 - self.at]
        self.engine._hooks = self.hooks
        self.engine.stats = Separated()

    def hooks(self, rank: int, planned: SchedulerOutput) -> KVConnectorOutput:
        """A step of the worker's connector, in vLLM's order of hooks."""
        metadata = pickle.loads(pickle.dumps(planned.kv_connector_metadata))
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(planned.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving or set(),
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        return output


@pytest.fixture(params=["ours first", "ours last"])
def wrapped(engine_of, monkeypatch, request):
    return lambda **shape: Wrapped(engine_of, monkeypatch, request.param, **shape)


@pytest.mark.parametrize("first", ["ours", "the other's"])
def test_blocks_are_held_until_each_child_has_let_go(wrapped, first):
    """P31: the params are made, and the ends of a request are counted per child, in either order."""
    world = wrapped()
    engine = world.engine
    engine.add("r", 40, PREFILL)
    engine.steps(3)
    assert engine.answer("r")["transfer_id"] == "transfer-one"
    assert len(of(Finish, world.agent.take())) == 1
    for child in (first, "ours" if first != "ours" else "the other's"):
        assert engine.pool.get_num_free_blocks() == engine.blocks_free_at_start - 3, f"{child} still reads"
        assert engine.scheduler.connector.has_pending_push_work()
        if child == "ours":
            world.agent.say(Released("transfer-one", "written"))
        else:
            world.other.saved = {"r"}
        engine.steps(2)
    assert engine.is_clean


def test_nothing_is_stored_before_it_has_arrived(wrapped):
    """P31: while the KV is on its way, the other child is not told to store it."""
    world = wrapped()
    engine = world.engine
    engine.add("r", 40, DECODE, max_tokens=2)
    engine.steps(5)
    assert len(of(Receive, world.agent.take())) == 1
    assert world.other.stored == []
    world.agent.say(Received("transfer-one", "r", 1000))
    engine.steps(2)
    assert world.other.stored[0] == "r"
    engine.steps(4)
    assert engine.finish_reason("r") is FinishReason.LENGTH
    world.other.saved = {"r"}
    engine.steps(2)
    assert engine.is_clean


@pytest.mark.parametrize("params", [None, {}])
def test_a_request_that_is_not_ours_passes_through(wrapped, params):
    """P31: nothing is said of it, and only the other child's hold counts."""
    world = wrapped()
    engine = world.engine
    engine.add("r", 40, params)
    engine.steps(3)
    assert engine.answer("r") is None
    assert world.agent.take() == []
    world.other.saved = {"r"}
    engine.steps(2)
    assert engine.is_clean


def test_a_failed_receive_is_computed_again_and_preemption_drains(wrapped):
    """P31: the hooks for bad blocks, failed receives, pins and preemption all reach us."""
    world = wrapped(prefix_caching=False)
    engine = world.engine
    engine.add("r", 40, DECODE, max_tokens=2)
    engine.steps(2)
    world.agent.say(ReceiveFailed("transfer-one", "r", "peer_lost: x", 16, fenced=True))
    engine.step()
    assert engine.step().num_scheduled_tokens == {"r": 24}
    engine.steps(3)
    world.other.saved = {"r"}
    engine.steps(2)
    assert engine.is_clean

    engine.add("p", 60, PREFILL, max_tokens=9)
    engine.steps(1)
    blocks = engine.blocks_of("p")
    request = engine.scheduler.requests["p"]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0, drop_stale_output=True)
    assert all(engine.pool.blocks[block].ref_cnt for block in blocks), "pinned in the engine's own pool"
    assert engine.scheduler.connector.has_pending_block_frees()
    engine.steps(1)
    assert world.agent.drained == [("transfer-one",)]
    engine.abort("p")
    engine.steps(2)
    commands = world.agent.take()
    assert of(Preempt, commands) == []
    assert len(of(Abandon, commands)) == 1
    world.agent.say(Released("transfer-one", "abandoned"))
    world.other.saved = {"p"}
    engine.steps(2)
    assert engine.is_clean
