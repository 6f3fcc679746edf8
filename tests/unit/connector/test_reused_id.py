"""A transfer id that is used again, under vLLM's real scheduler."""

from __future__ import annotations

from kvferry.protocol.commands import Released

PREFILL = {"do_remote_decode": True, "transfer_id": "transfer-one"}


def test_an_id_is_free_again_only_when_every_rank_has_let_go(engine_of):
    """P39: aborted in the queue and sent again at once: the second runs by itself, the engine lives."""
    engine = engine_of(step_tokens=32)
    engine.agent._check = lambda command: None
    engine.add("r", 90, PREFILL)
    engine.abort("r")
    engine.add("r2", 90, PREFILL)
    engine.step()
    engine.agent._results.append(Released("transfer-one", "abandoned"))
    engine.steps(6)
    assert engine.finish_reason("r2") is not None, "it was computed, and nothing was reported for it"
    engine.add("r3", 90, PREFILL)
    engine.steps(6)
    assert engine.answer("r3")["transfer_id"] == "transfer-one", "the id is free again"
