"""What an engine keeps of requests that it has decoded, and what it receives of what others keep."""

from __future__ import annotations

from random import Random

from kvferry.handoff import DecodeParams, SourceParams
from kvferry.host.events import Ended
from kvferry.host.facts import EngineFacts as HostFacts
from kvferry.host.histories import wanted_history
from kvferry.host.holding import NO_ROOM, Holding, HoldLimits
from kvferry.host.pins import Pins
from kvferry.host.wanted import Wanted
from kvferry.ids import ConsumerId, Incarnation, TransferId
from kvferry.simulator.engine.facts import EngineFacts
from kvferry.simulator.engine.requests import Request
from kvferry.simulator.ground.clock import ProcessClock
from kvferry.simulator.ground.events import LegSent, RequestEnded
from kvferry.simulator.ground.ground import Ground

_OUTCOMES = {"used": "completed", "unused": "cancelled"}
"""As the world calls them; every other end of what is kept is a failure."""


class Turns:
    """The production host's `Holding`, told to the world as what it is: transfers.

    What is kept is a prefill request's part in one, what is received of it a decode request's.
    """

    def __init__(
        self,
        ground: Ground,
        facts: EngineFacts,
        known: HostFacts,
        pins: Pins,
        clock: ProcessClock,
        incarnation: Incarnation,
    ) -> None:
        self._ground, self._facts, self._known = ground, facts, known
        self._keeps = facts.hold_seconds > 0
        self._source = SourceParams(
            engine=facts.engine,
            host=facts.host,
            port=facts.port,
            tp=facts.cache.tp_size,
            pp=facts.cache.pp_size,
            incarnation=incarnation,
        )
        self._kept: dict[str, TransferId] = {}
        self._ending = ""
        random = Random(f"{ground.seed} {incarnation}")
        limits = HoldLimits(
            max(facts.hold_seconds, 1.0), int(facts.cache.block_count * facts.held_blocks_share), 1
        )
        self.holding = Holding(known, pins, self, limits, clock, lambda: f"h{random.getrandbits(62):016x}")

    def arrived(self, request: Request, params: DecodeParams) -> None:
        """A decode request has come."""
        if self._keeps:
            self.holding.note(request, params)

    def wanted(self, request: Request) -> Wanted | None:
        """What a prefill request shall receive of its history; None for one that has none."""
        if not self._keeps or request.history is None:
            return None
        return wanted_history(request, request.history, request.params.mode or "push", self._known)

    def ended(self, request: Request) -> None:
        """A request has ended, and still has its blocks."""
        if not self._keeps:
            return
        request.kept = self.holding.finish(request, request.blocks[0], self._source)
        if request.kept is not None:
            name, transfer = self.holding.newest, request.kept.transfer
            self._kept[name] = transfer
            self._ground.emit(LegSent(self._ground.now, self._facts.engine, name, transfer, None))

    def rank_ended(self, event: Ended) -> None:
        """A rank has let go of what is kept."""
        self._ending = event.request
        self.holding.rank_ended(event)

    def received(self, request: Request, outcome: str) -> None:
        """A prefill request has got its history, or does without."""
        assert request.history is not None, "only who has one gets it"
        transfer, whom = request.history.transfer, ConsumerId(request.name)
        self._ground.emit(
            RequestEnded(self._ground.now, self._facts.engine, request.name, transfer, whom, outcome)
        )

    # --- the counters of `Holding` -------------------------------------------------------------------

    def count(self, name: str, amount: int = 1, labels: tuple[str, ...] = ()) -> None:
        """What is kept has ended."""
        if labels == (NO_ROOM,):
            return
        transfer, outcome = self._kept.pop(self._ending), _OUTCOMES.get(labels[0], "failed")
        self._ground.emit(
            RequestEnded(self._ground.now, self._facts.engine, self._ending, transfer, None, outcome)
        )

    def observe(self, name: str, value: float) -> None:
        """Times are nobody's business here."""
