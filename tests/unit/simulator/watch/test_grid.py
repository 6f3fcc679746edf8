"""Stages of a transfer and the faults that are counted at them, on hand-made histories."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import (
    Abandon,
    AnnounceCommand,
    Expect,
    Finish,
    Received,
    ReceiveFailed,
    Released,
    Withdraw,
)
from kvferry.protocol.consumer import ConsumerCore
from kvferry.protocol.limits import Limits
from kvferry.protocol.outputs import Link, PeerFacts, Resolve, Send
from kvferry.protocol.producer import ProducerCore
from kvferry.simulator.ground.events import Commanded as Told
from kvferry.simulator.ground.events import (
    DecodeEnded,
    DecodeStarted,
    EngineCrashed,
    EngineStarted,
    FabricFault,
    FaultInjected,
    MessageEnded,
    MessageSent,
    Observed,
    Posted,
    PostEnded,
    Reported,
)
from kvferry.simulator.ground.options import FAULTS as KINDS
from kvferry.simulator.ground.options import HARMLESS
from kvferry.simulator.watch import grid, stages
from kvferry.simulator.watch.grid import BY_SIBLING, FAULTS, IMPOSSIBLE, Grid
from kvferry.simulator.watch.stages import STAGES, Stages
from kvferry.transport.base import PostState
from tests.support.history import CONSUMER, D0, D1, P0, P1, PRODUCER, SOURCE, C, T, advance, preempt, receive

OTHER = ConsumerId("c2")


class World:
    """P and D with tp 2 and real cores, of which rank 0 of each is fed."""

    def __init__(self) -> None:
        self.loops: dict[PeerName, Any] = {
            rank: SimpleNamespace(
                producer=ProducerCore(Limits(), (4,)), consumer=ConsumerCore(Limits(), 5.0, (4,))
            )
            for rank in (P0, P1, D0, D1)
        }
        self.stages = Stages(self)
        self.grid = Grid(self.stages)
        self.now = 0.0
        self.see(EngineStarted(0.0, PRODUCER, (P0, P1), 32))
        self.see(EngineStarted(0.0, CONSUMER, (D0, D1), 32))

    def loop_of(self, rank: PeerName) -> Any:
        return self.loops.get(rank)

    def see(self, *events: Observed) -> None:
        for event in events:
            self.grid.observe(event)

    def stage(self, consumer: ConsumerId = C) -> str | None:
        return self.stages.stage_of(T, consumer)

    def crash(self, engine: EngineId, *ranks: PeerName) -> None:
        self.see(FaultInjected(2.0, "crash", f"{engine}, noticed after 0 s"))
        for rank in ranks:
            del self.loops[rank]
        self.see(EngineCrashed(2.0, engine, ranks))

    # --- a usual course, step by step -------------------------------------------------------------

    def announced(self, consumer: ConsumerId = C) -> None:
        for rank in (D0, D1):
            self.see(Told(1.0, rank, AnnounceCommand(T, consumer, SOURCE)))

    def allocated(self, consumer: ConsumerId = C, blocks: tuple[int, ...] = (10, 11)) -> None:
        command = receive(blocks, consumer=consumer)
        for rank in (D0, D1):
            self.loops[rank].consumer.handle_command(command, 1.0)
            self.see(Told(1.0, rank, command))

    def told(self) -> None:
        """D's rank 0 has sent its registration."""
        core = self.loops[D0].consumer
        assert isinstance(core.poll_output(), Resolve)
        core.handle_resolved(SOURCE, (Link(P0, 1, (16,)),), 1.0)

    def registered(self) -> None:
        """It has arrived."""
        self.linked()
        while (output := self.loops[D0].consumer.poll_output()) is not None:
            if isinstance(output, Send):
                self.loops[P0].producer.handle_message(D0, output.message, 1.0)

    def linked(self) -> None:
        self.loops[P0].producer.handle_link(D0, PeerFacts((4,), 4))

    def expected(self) -> None:
        for rank in (P0, P1):
            self.loops[rank].producer.handle_command(Expect(T, 8), 1.0)
            self.see(Told(1.0, rank, Expect(T, 8, 2)))

    def computed(self) -> None:
        for rank in (P0, P1):
            self.see(Told(1.0, rank, advance([2, 3])))

    def posted(self, rank: PeerName = P0, to: PeerName = D0, handle: int = 1) -> None:
        self.see(Posted(1.0, rank, to, handle, (2, 3), (10, 11)))

    def done(
        self, rank: PeerName = P0, to: PeerName = D0, handle: int = 1, state: PostState = PostState.DONE
    ) -> None:
        self.see(PostEnded(1.0, rank, to, handle, state))

    def received(self) -> None:
        for rank in (D0, D1):
            self.see(Reported(1.0, rank, Received(T, C, 64)))

    def decoding(self, consumer: ConsumerId = C) -> None:
        self.see(DecodeStarted(1.0, CONSUMER, (D0, D1), consumer, 7, 8, ((10, 11),)))


