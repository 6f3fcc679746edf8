"""The router and its clients: what is sent, and what is done about legs that fail.

A dispatch is one try of an item under one transfer id; a retry mints another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from kvferry.handoff import DecodeParams, HeldParams, PrefillParams, SourceParams
from kvferry.ids import ConsumerId, EngineId, Incarnation, TransferId
from kvferry.simulator.engine.engine import Engine
from kvferry.simulator.engine.requests import Request
from kvferry.simulator.ground.events import FaultInjected, LegSent
from kvferry.simulator.ground.ground import Ground
from kvferry.simulator.world.conversations import Conversations
from kvferry.simulator.world.fleet import Fleet
from kvferry.simulator.world.workload import Item

RETRIES_MAX = 2
SAME_NAME_SHARE = 0.7
"""So often a replayed leg has the name of an earlier one, where that has ended in the same engine life.

An engine that takes the router's request ids for its own sees the same id again then.
"""


@dataclass(slots=True, eq=False)
class Leg:
    """One request of a dispatch at one life of an engine."""

    request: str
    engine: Engine
    index: int | None
    """Which consumer's; None for a prefill leg."""
    ended: bool = False
    normal: bool = False


@dataclass(slots=True, eq=False)
class Dispatch:
    """One try of an item."""

    item: Item
    attempt: int
    transfer: TransferId
    source: SourceParams
    cancelled: bool = False
    prefills: list[Leg] = field(default_factory=list)
    decodes: list[Leg] = field(default_factory=list)
    history: HeldParams | None = None
    """What the consumer of the turn before keeps."""
    legs_due: int = 0
    """Legs that are still to be sent."""
    replays: int = 0


@dataclass(frozen=True, slots=True)
class _Sending:
    """A leg that is about to be sent."""

    dispatch: Dispatch
    index: int | None
    target: EngineId
    again: bool = False
    """It belongs to a replay."""
    same_name: bool = False


