"""One checker per promise of the design, and the bookkeeping that they share."""

from __future__ import annotations

from kvferry.simulator.watch.checkers.base import Checker, Oracle
from kvferry.simulator.watch.checkers.calm import CalmSucceeds
from kvferry.simulator.watch.checkers.content import ContentIsExact
from kvferry.simulator.watch.checkers.endings import EveryTransferEndsOnce
from kvferry.simulator.watch.checkers.ledger import Ledger
from kvferry.simulator.watch.checkers.leftovers import NothingIsLeft
from kvferry.simulator.watch.checkers.outcomes import OneOutcomeEach
from kvferry.simulator.watch.checkers.overlaps import NoOverlappingWrites
from kvferry.simulator.watch.checkers.posting import PostedUnderPermission
from kvferry.simulator.watch.checkers.sources import NoReadOfFreedSources
from kvferry.simulator.watch.checkers.targets import NoLandingInFreedTargets

__all__ = ["Checker", "Ledger", "Oracle", "checkers"]


def checkers(world: Oracle) -> list[Checker]:
    """The ledger, which must see each event first, one checker per promise, and one for calm histories."""
    ledger = Ledger()
    return [
        ledger,
        PostedUnderPermission(ledger),
        NoLandingInFreedTargets(ledger),
        NoReadOfFreedSources(ledger),
        NoOverlappingWrites(ledger),
        ContentIsExact(ledger, world),
        EveryTransferEndsOnce(ledger),
        NothingIsLeft(ledger, world),
        OneOutcomeEach(ledger),
        CalmSucceeds(world),
    ]