def at(stage: str) -> World:
    """A world whose consumer stands at a stage."""
    world = World()
    world.announced()
    if stage == stages.HANDSHAKE:
        world.allocated()
        world.expected()
        world.computed()
        return world
    ways: dict[str, list[Callable[[], None]]] = {
        stages.QUEUED: [],
        stages.SENT: [world.allocated, world.told],
        stages.RECEIVED: [world.expected, world.registered],
        stages.POSTED: [world.computed, world.posted],
        stages.SOME_DONE: [world.done],
        stages.ALL_DONE: [lambda: world.posted(P1, D1), lambda: world.done(P1, D1)],
        stages.TOLD: [world.received],
        stages.DECODING: [world.decoding],
    }
    for reached, ways_there in ways.items():
        for step in ways_there:
            step()
        if reached == stage:
            return world
    raise AssertionError(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_course_goes_through_every_stage(stage: str) -> None:
    assert at(stage).stage() == stage


def test_what_has_failed_or_left_is_in_no_stage() -> None:
    failed, withdrawn, left = at(stages.POSTED), at(stages.QUEUED), at(stages.DECODING)
    failed.see(Reported(2.0, D0, ReceiveFailed(T, C, "post_failed", 0, fenced=True)))
    withdrawn.see(Told(2.0, D0, Withdraw(T, C, SOURCE, "aborted")))
    left.see(DecodeEnded(2.0, CONSUMER, C, preempted=False))
    assert (failed.stage(), withdrawn.stage(), left.stage()) == (None, None, None)
    assert failed.stage(OTHER) is None, "nobody knows it"


def test_a_request_that_computes_what_it_did_not_get_is_decoding() -> None:
    world = at(stages.POSTED)
    world.see(Reported(2.0, D0, ReceiveFailed(T, C, "post_failed", 0, fenced=True)))
    world.decoding()
    assert world.stage() == stages.DECODING


def test_everything_computed_but_lost_to_a_preemption_is_not_matched() -> None:
    world = at(stages.HANDSHAKE)
    world.see(Told(2.0, P0, preempt(1)))
    assert world.stage() == stages.QUEUED


def test_what_hits_a_transfer_counts_for_the_stage_of_each_of_its_consumers() -> None:
    world = at(stages.DECODING)
    world.announced(OTHER)
    world.see(FaultInjected(2.0, "replay", "", (T,)), FaultInjected(2.0, "of no interest", "", (T,)))
    world.see(FaultInjected(2.0, "replay", "", (TransferId("another"),)))
    assert world.grid.cells == {(stages.DECODING, grid.SAME_ID): 1, (stages.QUEUED, grid.SAME_ID): 1}


def test_aborts_are_told_apart_by_side() -> None:
    world = at(stages.POSTED)
    world.see(FaultInjected(2.0, "abort", "p", (T,)))
    assert world.grid.cells == {}, "the producer's ranks have not heard of it"
    world.see(FaultInjected(2.0, "abort", C, (T,)), Told(2.0, P0, Abandon(T, "abandoned: prefill aborted")))
    assert world.grid.cells == {(stages.POSTED, grid.D_ABORT): 1, (stages.POSTED, grid.P_ABORT): 1}


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (FabricFault(2.0, P0, D0, "refuse", (10,)), grid.POST_REFUSED),
        (FabricFault(2.0, P0, D0, "fail", (10,)), grid.RANK_ERROR),
        (FabricFault(2.0, P0, D0, "stall", (11,)), grid.STALLED),
        (FabricFault(2.0, D0, P0, "double", payload=b"for t and c"), grid.MESSAGE_DOUBLED),
        (FabricFault(2.0, P0, D0, "delay", payload=b"for t and c"), grid.MESSAGE_LATE),
        (PostEnded(2.0, P0, D0, 1, PostState.FAILED), grid.RANK_ERROR),
        (FaultInjected(2.0, "abort", C, (T,)), grid.D_ABORT),
    ],
)
def test_a_fault_counts_for_the_request_that_it_hits_and_not_for_its_sibling(
    event: Observed, fault: str
) -> None:
    world = at(stages.POSTED)
    world.announced(OTHER)
    world.see(event)
    assert world.grid.cells == {(stages.POSTED, fault): 1}


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (Told(2.0, P0, preempt(4)), grid.P_PREEMPTION),
        (Reported(2.0, P0, Released(T, "lease_expired: 30 s")), grid.LEASE_ENDS),
        (FaultInjected(2.0, "crash", "P, noticed after 0 s"), grid.P_CRASH),
        (FaultInjected(2.0, "crash", "D"), grid.D_CRASH),
    ],
)
def test_a_fault_of_a_whole_transfer_counts_for_every_request_of_it(event: Observed, fault: str) -> None:
    world = at(stages.POSTED)
    world.announced(OTHER)
    world.decoding(OTHER)
    world.see(event)
    assert world.grid.cells == {(stages.POSTED, fault): 1, (stages.DECODING, fault): 1}


