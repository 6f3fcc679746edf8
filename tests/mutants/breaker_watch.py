"""Faults that had survived because a checker excused them, or looked only for the harm that they may do."""

from __future__ import annotations

from typing import Final

from tests.mutants.edits import Edit, Mutant

BREAKER_WATCH: Final[tuple[Mutant, ...]] = (
    Mutant(
        name="failed_counted_as_skipped",
        promise="8",
        what="A transfer that fails after it has begun is counted as skipped.",
        changes=(
            Edit(
                "kvferry.host.outcomes:Outcomes._count",
                '"failed" if worst.failed else "completed"',
                '"skipped" if worst.failed else "completed"',
            ),
        ),
    ),
    Mutant(
        name="relinquish_ignores_progress",
        promise="6",
        what="An engine that needs memory gives up destinations whose KV is on its way.",
        changes=(
            Edit(
                "kvferry.protocol.consumer_host:relinquish",
                "    if any(_stands_still(row, part) for part in row.open_parts()):\n",
                "    if row.open_parts():\n",
            ),
        ),
    ),
    Mutant(
        name="reclaim_ignores_registered",
        promise="6",
        what="An engine that needs memory takes leases back that somebody has a destination for.",
        changes=(
            Edit(
                "kvferry.protocol.producer_host:reclaim",
                "delivery.state not in _WANTED | loans.READS for delivery",
                "True for delivery",
            ),
        ),
    ),
    Mutant(
        name="starved_although_it_computes",
        promise="6",
        what="An engine takes itself for stuck as soon as a request waits for memory, whatever it computes.",
        changes=(
            Edit(
                "kvferry.host.starvation:Starvation.is_due",
                "        if not stuck:\n            self._since = None\n            return False\n",
                "        if not stuck and self._since is None:\n            return False\n",
            ),
        ),
    ),
    Mutant(
        name="lapse_three_times_later",
        promise="6",
        what="Blocks stay in quarantine for three times as long as anything could write them.",
        changes=(Edit("kvferry.protocol.fences:fail", "max(granted) + bound", "max(granted) + 3 * bound"),),
    ),
    Mutant(
        name="unknown_three_times_later",
        promise="6",
        what="A consumer asks for a transfer that nobody knows for three times as long as its limit says.",
        changes=(
            Edit(
                "kvferry.protocol.consumer_peer:status",
                "row.waiting_since + state.limits.unknown_seconds",
                "row.waiting_since + 3 * state.limits.unknown_seconds",
            ),
        ),
    ),
    Mutant(
        name="lease_three_times_longer",
        promise="6",
        what="A producer keeps its blocks for three leases after the last sign of life.",
        changes=(
            Edit(
                "kvferry.protocol.producer_peer:keep_lease",
                "now + state.limits.lease_seconds",
                "now + 3 * state.limits.lease_seconds",
            ),
        ),
    ),
)
