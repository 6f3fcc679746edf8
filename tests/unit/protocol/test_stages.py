"""One fault at every stage of a transfer: what must hold whichever stage it meets."""

from __future__ import annotations

from collections import Counter

import pytest

from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import (
    Advance,
    Expect,
    Finish,
    Receive,
    Received,
    ReceiveFailed,
    Released,
    Source,
)
from kvferry.protocol.consumer import CONSUMER_MESSAGES, ConsumerCore
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import Register, Written
from kvferry.protocol.outputs import Link, PeerFacts, Resolve, Send
from kvferry.protocol.producer import ProducerCore
from tests.support.pair import Decode, Pair

P0, P1, D0 = PeerName("p0"), PeerName("p1"), PeerName("d0")
PATIENT = Limits(lease_seconds=4.0, silence_seconds=30.0, write_seconds=30.0)


def holds(pair: Pair, decode: Decode) -> bool:
    """Whether the decode engine still has every block of a request away from its pool."""
    return all(block in pair.pools[D0].owner for block in decode.blocks)


def ends(pair: Pair, transfer: str) -> list[Received | ReceiveFailed]:
    """What the decode engine was told of a transfer's end."""
    kinds = (Received, ReceiveFailed)
    return [result for _, result in pair.results if isinstance(result, kinds) and result.transfer == transfer]


# --- the client leaves -----------------------------------------------------------------------------


def begin(pair: Pair, stage: str) -> Decode:
    """Bring a transfer of 24 tokens to a stage, and hold back what would answer a `Cancel`."""
    if stage == "matched":
        # Another transfer has the lane of both ranks, so this one has everything but its turn.
        pair.expect("u", 8)
        pair.receive("u", 8, consumer="other")
        pair.compute("u", 8)
    pair.expect("t", 24)
    if stage == "sent":
        pair.held = {(D0, P0), (D0, P1)}
    decode = pair.receive("t", 24)
    if stage in ("matched", "posted", "half of the ranks done"):
        pair.compute("t", 24)
    if stage in ("registered", "matched"):
        pair.held = {(P0, D0), (P1, D0)}
    if stage == "half of the ranks done":
        while numbers := [number for name, number in pair.flights if name == P0]:
            pair.complete(*numbers, producer="p0")
    return decode


def answer(pair: Pair, stage: str) -> None:
    """Let the ranks become silent and say so."""
    if stage in ("posted", "half of the ranks done"):
        pair.complete()
    pair.held = set()
    pair.run()


@pytest.mark.parametrize("stage", ["sent", "registered", "matched", "posted", "half of the ranks done"])
def test_an_abort_frees_no_block_before_every_rank_has_answered(stage: str) -> None:
    """P02: what lands after the abort lands in blocks that are still the request's; the pair checks it."""
    pair = Pair(producers=2, limits=Limits(in_flight_per_peer=1))
    decode = begin(pair, stage)
    posted = sum(piece.transfer == "t" for piece in pair.posts)
    pair.withdraw("t")
    pair.advance(3.0)
    if stage != "sent":
        # A registration that no rank has read may permit no write yet; the rest holds anyway.
        assert holds(pair, decode), "not every rank has said that it is silent"
        assert decode.result is None
    answer(pair, stage)
    assert isinstance(decode.result, ReceiveFailed)
    assert decode.result.fenced
    assert decode.result.cancelled
    assert not any(block in pair.pools[D0].owner for block in decode.blocks)
    # What prefill computes from now on goes nowhere.
    pair.compute("t", 24)
    pair.finish("t")
    pair.complete_all()
    assert sum(piece.transfer == "t" for piece in pair.posts) == posted
    if stage == "matched":
        pair.finish("u")
    assert len(ends(pair, "t")) == 1
    pair.assert_clean()


def test_an_abort_while_the_producer_is_looked_for_frees_at_once_and_nothing_is_ever_written() -> None:
    """P02: nobody was told of the blocks, and nobody is told of them once the producer is found."""
    pair = Pair(producers=2)
    pair.resolve_held = True
    pair.expect("t", 24)
    decode = pair.receive("t", 24)
    pair.withdraw("t")
    assert not any(block in pair.pools[D0].owner for block in decode.blocks)
    pair.resolve_held = False
    pair.run()
    pair.compute("t", 24)
    pair.finish("t")
    assert pair.posts == []
    assert pair.messages("d0", Register) == []
    pair.assert_clean()


