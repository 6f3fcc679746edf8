"""Plans that were made, by pair of ranks, in bounded memory.

A plan follows from two descriptions, so one that was dropped is made anew when it is needed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from kvferry.layout.plan import CopyPlan

PLANS_BYTES_MAX = 64 << 20
"""Beyond it the plan that was longest unused is dropped; the newest stays, however large."""
PLAN_OVERHEAD_BYTES = 2048
"""What a plan takes besides its pieces."""


@dataclass(slots=True)
class PlanCache:
    """Plans by the name of the other rank."""

    bytes_max: int = PLANS_BYTES_MAX
    _plans: OrderedDict[Hashable, CopyPlan] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def bytes(self) -> int:
        """Memory that the plans take together."""
        return self._bytes

    def find(self, name: Hashable, make: Callable[[], CopyPlan]) -> CopyPlan:
        """The plan kept under a name, or a newly made one."""
        known = self._plans.get(name)
        if known is None:
            return self.keep(name, make())
        self._plans.move_to_end(name)
        return known

    def keep(self, name: Hashable, plan: CopyPlan) -> CopyPlan:
        """Keep a plan in place of an earlier one of that name."""
        self.drop(name)
        self._plans[name] = plan
        self._bytes += plan.bytes + PLAN_OVERHEAD_BYTES
        while self._bytes > self.bytes_max and len(self._plans) > 1:
            self.drop(next(iter(self._plans)))
        return plan

    def drop(self, name: Hashable) -> None:
        """Forget a plan; unknown names are ignored."""
        plan = self._plans.pop(name, None)
        if plan is not None:
            self._bytes -= plan.bytes + PLAN_OVERHEAD_BYTES
