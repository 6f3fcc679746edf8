"""One checker per promise of the design, and the bookkeeping that they share."""

from __future__ import annotations

from kvferry.simulator.watch.checkers.base import Checker, Oracle
from kvferry.simulator.watch.checkers.bounds import EndsWithinBounds
from kvferry.simulator.watch.checkers.calm import CalmSucceeds
from kvferry.simulator.watch.checkers.content import ContentIsExact
from kvferry.simulator.watch.checkers.endings import EveryTransferEndsOnce
from kvferry.simulator.watch.checkers.fences import FencesHold
from kvferry.simulator.watch.checkers.leases import ServedToAll, TravellingIsKept
from kvferry.simulator.watch.checkers.ledger import Ledger
from kvferry.simulator.watch.checkers.leftovers import NothingIsLeft
from kvferry.simulator.watch.checkers.letters import Letters
from kvferry.simulator.watch.checkers.outcomes import OneOutcomeEach
from kvferry.simulator.watch.checkers.overlaps import NoOverlappingWrites
from kvferry.simulator.watch.checkers.posting import PostedUnderPermission
from kvferry.simulator.watch.checkers.readers import LoansAreKept, OnlyKeptIsUsed, ReadersAreSilent
from kvferry.simulator.watch.checkers.sources import NoReadOfFreedSources
from kvferry.simulator.watch.checkers.targets import NoLandingInFreedTargets
from kvferry.simulator.watch.checkers.wakes import Wakes
from kvferry.simulator.watch.checkers.windows import MisfitsAreRefused, OnlyTheWindowTravels

__all__ = ["Checker", "Ledger", "Oracle", "checkers"]


def checkers(world: Oracle) -> list[Checker]:
    """The bookkeeping, which must see each event first, and those who judge by it: some for each promise, one
    for calm histories."""
    ledger, letters, wakes = Ledger(), Letters(), Wakes(world)
    return [
        ledger,
        letters,
        wakes,
        PostedUnderPermission(ledger),
        NoLandingInFreedTargets(ledger),
        FencesHold(ledger, letters, wakes, world),
        ReadersAreSilent(ledger, letters),
        NoReadOfFreedSources(ledger),
        LoansAreKept(ledger, letters, wakes),
        NoOverlappingWrites(ledger),
        ContentIsExact(ledger, world),
        OnlyKeptIsUsed(ledger, world),
        OnlyTheWindowTravels(ledger, world),
        MisfitsAreRefused(world),
        EveryTransferEndsOnce(ledger),
        EndsWithinBounds(ledger, letters, wakes, world),
        TravellingIsKept(ledger, letters),
        ServedToAll(letters),
        NothingIsLeft(ledger, world),
        OneOutcomeEach(ledger),
        CalmSucceeds(ledger, world),
    ]
