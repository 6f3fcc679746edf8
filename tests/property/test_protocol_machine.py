"""One or two producer ranks, two consumer engines, push and pull, and all that may happen, in any order.

Goal: the promises of the protocol hold whatever the hosts ask for and the network does, and once faults stop
everything ends. Method: hypothesis drives a `Pair`; a wire that is held has each message delivered, lost,
doubled or overtaken by a step of its own, however late. Connections break with both ends or only the
consumer's noticing, the producer engine may die, and requests come again under the same ids. The pair checks
the promises at each post, landing and result; the teardown heals the network and waits.

One rule takes both what goes well and one thing that goes wrong: hypothesis leaves out some rules in each
run, and a run in which nothing is computed proves nothing.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.handoff import TransferMode
from kvferry.ids import PeerName, TransferId
from kvferry.protocol.limits import Limits
from kvferry.protocol.reasons import CODES
from tests.support.pair import Pair

pytestmark = pytest.mark.timeout(120)  # Seconds of work, but a laden machine takes its time.

LIMITS = Limits(
    lease_seconds=8,
    renew_seconds=1,
    write_seconds=4,
    silence_seconds=4,
    unknown_seconds=6,
    slice_seconds=10,
    retry_seconds=0.1,
    retries_max=2,
    tombstone_seconds=30,
    in_flight_per_peer=3,
)
RETRY_BOUND_SECONDS = 3.0
BOUND_SECONDS = LIMITS.unknown_seconds + LIMITS.lease_seconds + LIMITS.write_seconds + 4 * RETRY_BOUND_SECONDS
"""Once faults have stopped, everything has ended by then."""

TRANSFERS_MAX = 8
CONSUMERS = ("d0", "d1")
LIFE = ("dispatch", "compute", "compute", "finish", "expect", "receive", "messages", "slice", "slice", "time")
FAULTS = (
    *("finish_early", "abandon", "preempt", "preempt", "announce", "ask_too_much", "withdraw", "withdraw"),
    *("hold", "hold", "lost", "doubled", "overtaken", "refused", "failed", "unresolve", "wait"),
    *("lose", "break_link", "break_link", "answer", "again", "kill", "take_back"),
)
Request = tuple[str, str, str]
"""Consumer engine, transfer, the engine's id of the request."""
life = st.lists(st.tuples(st.sampled_from(LIFE), st.integers(0, 31)), max_size=4)


