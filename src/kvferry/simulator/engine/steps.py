"""What one step of an engine computes, carries down to its ranks, and what each brings back up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.host.events import Event, RankIndex
from kvferry.host.orders import StepOrders
from kvferry.host.reports import Reported
from kvferry.simulator.engine.requests import Request

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(slots=True, eq=False)
class Work:
    """What a step computes of one request: tokens `[start, stop)`, into these blocks."""

    request: Request
    start: int
    stop: int
    blocks: list[npt.NDArray[np.intp]]
    """The request's whole block table at that time, by cache group."""
    fresh: list[list[int]]
    """Blocks that this step has added, by cache group; all of them when `replaced`."""
    replaced: bool
    samples: bool
    """Whether a token comes out of it."""


@dataclass(slots=True, eq=False)
class Step:
    """One step, from its plan to its update."""

    number: int
    seconds: float = 0.0
    work: list[Work] = field(default_factory=list)
    orders: StepOrders = field(default_factory=StepOrders)
    finished: list[str] = field(default_factory=list)
    """Requests that the engine has ended since the last step."""
    spoilt: dict[RankIndex, list[int]] = field(default_factory=dict)
    """Blocks whose content is lost once a rank has computed this step."""
    computed: set[RankIndex] = field(default_factory=set)
    began: int = 0
    reports: dict[RankIndex, Reported] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether it computes nothing and tells the ranks nothing."""
        orders = self.orders
        return not (self.work or orders.senders or orders.commands or orders.preempt or self.finished)


@dataclass(slots=True)
class Joint:
    """What all ranks together report of one step; requests in a fixed order."""

    sending: list[str] = field(default_factory=list)
    receiving: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    bad_blocks: set[int] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)


class JointReports:
    """Joins the ranks' reports as vLLM does: an end counts when every rank has reported it."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._receiving: dict[str, int] = {}
        self._sending: dict[str, int] = {}
        self._failed: set[str] = set()

    def add(self, reports: dict[RankIndex, Reported]) -> Joint:
        """What the scheduler hears of one step."""
        joint = Joint()
        for rank in sorted(reports):
            report = reports[rank]
            joint.bad_blocks |= report.bad_blocks
            joint.events += report.events
            joint.receiving += self._complete(report.finished.receiving, self._receiving)
            joint.sending += self._complete(report.finished.sending, self._sending)
            self._failed |= report.finished.failed
        joint.failed = [name for name in joint.receiving if name in self._failed]
        self._failed.difference_update(joint.failed)
        return joint

    def _complete(self, names: set[str], missing: dict[str, int]) -> list[str]:
        complete = []
        for name in sorted(names):
            left = missing.get(name, self._rank_count) - 1
            if left:
                missing[name] = left
            else:
                missing.pop(name, None)
                complete.append(name)
        return complete
