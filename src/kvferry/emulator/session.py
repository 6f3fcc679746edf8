"""What the scheduler and the worker of one emulated engine share: options, timelines and counters."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.emulator.compat import transfer_reports
from kvferry.emulator.hooks import SCHEDULER_HOOKS, WORKER_HOOKS, Meter
from kvferry.emulator.journal import Journal, Row
from kvferry.emulator.landing import Landing
from kvferry.emulator.link import Transfer
from kvferry.emulator.options import read_options
from kvferry.emulator.timelines import Timelines
from kvferry.errors import UsageError

MISMATCHES_NAMED_MAX = 20
_REQUEST = re.compile(rb"(?:chat)?cmpl-[0-9A-Za-z_.-]+")
"""vLLM's id of an HTTP request, which the notification of a transfer's last write carries."""

_sessions: dict[str, Session] = {}


@dataclass(slots=True)
class Steps:
    """How well the emulated device kept its time."""

    count: int = 0
    intended_seconds: float = 0.0
    late_seconds: float = 0.0
    """After its modelled end, until the engine's thread saw it."""
    late_seconds_max: float = 0.0
    idle_seconds: float = 0.0

    def add(self, *, intended: float, late: float, idle: float) -> None:
        """One more step."""
        self.count += 1
        self.intended_seconds += intended
        self.late_seconds += late
        self.late_seconds_max = max(self.late_seconds_max, late)
        self.idle_seconds += idle


class Verdicts:
    """How many pages from elsewhere were compared, and how many of them were wrong. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages = 0
        self._wrong = 0
        self._requests: list[str] = []

    def add(self, request: str, pages: int, wrong: int) -> None:
        """So many pages of a request were compared, and so many of them were wrong."""
        with self._lock:
            self._pages += pages
            self._wrong += wrong
            if wrong and len(self._requests) < MISMATCHES_NAMED_MAX:
                self._requests.append(request)

    def to_dict(self) -> dict[str, Any]:
        """For the report: `mismatches` is what must be 0."""
        with self._lock:
            return {
                "verified_pages": self._pages,
                "mismatches": self._wrong,
                "mismatched_requests": list(self._requests),
            }


class Session:
    """One engine's, in this process. A rank in a process of its own (`rank`) has files of its own, too."""

    def __init__(self, vllm_config: Any, rank: int | None = None) -> None:
        transfer = vllm_config.kv_transfer_config
        self.options = read_options(vllm_config.additional_config)
        self.meter = Meter()
        self.steps = Steps()
        self.verdicts = Verdicts()
        self.landing = Landing()
        self._header = {
            "engine": None if transfer is None else transfer.engine_id,
            "connector": None if transfer is None else transfer.kv_connector,
            "role": None if transfer is None else transfer.kv_role,
            "rank": rank,
            "preset": self.options.preset,
            "verify": self.options.verify,
            "pid": os.getpid(),
        }
        try:
            self.journal = Journal(
                _named(self.options.journal, rank),
                _named(self.options.report, rank),
                report=self._report,
                snapshot=self._snapshot,
                rows_max=self.options.journal_rows_max,
            )
        except OSError as error:
            raise UsageError(f"the emulator's journal or report cannot be written: {error}") from error
        self.timelines = Timelines(self.journal.append)

    def watch_scheduler(self, connector: Any) -> None:
        """Time the scheduler side's hooks and note when blocks were allocated for KV to come."""

        def allocated(args: tuple[Any, ...], _: Any) -> None:
            request, blocks, external_tokens = args[:3]
            if external_tokens:
                self.timelines.reach(request.request_id, "allocated")
                if self.options.journal is not None:
                    self.landing.expect(request.request_id, blocks.get_block_ids()[0])

        self.meter.wrap(connector, "scheduler", SCHEDULER_HOOKS, {"update_state_after_alloc": allocated})

    def watch_worker(self, connector: Any) -> None:
        """Time the worker side's hooks and note what they report."""

        def results(_: tuple[Any, ...], result: Any) -> None:
            sent, received, failed = transfer_reports(result)
            for request in received:
                self.timelines.reach(request, "received")
            for kind, requests in (("sent", sent), ("receive_failed", failed)):
                for request in requests:
                    self.timelines.note(kind, request)

        observers = {"get_transfer_results": results, "get_finished": results}
        self.meter.wrap(connector, "worker", WORKER_HOOKS, observers)

    def saw(self, transfer: Transfer) -> None:
        """A transfer was seen done by the engine that posted it. Any thread."""
        named = _REQUEST.search(transfer.notification)
        landing = self.landing.request_at(transfer.address)
        self.timelines.transfer(
            request=landing if named is None else named.group().decode(),
            posted=transfer.posted,
            operation=transfer.operation,
            bytes=transfer.moved,
            descriptors=transfer.descriptors,
            post_seconds=round(transfer.post_seconds, 6),
            notified=bool(transfer.notification),
        )

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self.journal.close()

    def _report(self) -> Row:
        return {
            **self._header,
            **self.verdicts.to_dict(),
            "steps": asdict(self.steps),
            "hooks": self.meter.to_dict(),
        }

    def _snapshot(self) -> Iterator[Row]:
        """Cumulated counters, so that a reader can take the difference of two moments."""
        now = time.time_ns()
        for name, cost in self.meter.to_dict().items():
            side, hook = name.split(".", 1)
            yield {"kind": "hook", "at_ns": now, "side": side, "hook": hook, **cost}
        verdicts = self.verdicts.to_dict()
        yield {
            "kind": "verified",
            "at_ns": now,
            "pages": verdicts["verified_pages"],
            "mismatches": verdicts["mismatches"],
        }


def session_of(vllm_config: Any, rank: int | None = None) -> Session:
    """The session of the engine with this configuration; scheduler and worker get the same one.

    A worker in another process than the scheduler's says which rank it is.

    Raises:
        UsageError: its options make no sense, or a file cannot be written.
    """
    key = vllm_config.instance_id
    if key not in _sessions:
        _sessions[key] = Session(vllm_config, rank)
    return _sessions[key]


def _named(file: str | None, rank: int | None) -> str | None:
    """`decode.json` is `decode-rank1.json` for rank 1."""
    if file is None or rank is None:
        return file
    path = Path(file)
    return str(path.with_name(f"{path.stem}-rank{rank}{path.suffix}"))
