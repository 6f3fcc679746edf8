"""Two producer ranks, two consumer engines, and everything that may happen between them, in any order.

Goal: the promises of the protocol hold whatever the hosts ask for and the network does, and once faults stop
everything ends. Method: hypothesis drives a `Pair` whose wires are all held, so that each message is
delivered, lost, doubled or overtaken by a rule of its own; the pair checks the promises at each post,
landing and result; the teardown heals the network and waits.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.ids import TransferId
from kvferry.protocol.limits import Limits
from kvferry.protocol.reasons import CODES
from tests.support.pair import Pair

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
PRODUCERS = ("p0", "p1")
consumers = st.sampled_from(CONSUMERS)
producers = st.sampled_from(PRODUCERS)
picks = st.integers(0, 7)
rarely = st.integers(0, 5).map(lambda number: number == 5)


class Protocol(RuleBasedStateMachine):
    """The rules are what hosts may ask for, and what networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(
            producers=2,
            consumers=2,
            limits=LIMITS,
            retry_bound_seconds=RETRY_BOUND_SECONDS,
            blocks=160,
            bounded=True,
        )
        self.wires = list(self.pair.wires)
        self.count = 0
        self.expected: dict[str, int] = {}
        """Transfers whose prefill leg has not arrived, with their prompt's tokens."""
        self.coming: list[tuple[str, str, str]] = []
        """(consumer, transfer, request) whose host has asked for nothing, or has only announced it."""
        self.announced: set[tuple[str, str, str]] = set()
        self.waiting: list[tuple[str, str, str]] = []

    @initialize(holds=st.booleans())
    def start(self, holds: bool) -> None:
        self.pair.resolve_held = holds
        self.pair.held = set(self.wires) if holds else set()

    @precondition(lambda self: self.count < TRANSFERS_MAX)
    @rule(
        tokens=st.integers(1, 30),
        at=st.lists(consumers, min_size=1, max_size=2),
        kv_first=st.booleans(),
        start=st.integers(0, 3),
    )
    def dispatch(self, tokens: int, at: list[str], kv_first: bool, start: int) -> None:
        """A router sends both legs; `n` children at one or two decode engines. One leg arrives at once."""
        transfer = f"t{self.count}"
        self.count += 1
        self.expected[transfer] = tokens
        names = [(name, transfer, f"c{index}") for index, name in enumerate(at)]
        self.coming += names
        if kv_first:
            self.expect(len(self.expected) - 1, len(at))
        else:
            self.receive(len(self.coming) - 1, start, False)

    # --- the producer engine -----------------------------------------------------------------------

    @precondition(lambda self: self.expected)
    @rule(pick=picks, count=st.integers(1, 2))
    def expect(self, pick: int, count: int) -> None:
        transfer = list(self.expected)[pick % len(self.expected)]
        self.pair.expect(transfer, self.expected.pop(transfer), count)

    def _running(self) -> list[TransferId]:
        return [transfer for transfer, prefill in self.pair.prefills.items() if not prefill.ended]

    @precondition(lambda self: self._running())
    @rule(pick=picks, tokens=st.integers(1, 30))
    def compute(self, pick: int, tokens: int) -> None:
        running = self._running()
        transfer = running[pick % len(running)]
        prefill = self.pair.prefills[transfer]
        if prefill.frontier < prefill.tokens:
            self.pair.compute(transfer, min(prefill.frontier + tokens, prefill.tokens))

    @precondition(lambda self: self._running())
    @rule(pick=picks, early=rarely)
    def finish(self, pick: int, early: bool) -> None:
        running = self._running()
        transfer = running[pick % len(running)]
        prefill = self.pair.prefills[transfer]
        if prefill.frontier < prefill.tokens and not early:
            self.pair.compute(transfer, prefill.tokens)
        self.pair.finish(transfer)

    @precondition(lambda self: self._running())
    @rule(pick=picks)
    def abandon(self, pick: int) -> None:
        running = self._running()
        self.pair.abandon(running[pick % len(running)])

    @precondition(lambda self: self._running() and self.pair.pool.free_count > 40)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        running = self._running()
        self.pair.preempt(running[pick % len(running)])

    # --- the consumer engines ----------------------------------------------------------------------

    @precondition(lambda self: self.coming)
    @rule(pick=picks)
    def announce(self, pick: int) -> None:
        name = self.coming[pick % len(self.coming)]
        if name not in self.announced:
            self.announced.add(name)
            self.pair.announce(name[1], name[2], name[0])

    @precondition(lambda self: self.coming)
    @rule(pick=picks, start=st.integers(0, 3), longer=rarely)
    def receive(self, pick: int, start: int, longer: bool) -> None:
        at, transfer, child = name = self.coming.pop(pick % len(self.coming))
        prefill = self.pair.prefills.get(TransferId(transfer))
        tokens = self.expected[transfer] if prefill is None else prefill.tokens
        self.announced.discard(name)
        self.waiting.append(name)
        self.pair.receive(transfer, tokens + longer, min(4 * start, tokens - tokens % 4), child, at)

    @precondition(lambda self: self.coming or self.waiting)
    @rule(pick=picks, early=st.booleans())
    def withdraw(self, pick: int, early: bool) -> None:
        names = self.coming if self.coming and (early or not self.waiting) else self.waiting
        at, transfer, child = name = names.pop(pick % len(names))
        self.announced.discard(name)
        self.pair.withdraw(transfer, child, at)

    @precondition(lambda self: self.pair.resolves)
    @rule(fails=rarely)
    def resolve(self, fails: bool) -> None:
        if fails:
            self.pair.unresolve("directory does not answer")
        else:
            self.pair.resolve()

    # --- the network -------------------------------------------------------------------------------

    @rule(pick=picks, hold=st.booleans())
    def hold(self, pick: int, hold: bool) -> None:
        """From now on a wire's messages wait for rules, or no longer."""
        wire = self.wires[pick]
        if hold:
            self.pair.held.add(wire)
        else:
            self.pair.held.discard(wire)
            self.pair.run()

    @precondition(lambda self: any(self.pair.wires.values()))
    @rule(
        wire=picks, at=st.sampled_from((0, 0, 0, 1, 2)), fate=st.sampled_from(("", "", "", "lost", "doubled"))
    )
    def message(self, wire: int, at: int, fate: str) -> None:
        """One message arrives, perhaps before older ones, or is lost or doubled."""
        waiting = [wire for wire, letters in self.pair.wires.items() if letters]
        chosen = waiting[wire % len(waiting)]
        at = min(at, len(self.pair.wires[chosen]) - 1)
        if fate == "lost":
            self.pair.drop(chosen, at)
        elif fate == "doubled":
            self.pair.double(chosen, at)
        else:
            self.pair.deliver(chosen, at)

    @rule()
    def all_messages(self) -> None:
        """The network works for a moment."""
        self._calm()

    @precondition(lambda self: self.pair.flights)
    @rule(pick=picks, fate=st.sampled_from(("", "", "", "refused", "failed")))
    def slice_ends(self, pick: int, fate: str) -> None:
        keys = list(self.pair.flights)
        self.pair.end_slice(keys[pick % len(keys)], fate or None, retry=fate == "refused")
        self.pair.run()

    @rule()
    def all_slices(self) -> None:
        """Everything in flight lands, and what follows it."""
        self.pair.complete_all()

    @rule(producer=producers, consumer=consumers, happens=rarely)
    def lose(self, producer: str, consumer: str, happens: bool) -> None:
        if happens:
            self.pair.lose(producer, consumer)

    @rule(seconds=st.sampled_from((0.01, 0.2, 1.0, 2.0, 3.5, 9.0)))
    def pass_time(self, seconds: float) -> None:
        self.pair.advance(seconds)

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

    def _calm(self) -> None:
        held, self.pair.held = self.pair.held, set()
        self.pair.run()
        self.pair.held = held

    def teardown(self) -> None:
        """Liveness: faults stop, hosts end what they have begun, and everything ends within the bound."""
        pair = self.pair
        pair.held, pair.resolve_held = set(), False
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
        for prefill in pair.prefills.values():
            assert set(prefill.outcomes) == set(pair.producers), "promise 6: each rank has released it"
        for decode in pair.decodes.values():
            assert decode.result is not None, "promise 6: each reception has ended"
            assert decode.safe
        assert set(pair.drained) == set(pair.tickets), "each preemption was answered"
        pair.advance(LIMITS.tombstone_seconds)
        for core in pair.producers.values():
            assert not core.state.tombstones
            assert core.next_due() is None


Protocol.TestCase.settings = settings(max_examples=80, stateful_step_count=60)
TestProtocol = Protocol.TestCase
