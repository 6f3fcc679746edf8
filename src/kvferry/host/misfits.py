"""Producer engines whose caches cannot be joined with ours, as far as transfers have shown.

An engine that meets such a producer says so by not being ready, for as long as requests name that producer:
each of them is computed here, or fails, and nobody would notice otherwise. Scheduler side.
"""

from __future__ import annotations

from collections import OrderedDict

from kvferry.host.events import Ended, RequestId
from kvferry.ids import EngineId
from kvferry.protocol import reasons

MISFIT_SECONDS = 60.0
"""How long a refusal counts when nothing more is heard of that engine: it may have been taken away."""
MISFITS_MAX = 1024
"""Engines that are remembered; beyond it the one of longest ago is forgotten."""


class Misfits:
    """The engines, and when each was refused last. `now` in seconds that never go back."""

    def __init__(self) -> None:
        self._refused: OrderedDict[EngineId, tuple[float, RequestId]] = OrderedDict()

    def ended(self, source: EngineId, event: Ended, now: float) -> None:
        """A rank has told the end of a transfer from an engine.

        That the caches fit is shown by a request that has come, and not by one of which another rank has
        been refused.
        """
        if event.failed and reasons.code_of(event.reason) == reasons.GEOMETRY:
            self._refused[source] = now, event.request
            self._refused.move_to_end(source)
            if len(self._refused) > MISFITS_MAX:
                self._refused.popitem(last=False)
        elif not event.failed and source in self._refused and self._refused[source][1] != event.request:
            del self._refused[source]

    def count(self, now: float) -> int:
        """Engines that have been refused lately."""
        while self._refused:
            engine, (at, _) = next(iter(self._refused.items()))
            if now - at < MISFIT_SECONDS:
                break
            del self._refused[engine]
        return len(self._refused)