def test_a_hundred_aborts_of_a_producer_that_is_never_heard_again() -> None:
    """P07: some of them under a write that never ends. All blocks come back in a bounded time; a hundred
    late completions change nothing, and blocks that were given to others stay theirs."""
    pair = Pair(blocks=200)
    names = [f"t{number}" for number in range(100)]
    for name in names:
        pair.receive(name, 8)
        pair.expect(name, 8)
        pair.compute(name, 8)
    assert pair.flights
    pair.cut = {(D0, P0), (P0, D0)}
    for name in names:
        pair.withdraw(name)
    assert pair.pools[D0].free_count == 0
    pair.advance(60.0)
    assert pair.pools[D0].free_count == 200
    others = pair.receive("new", 32)
    before = list(pair.results)
    for name in names:
        message = Written(transfer=TransferId(name), consumer=ConsumerId("c0"), start=0, stop=8)
        pair.consumers[D0].handle_message(P0, message, pair.now)
    pair.complete()
    assert pair.results == before
    assert pair.pools[D0].free_count == 200 - 8
    assert holds(pair, others)


# --- the lease ends before the write ---------------------------------------------------------------


@pytest.mark.parametrize("stage", ["handshake", "turn"])
def test_nothing_is_written_from_blocks_whose_lease_has_ended(stage: str) -> None:
    """P08: the handshake, or the transfer's turn, comes after the lease. The blocks are another request's by
    then: no write, one failure, and the other request gets what is its own."""
    pair = Pair(blocks=6, limits=Limits(**limits_of(PATIENT), in_flight_per_peer=1))
    if stage == "turn":
        pair.expect("first", 8)
        pair.receive("first", 8, consumer="first")
        pair.compute("first", 8)
        assert len(pair.flights) == 1
    else:
        pair.resolve_held = True
    pair.expect("t", 16)
    pair.compute("t", 16)
    decode = pair.receive("t", 8)
    leased = list(pair.prefills[TransferId("t")].blocks)
    pair.finish("t")
    pair.cut = {(D0, P0)}
    pair.advance(PATIENT.lease_seconds + 0.1)
    assert pair.prefills[TransferId("t")].outcomes == {P0: "lease_expired"}
    pair.cut = set()
    pair.expect("u", 16)
    pair.compute("u", 16)
    assert set(pair.prefills[TransferId("u")].blocks) & set(leased), "the blocks have a new owner"
    pair.resolve_held = False
    pair.run()
    pair.complete_all()
    pair.advance(5.0)
    assert [piece for piece in pair.posts if piece.transfer == "t"] == []
    assert isinstance(decode.result, ReceiveFailed)
    assert decode.result.reason == "lease_expired"
    assert len(ends(pair, "t")) == 1
    if stage == "turn":
        pair.finish("first")
    pair.finish("u")
    heir = pair.receive("u", 8)
    pair.complete_all()
    assert isinstance(heir.result, Received)
    pair.assert_clean()


def limits_of(limits: Limits) -> dict[str, float]:
    """The settings that differ from the defaults here."""
    names = ("lease_seconds", "silence_seconds", "write_seconds")
    return {name: getattr(limits, name) for name in names}


# --- one of several ranks fails, or the end comes after the time limit -----------------------------


def test_one_of_four_ranks_fails_and_the_blocks_wait_for_the_three() -> None:
    """P11: rank 1 fails at once, the others five seconds later: blocks are free then, reported once."""
    pair = Pair(producers=4)
    pair.expect("t", 8)
    decode = pair.receive("t", 8)
    pair.compute("t", 8)
    pair.fail(1, "p1")
    pair.advance(5.0)
    assert decode.result is None
    for name in ("p0", "p2", "p3"):
        assert holds(pair, decode), f"{name} still writes"
        pair.complete(1, producer=name)
    assert isinstance(decode.result, ReceiveFailed)
    assert decode.result.reason.startswith("post_failed")
    assert decode.safe
    assert len(ends(pair, "t")) == 1
    pair.finish("t")
    pair.assert_clean()


def test_a_write_that_ends_after_the_time_limit_frees_its_memory_and_undoes_no_failure() -> None:
    """P46: failed at the limit, its memory back when the transport has ended, and failed it stays."""
    pair = Pair()
    pair.expect("t", 8)
    decode = pair.receive("t", 8)
    pair.compute("t", 8)
    pair.finish("t")
    pair.cut = {(D0, P0), (P0, D0)}
    pair.advance(pair.limits.silence_seconds + 0.5)
    failed = decode.result
    assert isinstance(failed, ReceiveFailed)
    assert not failed.fenced
    assert holds(pair, decode)
    assert pair.pool.free_count == pair.pool.count - 2, "the source is being read"
    pair.cut = set()
    pair.complete()
    assert decode.result == failed
    assert decode.safe
    assert not any(block in pair.pools[D0].owner for block in decode.blocks)
    pair.assert_clean()


