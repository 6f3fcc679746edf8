"""After everything has ended: one more transfer from each producer to each consumer must work.

Whatever went wrong before, restarted, cut off or forgotten. The first try may find a link that broke before
the faults stopped; a second one has no excuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.ids import EngineId
from kvferry.simulator.ground.events import ItemBegan
from kvferry.simulator.ground.outcome import ITEMS_MAX, Violation
from kvferry.simulator.world.router import Dispatch
from kvferry.simulator.world.workload import Item
from kvferry.simulator.world.world import World

NUMBER_FIRST = ITEMS_MAX
TRIES = 2
PAUSE_SECONDS = 12.0
"""Before the second try: longer than it takes to find out that a peer is silent."""
TOKENS = 10
"""Of a probe's prompt: more than a block."""
PAIRS_MAX = 8


@dataclass(slots=True)
class _Probe:
    producer: EngineId
    consumer: EngineId
    tries: int = 0
    not_before: float = 0.0
    dispatch: Dispatch | None = None


@dataclass(slots=True)
class Probes:
    """The probes of one history, one after the other."""

    world: World
    violations: list[Violation] = field(default_factory=list)
    """What was found."""
    _waiting: list[_Probe] | None = None
    _sent: int = 0
    _running: _Probe | None = None
    seconds_max: float = field(init=False, default=0.0)
    """How much longer the history may take for one more probe."""

    def next(self) -> bool:
        """Judge the probe that has ended and send another; False when there is none left."""
        self.seconds_max = self.world.limits.lease_seconds + 60.0
        if self._waiting is None:
            self._waiting = self._pairs()
        self._judge()
        if not self._waiting:
            return False
        if self.world.now >= self._waiting[0].not_before:
            self._running = self._waiting.pop(0)
            self._send(self._running)
        return True

    def _pairs(self) -> list[_Probe]:
        engines = self.world.shape.engines
        pairs = [
            _Probe(producer.engine, consumer.engine)
            for producer in engines
            for consumer in engines
            if producer.produces
            and consumer.consumes
            and producer is not consumer
            and producer.cache.fits(consumer.cache)
        ]
        # In a wide world some pairs stand for all.
        return pairs[:: max(-(-len(pairs) // PAIRS_MAX), 1)]

    def _send(self, probe: _Probe) -> None:
        probe.tries += 1
        self._sent += 1
        prompt = self.world.contents.add(TOKENS)
        item = Item(
            number=NUMBER_FIRST + self._sent,
            at_seconds=self.world.now,
            producer=probe.producer,
            consumer=probe.consumer,
            prompt=prompt,
            decode_prompt=prompt,
            consumers=1,
            decode_tokens=2,
            stops=False,
            prefill_delay_seconds=0.0,
            decode_delay_seconds=(0.0,),
            leaves_after_seconds=None,
            leaves=(False, False),
            knows_incarnation=True,
            stale_incarnation=False,
            modes=("pull" if self._sent % 2 else "push",),
        )
        what = f"a last transfer from {probe.producer} to {probe.consumer} must work; it always happens"
        self.world.emit(ItemBegan(self.world.now, item.number, what))
        probe.dispatch = self.world.router.dispatch(item)

    def _judge(self) -> None:
        probe, self._running = self._running, None
        if probe is None or probe.dispatch is None or self._waiting is None:
            return
        outcomes = [
            self.world.outcome_of.get(leg.request)
            for leg in (*probe.dispatch.prefills, *probe.dispatch.decodes)
        ]
        if outcomes == ["completed", "completed"]:
            return
        if probe.tries < TRIES:
            probe.not_before = self.world.now + PAUSE_SECONDS
            self._waiting.insert(0, probe)
            return
        self.violations.append(
            Violation(
                6,
                self.world.now,
                f"after everything had ended, a transfer from {probe.producer} to {probe.consumer} still "
                f"fails: {outcomes}",
            )
        )
