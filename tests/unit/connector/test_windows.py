"""Models with sliding windows under vLLM's own scheduler: two cache groups, one of the newest tokens only."""

from __future__ import annotations

import pytest
from vllm.v1.engine import FinishReason

from kvferry.connector import compat
from kvferry.handoff import HeldParams, SourceParams
from kvferry.host.prefixes import told_prefixes
from kvferry.layout.spans import from_spans
from kvferry.protocol.commands import Advance, Receive, Received, ReceiveFailed, Released
from tests.support.legs import DECODE as SOURCE
from tests.support.vllm_engine import BLOCK_TOKENS

pytestmark = pytest.mark.skipif(
    not compat.can_fail_receives(), reason="this vLLM cannot throw one request's prefix away"
)

PREFILL = {"do_remote_decode": True, "transfer_id": "transfer-one"}
WINDOW = 40


def ids(spans):
    """Block ids; None for one that is not there."""
    return [int(block) if block >= 0 else None for block in from_spans(spans)]


def published(commands):
    """Block ids of each group by index after these commands."""
    groups = [[], []]
    for command in commands:
        if isinstance(command, Advance):
            for number, spans in enumerate(command.blocks):
                del groups[number][command.first_of(number) :]
                groups[number] += ids(spans)
    return groups


def test_turns_are_not_kept_and_the_log_says_why(engine_of, caplog):
    """The next turn may part from this one before its window: nothing is kept, told, asked for or noted."""
    with caplog.at_level("WARNING", logger="kvferry"):
        engine = engine_of(window=WINDOW, step_tokens=256, extra=(("bidirectional_kv_xfer", True),))
    (said,) = [record.message for record in caplog.records if "bidirectional_kv_xfer" in record.message]
    assert said.startswith("bidirectional_kv_xfer is off: this model has sliding windows")
    engine.add("r", 100, SOURCE, max_tokens=2)
    engine.step()
    engine.agent.take()
    engine.agent.say(Received("transfer-one", "r", 1000))
    engine.steps(6)
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.answer("r") is None
    assert (len(engine.side.holding), engine.side.holding._origins) == (0, {})
    engine.add("probe", 1, PREFILL | {"probe": True, "held_of": "transfer-one"})
    engine.steps(2)
    assert engine.answer("probe")["holds"] is False
    tokens = list(range(64))
    told = told_prefixes(tokens, 64, BLOCK_TOKENS, b"[null,null]")
    where = SourceParams(engine="d", host="127.0.0.1", port=1)
    held = HeldParams(source=where, transfer="transfer-kept", tokens=64, prefixes=told).to_params()
    engine.add("next", 120, held | {"do_remote_decode": True, "transfer_id": "transfer-two"})
    engine.steps(3)
    assert not [command for command in engine.agent.take() if isinstance(command, Receive)]
    assert engine.counters("kvferry_histories") == {("off",): 1}


def receive_of(engine):
    (receive,) = [command for command in engine.agent.take() if isinstance(command, Receive)]
    return receive


@pytest.mark.parametrize("prompt", [2, 17, 40, 41, 56, 57, 58, 150])
def test_a_decode_request_asks_for_its_window_and_computes_the_last_token(engine_of, prompt):
    """V14: null blocks are nobody's target. The last token looks at the 40 tokens that end with it."""
    engine = engine_of(window=WINDOW, step_tokens=256)
    engine.add("r", prompt, SOURCE, max_tokens=2)
    engine.step()
    receive = receive_of(engine)
    assert (receive.start, receive.stop) == (0, prompt - 1)
    whole, window = engine.tables_of("r")
    first = max(prompt - WINDOW, 0) // BLOCK_TOKENS
    count = -(-(prompt - 1) // BLOCK_TOKENS)
    assert ids(receive.groups[0]) == whole[:count]
    assert ids(receive.groups[1]) == window[first:count]
    assert 0 not in ids(receive.groups[1])
    engine.agent.say(Received("transfer-one", "r", 1000))
    engine.steps(1)
    assert engine.step().num_scheduled_tokens == {"r": 1}
    engine.steps(4)
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.is_clean


def test_what_is_cached_here_is_not_asked_for(engine_of):
    engine = engine_of(window=WINDOW, step_tokens=256)
    engine.add("warm", 64)
    engine.steps(2)
    engine.add("r", 90, SOURCE)
    engine.step()
    receive = receive_of(engine)
    assert (receive.start, receive.stop) == (64, 89)
    assert [ids(spans) for spans in receive.groups] == [table[4:6] for table in engine.tables_of("r")]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_receive_starts_over_or_fails_with_nothing_of_it_used(engine_of, policy):
    """V01: no block of either group counts, although half of the tokens had come."""
    engine = engine_of(window=WINDOW, step_tokens=256, policy=policy)
    engine.add("r", 150, SOURCE, max_tokens=2)
    engine.step()
    engine.agent.say(ReceiveFailed("transfer-one", "r", "peer_lost", 80, fenced=True))
    computed = sum(engine.step().num_scheduled_tokens.get("r", 0) for _ in range(4))
    engine.flush()
    if policy == "fail":
        assert (engine.finish_reason("r"), computed) == (FinishReason.ERROR, 0)
    else:
        assert (engine.finish_reason("r"), computed) == (FinishReason.LENGTH, 151)
    engine.steps(2)
    assert engine.is_clean


@pytest.mark.parametrize("step_tokens", [64, 256])
def test_a_prefill_request_holds_its_window_and_no_more(engine_of, step_tokens):
    """V14: in chunks or at once, the ranks are told of the window's blocks alone, and those are kept."""
    engine = engine_of(window=WINDOW, step_tokens=step_tokens)
    engine.add("r", 150, PREFILL, max_tokens=3)
    commands, blocks = [], []
    while engine.finish_reason("r") is None:
        engine.step()
        commands += engine.agent.take()
        if "r" in engine.scheduler.requests and not blocks:
            blocks = engine.tables_of("r")[0]
    whole, window = published(commands)
    first = (150 - WINDOW) // BLOCK_TOKENS
    assert whole[: len(blocks)] == blocks[:10]
    assert window[:first] == [None] * first
    assert len(window) == len(whole) == 10
    assert None not in window[first:]
    held = engine.blocks_free_at_start - engine.pool.get_num_free_blocks()
    assert held == 10 + 10 - first
    engine.step()
    engine.agent.say(Released("transfer-one", "written"))
    engine.steps(2)
    assert engine.is_clean


def test_a_window_that_was_hit_in_the_cache_is_published(engine_of):
    engine = engine_of(window=WINDOW, step_tokens=256)
    engine.add("warm", 150)
    engine.steps(2)
    engine.add("r", 150, PREFILL)
    assert engine.step().num_scheduled_tokens["r"] == 150 - 144
    whole, window = published(engine.agent.take())
    first = (150 - WINDOW) // BLOCK_TOKENS
    assert [block is None for block in window] == [True] * first + [False] * (10 - first)
    assert None not in whole