# --- engines of unequal sizes ----------------------------------------------------------------------

SOURCE = Source(EngineId("prefill"), "127.0.0.1", 5600)


class Ranks:
    """Cores of two engines whose ranks meet as `ways` says: consumer rank -> its producer ranks."""

    def __init__(self, ways: dict[str, list[str]]) -> None:
        self.ways = ways
        names = sorted({producer for producers in ways.values() for producer in producers})
        self.producers = {PeerName(name): ProducerCore(Limits(), (4,)) for name in names}
        self.consumers = {PeerName(name): ConsumerCore(Limits(), 3.0, (4,)) for name in ways}
        self.sharers = Counter(producer for producers in ways.values() for producer in producers)
        self.told: Counter[tuple[str, str, str]] = Counter()
        self.results: Counter[tuple[str, str]] = Counter()

    def run(self) -> None:
        """Carry messages and writes until nothing is left."""
        busy = True
        while busy:
            busy = False
            for name, core in (*self.producers.items(), *self.consumers.items()):
                while (output := core.poll_output()) is not None:
                    busy = True
                    self.do(name, output)
                while (result := core.poll_result()) is not None:
                    self.results[name, type(result).__name__] += 1
            for name, producer in self.producers.items():
                while (piece := producer.next_slice(0.0)) is not None:
                    busy = True
                    self.do(name, Send(piece.peer, piece.notify))
                    producer.handle_slice_done(piece.slice, 0.0)

    def do(self, name: PeerName, output: object) -> None:
        """One output of the core of that name."""
        if isinstance(output, Resolve):
            links = tuple(Link(PeerName(one), self.sharers[one], (100,)) for one in self.ways[name])
            for link in links:
                self.producers[link.peer].handle_link(name, PeerFacts((4,), 400))
            self.consumers[name].handle_resolved(SOURCE, links, 0.0)
        elif isinstance(output, Send):
            self.told[name, output.peer, type(output.message).__name__] += 1
            is_for_consumer = type(output.message) in CONSUMER_MESSAGES
            cores = self.consumers if is_for_consumer else self.producers
            cores[output.peer].handle_message(name, output.message, 0.0)


@pytest.mark.parametrize(
    "ways",
    [
        {"d0": ["p0", "p1"], "d1": ["p2", "p3"]},
        {"d0": ["p0"], "d1": ["p0"], "d2": ["p1"], "d3": ["p1"]},
        {"d0": ["p0", "p1", "p2", "p3"]},
    ],
    ids=["4 to 2", "2 to 4", "4 to 1"],
)
def test_with_unequal_sizes_every_rank_is_told_once_and_ends_once(ways: dict[str, list[str]]) -> None:
    """P51: the cores go by the ranks that they are linked with, never by the size of their own engine."""
    ranks = Ranks(ways)
    transfer = TransferId("t")
    *early, late = ways

    def receive(name: str) -> None:
        command = Receive(transfer, ConsumerId("c0"), SOURCE, 0, 8, (((3, 2),),))
        ranks.consumers[PeerName(name)].handle_command(command, 0.0)
        ranks.run()

    for name in early:
        receive(name)
    assert not ranks.results
    done: set[str] = set()
    for name, producer in sorted(ranks.producers.items()):
        for command in (Expect(transfer, 8), Advance(transfer, 8, 0, (((0, 2),),)), Finish(transfer)):
            producer.handle_command(command, 0.0)
        ranks.run()
        done.add(name)
        assert [one for one in ways if ranks.results[one, "Received"]] == [
            one for one in early if done.issuperset(ways[one])
        ], f"after {name}"
    # Whoever serves the late rank too still holds its blocks, though another rank of its engine is served.
    assert {one for one in ranks.producers if not ranks.results[one, "Released"]} == set(ways[late])
    receive(late)
    pairs = {(consumer, producer) for consumer, producers in ways.items() for producer in producers}
    assert {way[:2] for way in ranks.told if way[2] == "Register"} == pairs
    assert {way[:2]: n for way, n in ranks.told.items() if way[2] == "Written"} == {
        (producer, consumer): 1 for consumer, producer in pairs
    }
    assert {name: n for name, n in ranks.results.items() if name[1] in ("Received", Released.__name__)} == {
        **{(consumer, "Received"): 1 for consumer in ways},
        **{(producer, "Released"): 1 for producer in ranks.producers},
    }
    for core in (*ranks.producers.values(), *ranks.consumers.values()):
        core.check_invariants()
        assert not core.expecting