@pytest.mark.parametrize(
    ("event", "fault", "hit"),
    [
        (FabricFault(2.0, P0, D0, "stall", (11,)), grid.STALLED, stages.POSTED),
        (PostEnded(2.0, P0, D0, 1, PostState.FAILED), grid.RANK_ERROR, stages.POSTED),
        (DecodeEnded(2.0, CONSUMER, OTHER, preempted=True), grid.D_PREEMPTION, stages.DECODING),
    ],
)
def test_cells_that_need_a_sibling_count_by_way_of_one(event: Observed, fault: str, hit: str) -> None:
    world = at(stages.POSTED)
    world.announced(OTHER)
    world.decoding(OTHER)
    world.see(event)
    other = stages.DECODING if hit == stages.POSTED else stages.POSTED
    assert world.grid.cells == {(hit, fault): 1, (other, fault): 1}
    assert (other, fault) in BY_SIBLING


def test_the_crash_of_one_consumers_engine_does_not_hit_another_engines() -> None:
    world = at(stages.POSTED)
    world.see(EngineStarted(2.0, EngineId("D2"), (PeerName("D2/1/tp0"),), 32))
    world.see(Told(2.0, PeerName("D2/1/tp0"), AnnounceCommand(T, OTHER, SOURCE)))
    world.see(FaultInjected(2.0, "crash", "D2"))
    assert set(world.grid.cells) == {(stages.QUEUED, grid.D_CRASH)}


@pytest.mark.parametrize(
    "event",
    [
        FabricFault(2.0, P0, D0, "refuse", (20,)),
        FabricFault(2.0, D0, P0, "double", payload=b"of \x00"),
        FabricFault(2.0, D0, D1, "double", payload=b"\xa1t\xa5hello"),
        PostEnded(2.0, P0, D0, 7, PostState.FAILED),
        Reported(2.0, P0, Released(T, "written")),
        DecodeEnded(2.0, CONSUMER, OTHER, preempted=True),
    ],
)
def test_what_hits_others_is_not_counted(event: Observed) -> None:
    world = at(stages.POSTED)
    world.see(event)
    assert not {fault for stage, fault in world.grid.cells if fault != grid.MESSAGE_DOUBLED}
    assert not world.grid.cells or isinstance(event, FabricFault)


def test_a_lost_message_counts_when_it_names_the_transfer_or_greets() -> None:
    world = at(stages.SENT)
    for number, payload in enumerate((b"names t, c", b"names t", b"of \x00", b"........\x88\xa1t\xa5hello")):
        world.see(MessageSent(2.0, D0, P0, number, payload), MessageEnded(2.0, D0, P0, number, arrived=False))
    world.see(MessageSent(2.0, D0, P0, 9, b"names t, c"), MessageEnded(2.0, D0, P0, 9, arrived=True))
    assert world.grid.cells == {(stages.SENT, grid.MESSAGE_LOST): 2}


def test_a_peer_that_comes_back_counts_on_either_side() -> None:
    world = at(stages.RECEIVED)
    world.crash(PRODUCER, P0, P1)
    world.see(EngineStarted(3.0, PRODUCER, (PeerName("P/2/tp0"), PeerName("P/2/tp1")), 32))
    assert world.grid.cells[stages.SENT, grid.PEER_BACK] == 1, "the registration has to be sent again"
    world = at(stages.RECEIVED)
    world.crash(CONSUMER, D0, D1)
    world.see(EngineStarted(3.0, CONSUMER, (PeerName("D/2/tp0"), PeerName("D/2/tp1")), 32))
    assert world.grid.cells[stages.RECEIVED, grid.PEER_BACK] == 1, "P holds what it held"


def test_the_prefill_runs_until_it_is_ended() -> None:
    for command in (Finish(T), Abandon(T, "aborted")):
        world = at(stages.RECEIVED)
        assert world.stages.hands[T].running
        world.see(Told(2.0, P0, command))
        assert not world.stages.hands[T].running


def test_the_grid_has_few_impossible_cells_each_with_its_reason() -> None:
    assert (len(STAGES), len(FAULTS)) == (9, 15)
    assert len(IMPOSSIBLE) <= 13
    listed = (*IMPOSSIBLE.items(), *BY_SIBLING.items())
    assert all(stage in STAGES and fault in FAULTS and why for (stage, fault), why in listed)
    assert not IMPOSSIBLE.keys() & BY_SIBLING.keys()


def test_blocks_of_facts_are_of_the_type_that_the_cores_use() -> None:
    """The fake world feeds real cores: what they were given must be what an agent gives."""
    world = at(stages.RECEIVED)
    (delivery,) = world.loops[P0].producer.state.rows[T].deliveries.values()
    assert delivery.target_blocks == (array("q", [10, 11]),)


def test_without_harmful_faults_only_preemptions_are_within_reach() -> None:
    preemptions = (grid.P_PREEMPTION, grid.D_PREEMPTION)
    assert grid.within_reach(frozenset()) == grid.within_reach(HARMLESS) == preemptions
    assert grid.within_reach(frozenset(KINDS)) == FAULTS
    assert grid.MESSAGE_DOUBLED not in grid.within_reach(frozenset({"crash"}))
    assert grid.P_CRASH in grid.within_reach(frozenset({"crash"}))
