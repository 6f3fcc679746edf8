"""What can be made to go wrong in a world, by name. Each says whether it applied; none fails.

Random faults and directed ones pull the same levers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.simulator.engine.engine import Engine
from kvferry.simulator.ground.events import FaultInjected
from kvferry.simulator.world.inspection import Inspection
from kvferry.simulator.world.world import World
from kvferry.transport.memory import MessageFault, PostFault


@dataclass(frozen=True, slots=True)
class Levers:
    """The levers of one world. Everything that lasts ends with the safety phase at the latest."""

    world: World
    inspection: Inspection

    # --- requests ------------------------------------------------------------------------------------

    def abort(self, request: str) -> bool:
        """The client of one leg leaves."""
        leg = self.world.router.leg(request)
        # The engine tells when it takes notice.
        return leg is not None and leg.engine.alive and leg.engine.abort(request)

    def abort_decode(self, transfer: TransferId, consumer: ConsumerId) -> bool:
        """The client of a decode leg leaves."""
        return self.abort(consumer)

    def abort_prefill(self, transfer: TransferId) -> bool:
        """The client of a prefill leg leaves; of the newest, when it was replayed."""
        return any(self.abort(name) for name in reversed(self.inspection.prefills_of(transfer)))

    def preempt(self, request: str) -> bool:
        """Preempt a running request in the next plan of its engine."""
        leg = self.world.router.leg(request)
        if leg is None or not leg.engine.alive or not leg.engine.preempt(request):
            return False
        # What happens follows in the next plan.
        self.tell("preempt", request, self._transfer_of(request))
        return True

    def preempt_prefill(self, transfer: TransferId) -> bool:
        """Preempt a prefill leg."""
        return any(self.preempt(name) for name in reversed(self.inspection.prefills_of(transfer)))

    def preempt_decode(self, transfer: TransferId, consumer: ConsumerId) -> bool:
        """Preempt a decode leg."""
        return self.preempt(consumer)

    def replay(self, transfer: TransferId) -> bool:
        """The router sends the legs again under the same id."""
        dispatch = self.world.router.dispatches.get(transfer)
        if dispatch is None or dispatch.cancelled:
            return False
        self.tell("replay", transfer, transfer)
        self.world.router.replay(dispatch)
        return True

    def replay_soon(self, transfer: TransferId) -> bool:
        """The same at once and to the same engines, even where the client has gone."""
        dispatch = self.world.router.dispatches.get(transfer)
        return dispatch is not None and self.world.router.replay_soon(dispatch)

    # --- engines -------------------------------------------------------------------------------------

    def crash(
        self, engine: EngineId, noticed_after_seconds: float = 0.0, ranks_linger_seconds: float = 0.0
    ) -> bool:
        """Every process of an engine dies; its peers cannot know for a while.

        The ranks' processes may live a little longer than the core and its directory: they learn of its end.
        """
        life = self.world.engines.get(engine)
        if life is None:
            return False
        what = f"{engine}, noticed after {noticed_after_seconds:g} s, ranks linger {ranks_linger_seconds:g} s"
        self.tell("crash", what)
        self.world.engines[engine] = None
        life.crash_core()
        if ranks_linger_seconds:
            self.world.later(ranks_linger_seconds, partial(life.crash, noticed_after_seconds))
        else:
            life.crash(noticed_after_seconds)
        self.world.router.engine_crashed(life)
        return True

    def restart(self, engine: EngineId, after_seconds: float = 0.0) -> bool:
        """Start an engine again, same id and address, unless it lives by then."""
        if engine not in self.world.engines:
            return False
        self.world.later(after_seconds, partial(self._start, engine))
        return True

    def _start(self, engine: EngineId) -> None:
        if self.world.engines[engine] is None:
            self.tell("restart", engine)
            self.world.start(engine)

    def stall_agent(self, rank: PeerName, seconds: float) -> bool:
        """A rank's agent thread does not run for so long."""
        process = self.world.network.process(rank)
        if not process.alive:
            return False
        self.tell("stall_agent", f"{rank} for {seconds:.3f} s")
        process.stall(self._capped(seconds))
        return True

    def stall_engine(self, engine: EngineId, seconds: float, *, rank: int | None = None) -> bool:
        """The engine core does nothing for so long, or the main thread of one rank begins no step."""
        life = self.world.engines.get(engine)
        if life is None:
            return False
        self.tell("stall_engine", f"{engine} {'core' if rank is None else rank} for {seconds:.3f} s")
        _stall(life, self._capped(seconds), rank)
        return True

    # --- network -------------------------------------------------------------------------------------

    def cut(self, source: EngineId, target: EngineId, seconds: float | None = None) -> bool:
        """Nothing gets from one engine to another, for so long or until the safety phase ends."""
        self.tell("partition", f"{source} to {target} for {seconds} s")
        self.world.network.cut(source, target)
        if seconds is not None:
            self.world.later(seconds, partial(self.world.network.heal, source, target))
        return True

    def break_connection(self, source: PeerName, target: PeerName) -> bool:
        """One rank's connection to another dies although both live."""
        if not self.world.network.fabric.break_connection(source, target):
            return False
        self.tell("connection", f"{source} to {target}")
        return True

    def message_fault(self, source: PeerName, target: PeerName, fault: MessageFault, count: int = 1) -> bool:
        """The next messages from one rank to another are lost, doubled or late."""
        self.tell(f"message_{_MESSAGE[fault]}", f"{count} from {source} to {target}")
        self.world.network.fabric.inject(source, target, *[fault] * count)
        return True

    def post_fault(self, source: PeerName, target: PeerName, fault: PostFault, count: int = 1) -> bool:
        """The next writes from one rank to another are refused, broken, stalled or late."""
        self.tell(f"post_{_POST[fault]}", f"{count} from {source} to {target}")
        self.world.network.fabric.inject(source, target, *[fault] * count)
        return True

    def _capped(self, seconds: float) -> float:
        """Not beyond the end of the safety phase, where it has not ended."""
        return seconds if self.world.healed_at is None else 0.0

    def tell(self, kind: str, what: str, *transfers: TransferId | None) -> None:
        """Let observers know."""
        known = tuple(transfer for transfer in transfers if transfer is not None)
        self.world.emit(FaultInjected(self.world.now, kind, what, known))

    def _transfer_of(self, request: str) -> TransferId | None:
        found = self.inspection.request(request)
        return None if found is None else found.transfer


def _stall(life: Engine, seconds: float, rank: int | None) -> None:
    if rank is None:
        life.core.stall(seconds)
    else:
        worker = life.core.workers[rank]
        worker.stalled_until = max(worker.stalled_until, life.ground.now + seconds)


_MESSAGE = {MessageFault.LOSE: "lost", MessageFault.DOUBLE: "doubled", MessageFault.DELAY: "late"}
_POST = {
    PostFault.REFUSE: "refused",
    PostFault.BREAK: "broken",
    PostFault.STALL: "stalled",
    PostFault.FAIL: "failed",
    PostFault.DELAY: "late",
}
