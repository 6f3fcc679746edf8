"""One checker per promise of the design, and the bookkeeping that they share."""

from __future__ import annotations

from kvferry.simulator.checkers.base import Checker, Oracle
from kvferry.simulator.checkers.calm import CalmSucceeds
from kvferry.simulator.checkers.content import ContentIsExact
from kvferry.simulator.checkers.endings import EveryTransferEndsOnce
from kvferry.simulator.checkers.ledger import Ledger
from kvferry.simulator.checkers.leftovers import NothingIsLeft
from kvferry.simulator.checkers.outcomes import OneOutcomeEach
from kvferry.simulator.checkers.overlaps import NoOverlappingWrites
from kvferry.simulator.checkers.posting import PostedUnderPermission
from kvferry.simulator.checkers.sources import NoReadOfFreedSources
from kvferry.simulator.checkers.targets import NoLandingInFreedTargets

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