class Protocol(RuleBasedStateMachine):
    """The steps are what hosts may ask for, and what networks do."""

    def __init__(self) -> None:
        super().__init__()
        self._make_pair(1)
        self.faults: frozenset[str] = frozenset()
        self.dispatched = 0
        self.expected: dict[str, tuple[int, int]] = {}
        """Transfers whose prefill leg has not arrived, with their prompt's tokens and consumers."""
        self.coming: list[Request] = []
        """Requests whose host has asked for nothing, or has only announced them."""
        self.announced: set[Request] = set()
        self.waiting: list[Request] = []

    def _make_pair(self, producers: int) -> None:
        self.pair = Pair(
            producers=producers,
            consumers=2,
            limits=LIMITS,
            retry_bound_seconds=RETRY_BOUND_SECONDS,
            blocks=160,
            bounded=True,
        )
        self.wires = list(self.pair.wires)
        self.producers = list(self.pair.producers)

    @initialize(
        producers=st.integers(1, 2),
        faults=st.frozensets(st.sampled_from(FAULTS), min_size=1),
        holds=st.booleans(),
    )
    def start(self, producers: int, faults: frozenset[str], holds: bool) -> None:
        self._make_pair(producers)
        self.faults = faults
        self.pair.resolve_held = self.pair.inquire_held = holds
        self.pair.held = set(self.wires) if holds else set()

    @rule(well=life, fault=st.sampled_from(FAULTS), number=st.integers(0, 31))
    def step(self, well: list[tuple[str, int]], fault: str, number: int) -> None:
        for what, pick in well:
            getattr(self, f"_{what}")(pick)
        if fault in self.faults:
            getattr(self, f"_{fault}")(number)

    # --- the producer engine -----------------------------------------------------------------------

    def _dispatch(self, pick: int) -> None:
        """A router sends both legs; `n` children at one or two decode engines. One leg arrives at once."""
        if self.dispatched >= TRANSFERS_MAX:
            return
        transfer = f"t{self.dispatched}"
        self.dispatched += 1
        self._send_legs(transfer, pick)

    def _again(self, pick: int) -> None:
        """A client asks again with the ids of a request that has ended everywhere."""
        open_ids = {name[1] for name in self.coming} | set(self.expected)
        open_ids |= {name[1] for name, decode in self.pair.decodes.items() if not decode.safe}
        ended = [
            transfer
            for transfer, prefill in self.pair.prefills.items()
            if len(prefill.outcomes) == len(self.producers) and transfer not in open_ids
        ]
        if ended and not self.pair.dead:
            transfer = ended[pick // 4 % len(ended)]
            self.waiting = [name for name in self.waiting if name[1] != transfer]
            self._send_legs(transfer, pick)

    def _send_legs(self, transfer: str, pick: int) -> None:
        at = (("d0",), ("d1",), ("d0", "d1"), ("d1", "d1"))[pick % 4]
        self.expected[transfer] = (pick + 1, len(at))
        self.coming += [(name, transfer, f"c{index}") for index, name in enumerate(at)]
        if pick % 3:
            self._expect(len(self.expected) - 1)
        else:
            self._receive(len(self.coming) - 1)

    def _expect(self, pick: int) -> None:
        if self.expected and not self.pair.dead:
            transfer = list(self.expected)[pick % len(self.expected)]
            self.pair.expect(transfer, *self.expected.pop(transfer))

    def _running(self, pick: int) -> TransferId | None:
        running = [transfer for transfer, prefill in self.pair.prefills.items() if not prefill.ended]
        return running[pick % len(running)] if running and not self.pair.dead else None

    def _compute(self, pick: int) -> None:
        transfer = self._running(pick)
        if transfer is not None:
            prefill = self.pair.prefills[transfer]
            self.pair.compute(transfer, min(prefill.frontier + 3 + pick // 2, prefill.tokens))

    def _finish(self, pick: int) -> None:
        transfer = self._running(pick)
        if transfer is not None:
            self.pair.compute(transfer, self.pair.prefills[transfer].tokens)
            self.pair.finish(transfer)

    def _finish_early(self, pick: int) -> None:
        if (transfer := self._running(pick)) is not None:
            self.pair.finish(transfer)

    def _abandon(self, pick: int) -> None:
        if (transfer := self._running(pick)) is not None:
            self.pair.abandon(transfer)

    def _preempt(self, pick: int) -> None:
        transfer = self._running(pick)
        if transfer is not None and self.pair.pool.free_count > 80:
            self.pair.preempt(transfer)

    def _take_back(self, pick: int) -> None:
        """The engine wants blocks that it holds for consumers, or takes them."""
        held = [
            transfer
            for transfer, prefill in self.pair.prefills.items()
            if prefill.ended and prefill.running and prefill.blocks
        ]
        if held and not self.pair.dead and self.pair.pool.free_count > 80:
            take = self.pair.preempt if pick % 2 else self.pair.reclaim
            take(held[pick // 2 % len(held)])

    # --- the consumer engines ----------------------------------------------------------------------

    def _announce(self, pick: int) -> None:
        names = [name for name in self.coming if name not in self.announced]
        if names:
            at, transfer, child = name = names[pick % len(names)]
            self.announced.add(name)
            self.pair.announce(transfer, child, at)

    def _receive(self, pick: int, more: int = 0) -> None:
        if not self.coming:
            return
        at, transfer, child = name = self.coming.pop(pick % len(self.coming))
        coming = self.expected.get(transfer)
        tokens = self.pair.prefills[TransferId(transfer)].tokens if coming is None else coming[0]
        self.announced.discard(name)
        self.waiting.append(name)
        start = 4 * (pick // 4) if pick % 4 == 3 else 0
        mode: TransferMode = "pull" if pick % 8 in (1, 3, 6) else "push"
        self.pair.receive(transfer, tokens + more, min(start, tokens - tokens % 4), child, at, mode)

    def _ask_too_much(self, pick: int) -> None:
        self._receive(pick, more=1)

    def _withdraw(self, pick: int) -> None:
        names = self.coming if self.coming and (pick % 3 == 0 or not self.waiting) else self.waiting
        if names:
            at, transfer, child = name = names.pop(pick % len(names))
            self.announced.discard(name)
            self.pair.withdraw(transfer, child, at)

    # --- the network -------------------------------------------------------------------------------

    def _messages(self, pick: int) -> None:
        """The oldest message of a wire arrives, or the network works for a moment."""
        if pick % 2 and (wire := self._waiting_wire(pick // 2)) is not None:
            self.pair.deliver(wire)
            return
        held, self.pair.held = self.pair.held, set()
        self.pair.run()
        while self.pair.resolves:
            self.pair.resolve()
        while self.pair.inquiries:
            self.pair.inquire()
        self.pair.held = held

    def _waiting_wire(self, pick: int) -> tuple[PeerName, PeerName] | None:
        wires = [wire for wire, letters in self.pair.wires.items() if letters]
        return wires[pick % len(wires)] if wires else None

    def _hold(self, pick: int) -> None:
        """From now on a wire's messages wait, or no longer."""
        self.pair.held ^= {self.wires[pick % len(self.wires)]}
        self.pair.run()

    def _lost(self, pick: int) -> None:
        if (wire := self._waiting_wire(pick)) is not None:
            self.pair.drop(wire, pick % len(self.pair.wires[wire]))

    def _doubled(self, pick: int) -> None:
        if (wire := self._waiting_wire(pick)) is not None:
            self.pair.double(wire, pick % len(self.pair.wires[wire]))

    def _overtaken(self, pick: int) -> None:
        if (wire := self._waiting_wire(pick)) is not None:
            self.pair.deliver(wire, len(self.pair.wires[wire]) - 1)

    def _slice(self, pick: int) -> None:
        self._end_slice(pick, None)

    def _refused(self, pick: int) -> None:
        self._end_slice(pick, "busy")

    def _failed(self, pick: int) -> None:
        self._end_slice(pick, "post refused")

    def _end_slice(self, pick: int, failure: str | None) -> None:
        if self.pair.flights:
            keys = list(self.pair.flights)
            self.pair.end_slice(keys[pick % len(keys)], failure, retry=failure == "busy")
            self.pair.run()

    def _lose(self, pick: int) -> None:
        self.pair.lose(self.producers[pick % len(self.producers)], CONSUMERS[pick // 2 % 2])

    def _break_link(self, pick: int) -> None:
        self.pair.break_link(self.producers[pick % len(self.producers)], CONSUMERS[pick // 2 % 2])

    def _answer(self, pick: int) -> None:
        if self.pair.inquiries:
            self.pair.inquire(evidence=pick % 2 > 0)

    def _kill(self, pick: int) -> None:
        if pick % 8 == 7 and not self.pair.dead:
            self.pair.kill()

    def _unresolve(self, pick: int) -> None:
        if self.pair.resolves:
            self.pair.unresolve("directory does not answer")

    def _time(self, pick: int) -> None:
        self.pair.advance((0.01, 0.1, 0.3, 1.0)[pick % 4])

    def _wait(self, pick: int) -> None:
        self.pair.advance((1.0, 2.5, 4.0, 9.0)[pick % 4])

    # --- what must hold ----------------------------------------------------------------------------

    @invariant()
    def cores_are_consistent(self) -> None:
        for core in (*self.pair.producers.values(), *self.pair.consumers.values()):
            core.check_invariants()

    @invariant()
    def results_match_what_was_asked(self) -> None:
        for prefill in self.pair.prefills.values():
            assert not prefill.outcomes or prefill.ended
            assert all(reason.partition(":")[0] in CODES for reason in prefill.outcomes.values())

    def teardown(self) -> None:
        """Liveness: faults stop, hosts end what they have begun, and everything ends within the bound."""
        pair = self.pair
        pair.held, pair.resolve_held, pair.inquire_held = set(), False, False
        for transfer, prefill in pair.prefills.items():
            if not prefill.ended:
                pair.abandon(transfer)
        for at, transfer, child in sorted(self.announced):
            pair.withdraw(transfer, child, at)
        pair.complete_all()
        until = pair.now + BOUND_SECONDS
        while pair.now < until:
            pair.advance(0.5)
            pair.complete_all()
        pair.assert_clean()
        for decode in pair.decodes.values():
            assert decode.result is not None, "promise 6: each reception has ended"
            assert decode.safe
        if pair.dead:
            return
        for prefill in pair.prefills.values():
            assert set(prefill.outcomes) == set(pair.producers), "promise 6: each rank has released it"
        assert set(pair.drained) == set(pair.tickets), "each preemption was answered"
        pair.advance(LIMITS.tombstone_seconds)
        for core in pair.producers.values():
            assert not core.state.tombstones
            assert core.next_due() is None


Protocol.TestCase.settings = settings(stateful_step_count=40)
TestProtocol = Protocol.TestCase
