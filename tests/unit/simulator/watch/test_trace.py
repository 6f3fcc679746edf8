"""The trace hash tells any two histories apart, in every process alike; the lines tell what happened."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest

from kvferry.ids import TransferId
from kvferry.protocol import commands as cmd
from kvferry.protocol import messages as msg
from kvferry.protocol.codec import Encoder
from kvferry.simulator.ground import events as ev
from kvferry.simulator.watch.trace import TraceHash, TraceLines, block_words, described, rank_words
from kvferry.transport.base import PostState
from tests.support.sample_history import CONSUMER, D_RANK, OURS, P_RANK, one_transfer


def hash_of(*events: ev.Observed) -> str:
    digest = TraceHash()
    for event in events:
        digest.observe(event)
    assert digest.events == len(events)
    return digest.hexdigest()


def lines_of(*events: ev.Observed) -> list[str]:
    lines = TraceLines()
    for event in events:
        lines.observe(event)
    return lines.lines


def words_of(event: ev.Observed) -> str:
    """A line without its time."""
    (line,) = lines_of(event)
    return " ".join(line.split()[1:])


HISTORY = one_transfer(fails=True)


def test_every_event_moves_the_hash() -> None:
    whole = hash_of(*HISTORY)
    assert whole == hash_of(*HISTORY)
    without_one = [hash_of(*HISTORY[:at], *HISTORY[at + 1 :]) for at in range(len(HISTORY))]
    assert len({whole, *without_one}) == len(HISTORY) + 1


def test_order_and_time_move_the_hash() -> None:
    first, second = HISTORY[3], HISTORY[4]
    assert hash_of(first, second) != hash_of(second, first)
    assert hash_of(first) != hash_of(replace(first, at_seconds=first.at_seconds + 1e-9))


def test_every_field_moves_the_hash() -> None:
    post = ev.Posted(1.0, P_RANK, D_RANK, 7, (1, 2), (3, 4))
    other = ev.Posted(2.0, D_RANK, P_RANK, 8, (1,), (3,), P_RANK)
    changed = [replace(post, **{field.name: getattr(other, field.name)}) for field in fields(post)]
    assert len({hash_of(event) for event in (post, *changed)}) == len(changed) + 1


def test_events_of_equal_fields_and_different_kinds_differ() -> None:
    finish, other = cmd.Finish(OURS), cmd.Released(OURS, "x")
    assert hash_of(ev.Commanded(1.0, P_RANK, finish)) != hash_of(
        ev.Commanded(1.0, P_RANK, cmd.Preempt((OURS,), 1))
    )
    cancelled = cmd.BlocksSafe(OURS, CONSUMER)
    assert hash_of(ev.Reported(1.0, D_RANK, cancelled)) != hash_of(
        ev.Reported(1.0, D_RANK, cmd.Released(OURS, CONSUMER))
    )
    assert hash_of(ev.Reported(1.0, P_RANK, other)) != hash_of(ev.Landed(1.0, P_RANK, D_RANK, 1))


def test_another_process_with_another_hash_seed_has_the_same_hash() -> None:
    program = (
        "from tests.support.sample_history import one_transfer\n"
        "from kvferry.simulator.watch.trace import TraceHash\n"
        "digest = TraceHash()\n"
        "for event in one_transfer(fails=True): digest.observe(event)\n"
        "print(digest.hexdigest())\n"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert hashes == {hash_of(*HISTORY)}


def test_the_order_in_a_set_is_no_part_of_the_hash() -> None:
    def fault(names: list[str]) -> ev.FaultInjected:
        return ev.FaultInjected(1.0, "crash", "x", frozenset(names))  # type: ignore[arg-type] - the misuse meant

    names = [f"transfer-{number}" for number in range(50)]
    assert hash_of(fault(names)) == hash_of(fault(names[::-1]))


def test_numbers_of_numpy_are_numbers() -> None:
    assert hash_of(ev.Posted(1.0, P_RANK, D_RANK, np.int64(7), (np.int32(3),), ())) == hash_of(
        ev.Posted(1.0, P_RANK, D_RANK, 7, (3,), ())
    )


def test_what_has_no_stable_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match="an event holds a object, which has no stable bytes"):
        hash_of(ev.FaultInjected(1.0, "crash", object()))


# --- lines ----------------------------------------------------------------------------------------

LINES = [
    (ev.ItemBegan(0.0, 1003, "crash at 0.000 s"), "ITEM 1003 crash at 0.000 s"),
    (ev.EngineStarted(0.0, "P0", (P_RANK,), 24), "P0 starts: 24 blocks, P0/p-one/tp0"),
    (ev.EngineCrashed(0.0, "P0", (P_RANK,)), "P0 crashes: P0/p-one/tp0"),
    (
        ev.Commanded(0.0, P_RANK, cmd.Advance(OURS, 8, 0, (((1, 2), (7, 1)),))),
        "P0/p-one/tp0 <- Advance transfer=transfer-1 frontier=8 first_block=0 blocks=[1-2 7]",
    ),
    (
        ev.Commanded(0.0, D_RANK, cmd.AnnounceCommand(OURS, CONSUMER, cmd.Source("P0", "h", 1))),
        "D0/d-one/tp0 <- AnnounceCommand transfer=transfer-1 consumer=decode-1 source=P0/any",
    ),
    (ev.Reported(0.0, P_RANK, cmd.Drained(4)), "P0/p-one/tp0 -> Drained ticket=4"),
    (
        ev.Posted(0.0, P_RANK, D_RANK, 7, (1, 2, 4), (5, 6, 7)),
        "P0/p-one/tp0 posts 7 to D0/d-one/tp0: blocks [1-2 4] into [5-7]",
    ),
    (ev.Landed(0.0, P_RANK, D_RANK, 7), "D0/d-one/tp0 a piece of post 7 of P0/p-one/tp0 lands"),
    (
        ev.PostEnded(0.0, P_RANK, D_RANK, 7, PostState.FAILED),
        "P0/p-one/tp0 sees post 7 to D0/d-one/tp0 failed",
    ),
    (ev.BlocksTaken(0.0, "D0", (3, 4), "r1"), "D0 blocks [3-4] taken by r1"),
    (ev.BlocksReturned(0.0, "D0", ()), "D0 blocks [none] free"),
    (
        ev.DecodeStarted(0.0, "D0", (D_RANK,), "r1", 9, 12, ((3, 4),)),
        "D0 request r1 decodes: 12 tokens of prompt 9 in [3-4]",
    ),
    (ev.DecodeEnded(0.0, "D0", "r1", preempted=True), "D0 request r1 is preempted"),
    (ev.DecodeEnded(0.0, "D0", "r1", preempted=False), "D0 request r1 leaves"),
    (
        ev.RequestEnded(0.0, "D0", "r1", OURS, CONSUMER, "failed"),
        "D0 request r1 of transfer-1 ends (consumer decode-1): failed",
    ),
    (ev.RequestEnded(0.0, "P0", "r1", OURS, None, "x"), "P0 request r1 of transfer-1 ends (producer): x"),
    (
        ev.FaultInjected(0.0, "post_late", f"2 to {P_RANK}", (OURS,)),
        "FAULT post_late: 2 to P0/p-one/tp0 (hits transfer-1)",
    ),
    (ev.FaultInjected(0.0, "partition", "P0 to D0"), "FAULT partition: P0 to D0"),
    (
        ev.FabricFault(0.0, P_RANK, D_RANK, "refuse", target_blocks=(5, 6)),
        "FAULT post_refused, P0/p-one/tp0 to D0/d-one/tp0: a post into [5-6]",
    ),
    (ev.Healed(3.0, 99.5), "HEALED faults stop; everything must end by 99.500000"),
    (
        ev.LegSent(0.0, "D0", "r1", OURS, CONSUMER),
        "router sends the decode leg decode-1 of transfer-1 to D0 as r1",
    ),
    (ev.LegSent(0.0, "P0", "r1", OURS, None), "router sends the prefill leg of transfer-1 to P0 as r1"),
    (
        ev.MessageEnded(0.0, P_RANK, D_RANK, 3, arrived=False),
        "D0/d-one/tp0 message 3 of P0/p-one/tp0 is lost",
    ),
    (ev.MessageEnded(0.0, P_RANK, D_RANK, 3, arrived=True), "D0/d-one/tp0 message 3 of P0/p-one/tp0 arrives"),
]


@pytest.mark.parametrize(("event", "words"), LINES, ids=lambda value: type(value).__name__)
def test_a_line_says_what_happened(event: ev.Observed, words: str) -> None:
    assert words_of(event) == words


def test_every_kind_of_event_has_a_line() -> None:
    defined = {kind for kind in vars(ev).values() if isinstance(kind, type) and issubclass(kind, ev.Observed)}
    assert {type(event) for event, _ in LINES} == defined - {ev.Observed, ev.MessageSent}


def test_a_line_starts_with_the_time() -> None:
    assert lines_of(ev.Healed(3.25, 9.0))[0].startswith("   3.250000  HEALED  ")


def test_a_message_is_shown_as_it_reads() -> None:
    message = msg.Status(transfers=(msg.TransferStatus(OURS, CONSUMER, "held", 8),), mark=1.5)
    (payload,) = Encoder(1 << 16).encode(message)
    line = words_of(ev.MessageSent(0.0, P_RANK, D_RANK, 3, payload))
    assert line.startswith(
        "P0/p-one/tp0 sends 3 to D0/d-one/tp0: Status transfers=(transfer-1/decode-1/held/8/1/0)"
    )


def test_a_long_message_is_shown_with_its_last_part() -> None:
    cancel = msg.Cancel(transfer=TransferId("t" * 300), consumer=CONSUMER, reason="client left")
    parts = Encoder(200).encode(cancel)
    assert len(parts) > 1
    lines = lines_of(*(ev.MessageSent(0.0, P_RANK, D_RANK, 1, part) for part in parts))
    assert all(line.endswith("a part of a long message") for line in lines[:-1])
    assert "Cancel transfer=ttt" in lines[-1]


def test_bytes_that_are_no_message_are_shown_too() -> None:
    assert "unreadable" in words_of(ev.MessageSent(0.0, P_RANK, D_RANK, 3, b"\0\1"))


def test_names_and_blocks_are_short() -> None:
    assert rank_words("kvferry/D0/d-one/pp1/tp0") == "D0/d-one/pp1/tp0"
    assert rank_words("elsewhere/D0") == "elsewhere/D0"
    assert block_words((9, 3, 4, 5, 1)) == "9 3-5 1"
    hello = msg.Hello(engine="D0", incarnation="i", pp=0, tp=1, version=1, metadata=b"m", cache=b"c")
    assert described(hello) == "Hello engine=D0 incarnation=i pp=0 tp=1"
