"""What is counted, traced and logged of a request that has ended."""

from __future__ import annotations

import asyncio

from kvferry.router.ground.errors import Cause
from kvferry.router.http.reading import Request
from kvferry.router.record.accesslog import AccessLog
from kvferry.router.record.metrics import RouterMetrics
from kvferry.router.record.timeline import STAGES, Timeline


class Accounting:
    """The books of one router."""

    def __init__(self, metrics: RouterMetrics, log: AccessLog) -> None:
        self._metrics = metrics
        self._log = log
        self._stages = {name: metrics.stage.labels(name) for name in STAGES}
        self._clock = asyncio.get_running_loop().time

    def note(
        self,
        request: Request,
        request_id: str,
        timeline: Timeline,
        end: tuple[str, str, Cause],
        status: int,
    ) -> None:
        """Count and log a request that has ended by `(path, outcome, cause)`."""
        path, outcome, cause = end
        metrics = self._metrics
        seconds = self._clock() - timeline.arrived
        metrics.count_request(path, outcome, cause.value)
        metrics.e2e.labels(outcome).observe(seconds)
        stages = timeline.stages()
        for stage, spent in stages.items():
            self._stages[stage].observe(spent)
        if timeline.trace is not None:
            timeline.trace.end(status, {"path": path, "outcome": outcome, "cause": cause.value}, stages)
        if self._log.wanted:
            self._log.note(
                {
                    "request_id": request_id,
                    "endpoint": request.path,
                    "status": status,
                    "path": path,
                    "outcome": outcome,
                    "cause": cause.value,
                    "prefill": timeline.prefill,
                    "decode": timeline.decode,
                    "seconds": {**stages, "total": seconds},
                }
            )