@dataclass(slots=True, eq=False)
class Router:
    """All dispatches of a history."""

    ground: Ground
    fleet: Fleet
    dispatches: dict[TransferId, Dispatch] = field(default_factory=dict)
    _legs: dict[str, tuple[Dispatch, Leg]] = field(default_factory=dict)
    _sent: int = 0
    plots: list[Callable[[Dispatch], None]] = field(default_factory=list)
    """Who waits for a new dispatch whose consumers are written; each gets one."""
    reading_plots: list[Callable[[Dispatch], None]] = field(default_factory=list)
    """Who waits for one of which a consumer reads itself."""
    served: int = 0
    """Decode requests that ran to their end."""
    conversations: Conversations | None = None
    """Who goes on where an answer has ended."""

    def dispatch(self, item: Item, attempt: int = 0, history: HeldParams | None = None) -> Dispatch:
        """Send both legs under a new id."""
        random = Random(self.ground.seed * 8191 + item.number * 16 + attempt)
        transfer = TransferId(f"t{item.number:03d}-{attempt}-{random.getrandbits(32):08x}")
        dispatch = Dispatch(item, attempt, transfer, self._source(item, random), history=history)
        self.dispatches[transfer] = dispatch
        self._plan(_Sending(dispatch, None, item.producer), item.prefill_delay_seconds)
        for index, delay in enumerate(item.decode_delay_seconds):
            self._plan(_Sending(dispatch, index, item.consumer), delay)
        if item.leaves_after_seconds is not None and attempt == 0:
            self.ground.later(item.leaves_after_seconds, partial(self.leave, dispatch))
        plots = self.plots if item.is_pushed else self.reading_plots
        if plots:
            plots.pop(0)(dispatch)
        return dispatch

    def replay(self, dispatch: Dispatch) -> None:
        """Send the legs again under the same id: a mistake that routers make.

        The decode legs go to whichever consumer's turn it is.
        """
        item = dispatch.item
        others = [one.engine for one in self.fleet.engines if one.consumes and one.engine != item.producer]
        turn = others.index(item.consumer) + self._sent if item.consumer in others else 0
        consumer = others[turn % len(others)] if others else item.consumer
        self._replay(dispatch, consumer, (item.prefill_delay_seconds, *item.decode_delay_seconds))

    def replay_soon(self, dispatch: Dispatch) -> bool:
        """The same, without delay and to the engine that has had it, even where the client has gone.

        False once faults have stopped.
        """
        if self.ground.healed_at is not None:
            return False
        item, transfer = dispatch.item, dispatch.transfer
        self.ground.emit(FaultInjected(self.ground.now, "replay", transfer, (transfer,)))
        random = Random(self.ground.seed * 524287 + item.number)
        longest = 0.01 if item.replay_after_seconds else 0.0
        prefill = random.random() * longest if random.random() < 0.8 else None
        decodes = [random.random() * longest for _ in item.decode_delay_seconds]
        self._replay(dispatch, item.consumer, (prefill, *decodes))
        return True

    def _replay(
        self, dispatch: Dispatch, consumer: EngineId, delays_seconds: tuple[float | None, ...]
    ) -> None:
        dispatch.replays += 1
        random = Random(self.ground.seed * 131101 + dispatch.item.number * 64 + dispatch.replays)
        for number, delay in enumerate(delays_seconds):
            index, target = (number - 1, consumer) if number else (None, dispatch.item.producer)
            same_name = random.random() < SAME_NAME_SHARE
            self._plan(_Sending(dispatch, index, target, True, same_name), delay)

    def leave(self, dispatch: Dispatch) -> None:
        """The client has gone."""
        prefill, decode = dispatch.item.leaves
        dispatch.cancelled = True
        if prefill:
            self.release(dispatch)
            self._cancel(dispatch.prefills)
        if decode:
            self._cancel(dispatch.decodes)

    def leg_ended(self, request: Request) -> None:
        """An engine has ended a request."""
        found = self._legs.get(request.name)
        if found is None:
            return
        dispatch, leg = found
        leg.ended = True
        leg.normal = request.status.ended_normally
        if leg.normal and request.is_decode:
            self.served += 1
            if self.conversations is not None and not leg.index:
                self.conversations.answered(dispatch.item, request)
        if request.is_decode:
            self._consider_replay(dispatch)

    def leg_aborted(self, request: Request) -> None:
        """An engine has heard that a client left, and does not know the request any more.

        Who asks again at once is heard in the same step.
        """
        found = self._legs.get(request.name)
        if found is None or not request.is_decode:
            return
        dispatch, _ = found
        if dispatch.item.replay_after_seconds == 0.0 and not dispatch.replays:
            self.replay_soon(dispatch)

    def leg_preempted(self, request: Request) -> None:
        """A decode request has lost its blocks while it decoded."""
        found = self._legs.get(request.name)
        if found is not None:
            self._consider_replay(found[0])

    def _consider_replay(self, dispatch: Dispatch) -> None:
        after_seconds = dispatch.item.replay_after_seconds
        if after_seconds is not None and not dispatch.replays and self.ground.healed_at is None:
            self.ground.later(after_seconds, partial(self._replay_soon, dispatch))

    def _replay_soon(self, dispatch: Dispatch) -> None:
        if not dispatch.replays:
            self.replay_soon(dispatch)

    def engine_crashed(self, engine: Engine) -> None:
        """Connections to an engine are reset: give up its dispatches, and try each again later.

        Where only a prefill leg was lost, the decode legs may be left to recompute.
        """
        for dispatch in list(self.dispatches.values()):
            legs = [leg for leg in (*dispatch.prefills, *dispatch.decodes) if leg.engine is engine]
            lost = [leg for leg in legs if not leg.ended]
            for leg in lost:
                leg.ended = True
            goes_on = dispatch.item.goes_on and all(leg.index is None for leg in lost)
            if lost and not (goes_on and dispatch.decodes):
                self.ground.later(0.05, partial(self._give_up, dispatch))

    def leg(self, request: str) -> Leg | None:
        """The leg of a request."""
        found = self._legs.get(request)
        return None if found is None else found[1]

    def is_idle(self) -> bool:
        """Whether every leg has been sent and has ended."""
        return all(
            not dispatch.legs_due and all(leg.ended for leg in (*dispatch.prefills, *dispatch.decodes))
            for dispatch in self.dispatches.values()
        )

    def _give_up(self, dispatch: Dispatch) -> None:
        if dispatch.cancelled:
            return
        dispatch.cancelled = True
        self._cancel(dispatch.prefills)
        self._cancel(dispatch.decodes)
        if dispatch.attempt < RETRIES_MAX:
            self.ground.later(0.2, partial(self.dispatch, dispatch.item, dispatch.attempt + 1))

    def _cancel(self, legs: list[Leg]) -> None:
        for leg in legs:
            if not leg.ended and leg.engine.alive:
                leg.engine.abort(leg.request)

    def release(self, dispatch: Dispatch) -> None:
        """Tell the producer that nobody will come for what an ended prefill leg has left there."""
        for leg in dispatch.prefills:
            if leg.ended and leg.engine.alive:
                producer = leg.engine.scheduler.host.producer
                leg.engine.core.take(partial(producer.release, dispatch.transfer))

    def _plan(self, sending: _Sending, delay_seconds: float | None) -> None:
        if delay_seconds is None:
            return
        sending.dispatch.legs_due += 1
        if delay_seconds:
            self.ground.later(delay_seconds, partial(self._send, sending))
        else:
            self._send(sending)

    def _send(self, sending: _Sending) -> None:
        dispatch, index = sending.dispatch, sending.index
        dispatch.legs_due -= 1
        if dispatch.cancelled and not sending.again:
            return
        engine = self.fleet.lives.get(sending.target)
        if engine is None:
            self._give_up(dispatch)
            return
        self._sent += 1
        legs = dispatch.prefills if index is None else dispatch.decodes
        name = _free_name(legs, index, engine) if sending.same_name else None
        request = self._request(dispatch, index, name)
        leg = Leg(request.name, engine, index)
        legs.append(leg)
        self._legs[request.name] = dispatch, leg
        consumer = None if index is None else ConsumerId(request.name)
        self.ground.emit(
            LegSent(self.ground.now, engine.facts.engine, request.name, dispatch.transfer, consumer)
        )
        if request.history is not None:
            whom, of = ConsumerId(request.name), request.history.transfer
            self.ground.emit(LegSent(self.ground.now, engine.facts.engine, request.name, of, whom))
        engine.submit(request)

    def _request(self, dispatch: Dispatch, index: int | None, name: str | None) -> Request:
        item, transfer = dispatch.item, dispatch.transfer
        kind = "p" if index is None else f"d{index}"
        name = name or f"{kind}-{transfer}-{self._sent}"
        if index is None:
            params = PrefillParams(
                transfer=transfer, mode=item.mode(0), consumers=item.consumers, history=dispatch.history
            )
            return Request(name, item.prompt, 1, transfer, params, item.stops)
        # What a router knows when it sends the legs one after the other.
        prefilled = any(leg.normal for leg in dispatch.prefills)
        return Request(
            name,
            item.decode_prompt,
            item.decode_tokens,
            transfer,
            DecodeParams(
                source=dispatch.source,
                transfer=transfer,
                mode=item.mode(index),
                consumers=item.consumers,
                prefilled_tokens=item.prompt.tokens if prefilled else None,
            ),
        )

    def _source(self, item: Item, random: Random) -> SourceParams:
        facts = self.fleet.facts(item.producer)
        engine = self.fleet.lives.get(item.producer)
        incarnation = self.fleet.last_incarnation(item.producer) if engine is None else engine.incarnation
        if item.stale_incarnation:
            incarnation = Incarnation(f"i0{random.getrandbits(32):08x}")
        known = incarnation if item.knows_incarnation else None
        return SourceParams(
            engine=facts.engine,
            host=facts.host,
            port=facts.port,
            tp=facts.cache.tp_size,
            incarnation=known,
        )


def _free_name(legs: list[Leg], index: int | None, engine: Engine) -> str | None:
    """The name of the newest leg of this kind that the engine has had and forgotten."""
    for leg in reversed(legs):
        if leg.index == index and leg.engine is engine:
            return leg.request if engine.has_forgotten(leg.request) else None
    return None
