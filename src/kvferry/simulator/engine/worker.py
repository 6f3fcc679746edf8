"""The engine's main thread on one rank, which also launches what the device computes.

What it does about transfers is the production host's. Here is what an engine does around it: a step waits
until the one before has begun and been launched, a preemption holds the rank back until its writes have
drained or the bound is over, and the device computes behind the thread where the engine is asynchronous.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvferry.host.events import RankIndex
from kvferry.host.facts import EngineFacts
from kvferry.host.reports import Finished, Reported
from kvferry.host.worker import FerryWorker, Ready
from kvferry.ids import TransferId
from kvferry.protocol.commands import Command, Preempt, Result
from kvferry.simulator.engine.rank import RankProcess
from kvferry.simulator.engine.steps import Step

DRAIN_SECONDS = 1.0
_WAKE_SECONDS = 2e-5
"""From the agent's answer until the waiting thread runs on."""


@dataclass(slots=True)
class Face:
    """A rank's agent as the host sees it. Waiting has been done before `drain` is called."""

    process: RankProcess
    drained: bool = True

    def submit(self, command: Command, ready: Ready | None = None) -> bool:
        """Hand a command over."""
        return self.process.submit(command, ready)

    def results(self) -> list[Result]:
        """What has come since the last call."""
        return self.process.desk.results()

    def drain(self, transfers: tuple[TransferId, ...], timeout_seconds: float) -> bool:
        """What came of the wait."""
        return self.drained

    def snapshot(self) -> Mapping[str, Any]:
        """Nobody asks."""
        return {}

    def close(self, timeout_seconds: float) -> object:
        """Histories end without."""
        return None


@dataclass(slots=True, eq=False)
class Worker:
    """One rank's main thread. `began` and `ended` tell the engine how far it is with a step.

    Up to `device_lag_seconds` after a forward pass was launched the device has computed it.
    """

    process: RankProcess
    index: RankIndex
    facts: EngineFacts
    device_lag_seconds: float
    began: Callable[[Step], None]
    ended: Callable[[Step, RankIndex], None]
    stalled_until: float = 0.0
    raises: Callable[[], None] | None = None
    """Hears that the next forward pass that computes KV for others has raised."""
    host: FerryWorker = field(init=False)
    _face: Face = field(init=False)
    _steps: deque[Step] = field(default_factory=deque)
    _busy: bool = False
    _draining: int | None = None
    _computed: int = 0
    """Steps that the device has computed."""
    _launched: int = 0
    _free_at: float = 0.0
    """When the device has computed what was launched."""

    def __post_init__(self) -> None:
        """Nothing is known at first."""
        self._face = Face(self.process)
        self.host = FerryWorker(
            self._face,
            rank=self.index,
            block_tokens=self.facts.block_tokens,
            ratios=(1,) * len(self.facts.tables),
            keeps_good_prefixes=self.facts.keeps_good_prefixes,
            drain_seconds=DRAIN_SECONDS,
            record=self._record if self.device_lag_seconds else None,
            clock=self.process.clock,
        )

    def give(self, step: Step) -> None:
        """The engine has planned a step."""
        self._steps.append(step)
        self._next()

    def unstall(self) -> None:
        """The thread runs again, and its forward passes succeed."""
        self.stalled_until = 0.0
        self.raises = None

    @property
    def has_results(self) -> bool:
        """Whether a step would bring something back."""
        return self.host.has_refused or self.process.desk.results_waiting > 0

    def remains(self) -> list[str]:
        """What has not come to its end."""
        left = [("transfers or preemptions", self.host.open_count), ("steps", len(self._steps))]
        return [f"{count} {what} of {self.process.name}'s host" for what, count in left if count]

    # --- a step ------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self._busy or not self._steps:
            return
        self._busy = True
        # A stalled thread begins nothing; a busy one begins a little after it was told to.
        self._at(self.process.ground.now + self.process.step_lag(), self._preempt)

    def _at(self, at_seconds: float, action: Callable[[], None]) -> None:
        self.process.ground.at(max(at_seconds, self.stalled_until), self.process.guard(action))

    def _preempt(self) -> None:
        if self.process.ground.now < self.stalled_until:
            self._at(self.stalled_until, self._preempt)
            return
        preempt = self._steps[0].orders.preempt
        if preempt is None:
            self._begin()
        elif not self.process.desk.alive:
            self._drained(drained=False)
        else:
            self._drain(preempt)

    def _drain(self, preempt: Preempt) -> None:
        process = self.process
        number = process.desk.ask_drain(preempt.transfers, lambda: self._answered(number))
        self._draining = number
        process.commanded(Preempt(preempt.transfers, number))
        process.ground.later(DRAIN_SECONDS, process.guard(lambda: self._stop_waiting(number, drained=False)))

    def _answered(self, number: int) -> None:
        """On the agent's thread; the waiting one runs on a little later."""
        process = self.process
        process.ground.later(_WAKE_SECONDS, process.guard(lambda: self._stop_waiting(number, drained=True)))

    def _stop_waiting(self, number: int, *, drained: bool) -> None:
        if self._draining == number:
            self._draining = None
            self.process.desk.end_drain(number)
            self._drained(drained=drained)

    def _drained(self, *, drained: bool) -> None:
        self._face.drained = drained
        self.host.preempt(self._steps[0].orders.preempt)
        self._begin()

    def _begin(self) -> None:
        step = self._steps[0]
        self.host.begin(step.orders)
        self.began(step)

    def end(self, step: Step) -> None:
        """The forward pass has been launched, and has ended where the engine is not asynchronous."""
        assert self._steps[0] is step, "a rank runs its steps in order"
        ground = self.process.ground
        if self.raises is not None and step.orders.advances:
            # The core learns of it and ends; this thread does nothing more.
            self.host.save(step.orders, succeeded=False)
            self.raises()
            return
        lag = self.device_lag_seconds * self.process.jitter()
        self._launched += 1
        self._free_at = max(self._free_at, ground.now + lag)
        waits = self._free_at > ground.now
        if not waits:
            self._compute(step)
        self.host.save(step.orders, succeeded=True)
        out = self.host.collect(step.finished)
        finished = Finished(set(out.finished.sending), set(out.finished.receiving), set(out.finished.failed))
        step.reports[self.index] = Reported(finished, self.host.take_bad_blocks(), self.host.take_events())
        if waits:
            ground.at(self._free_at, self.process.guard(partial(self._compute, step)))
        self._steps.popleft()
        self._busy = False
        self._next()

    def _compute(self, step: Step) -> None:
        slot, contents = self.process.slot, self.process.ground.contents
        for work in step.work:
            tokens = np.arange(work.start, work.stop)
            for part, table in zip(slot.parts, work.blocks, strict=True):
                blocks, places = table[tokens // part.shape.block_tokens], tokens % part.shape.block_tokens
                kv = contents.part(work.request.prompt.number, part.layers, slot.heads)
                part.values[blocks, places] = kv[work.start : work.stop]
        self._computed += 1
        step.computed.add(self.index)
        spoilt = step.spoilt.get(self.index)
        if spoilt:
            self.process.scribble(spoilt)
        # Commands that waited for the device count when the agent looks next.
        self.process.progressed()
        self.process.ground.later(0.0, self.process.guard(partial(self.ended, step, self.index)))

    def _record(self) -> Ready:
        """Marks what has been launched so far; the agent asks whether the device is through with it."""
        launched = self._launched
        return lambda: self._computed >= launched
