"""Requests that go on where an answer has ended, with what its engine keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from kvferry.handoff import HeldParams
from kvferry.ids import EngineId
from kvferry.simulator.engine.requests import Request
from kvferry.simulator.ground.ground import Ground
from kvferry.simulator.world.fleet import Fleet
from kvferry.simulator.world.workload import Item


@dataclass(frozen=True, slots=True)
class Conversations:
    """The clients' side of them; `dispatch` sends an item's legs. Prompts grow to `tokens_max`."""

    ground: Ground
    fleet: Fleet
    tokens_max: int
    dispatch: Callable[[Item, HeldParams | None], object]

    def answered(self, item: Item, request: Request) -> None:
        """A client reads an answer, and goes on; not once faults have stopped, when all has to end."""
        if not item.goes_on_after_seconds or self.ground.healed_at is not None:
            return
        tokens = min(request.length + 1 + item.number % 7, self.tokens_max)
        if tokens <= request.prompt.tokens:
            return
        after_seconds = item.goes_on_after_seconds[0]
        turn = item.next_turn(
            self.ground.contents.longer(request.prompt, tokens), self.ground.now + after_seconds
        )
        turn = replace(turn, producer=self._another_producer(item))
        self.ground.later(after_seconds, partial(self._go_on, turn, request.kept))

    def _another_producer(self, item: Item) -> EngineId:
        """One whose own cache does not have the beginning, if there is one."""
        used = {item.producer, item.consumer}
        others = [one.engine for one in self.fleet.engines if one.produces and one.engine not in used]
        return others[0] if others else item.producer

    def _go_on(self, turn: Item, kept: HeldParams | None) -> None:
        if self.ground.healed_at is None:
            self.dispatch(turn, kept)
