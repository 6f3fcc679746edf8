"""What happened when, as JSON lines, and the counters, as one JSON file, written by a thread of their own.

Recording is an append to a queue. The writing thread sleeps until there is something, then gathers for a
moment before it writes, so an idle engine writes nothing and wakes nothing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from kvferry.agent.threads import show_name

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.5
SNAPSHOT_SECONDS = 1.0

Row = Mapping[str, Any]


class WallClock:
    """Nanoseconds of the wall's clock from seconds of the monotonic one, by one offset for a whole run."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic_seconds: float) -> int:
        """That moment on the wall's clock."""
        return int(monotonic_seconds * 1e9) + self._offset


class Journal:
    """Takes rows from any thread."""

    def __init__(
        self,
        rows_path: str | None,
        report_path: str | None,
        *,
        report: Callable[[], Row],
        snapshot: Callable[[], Iterable[Row]],
        rows_max: int,
    ) -> None:
        """Start writing; without paths nothing is written and recording costs nothing.

        Args:
            rows_path: file for the rows; an older one is replaced.
            report_path: file for the counters.
            report: the counters; called on the writing thread.
            snapshot: rows that follow the others about once per second; called on the writing thread.
            rows_max: so many rows are kept; later ones are counted and dropped, and no snapshot follows.

        Raises:
            OSError: a file cannot be written.
        """
        self._report_path = None if report_path is None else Path(report_path)
        self._report = report
        self._snapshot = snapshot
        self._rows_max = rows_max
        self._rows: deque[Row] = deque()
        self._appended = 0
        self._snapshot_at = -SNAPSHOT_SECONDS
        self._dropped = 0
        self._something = threading.Event()
        self._closing = threading.Event()
        self._file: TextIO | None = None
        self._thread: threading.Thread | None = None
        if rows_path is not None:
            self._file = open(rows_path, "w", encoding="utf-8")  # noqa: SIM115 - it lives as long as we do
        if self._file is not None or self._report_path is not None:
            self._write_report()
            self._thread = threading.Thread(target=self._run, name="kvferry-journal", daemon=True)
            self._thread.start()

    def append(self, row: Row) -> None:
        """Keep a row."""
        if self._file is None:
            return
        if self._appended >= self._rows_max:
            self._dropped += 1
            return
        self._appended += 1
        self._rows.append(row)
        self._something.set()

    def changed(self) -> None:
        """The counters have changed and shall be written soon."""
        self._something.set()

    def close(self) -> None:
        """Write what is left and stop. Idempotent."""
        self._closing.set()
        self._something.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _run(self) -> None:
        show_name()
        is_last = False
        # What was there when it was closed is written, even if this thread had not begun by then.
        while not is_last:
            self._something.wait()
            self._closing.wait(GATHER_SECONDS)
            self._something.clear()
            is_last = self._closing.is_set()
            try:
                self._write_rows()
                self._write_report()
            except OSError:
                logger.exception("the emulator's files cannot be written any more")
                return

    def _write_rows(self) -> None:
        if self._file is None:
            return
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        now = time.monotonic()
        is_due = now - self._snapshot_at >= SNAPSHOT_SECONDS or self._closing.is_set()
        if is_due and self._appended < self._rows_max:
            self._snapshot_at = now
            rows += self._snapshot()
        self._file.writelines(json.dumps(row) + "\n" for row in rows)
        self._file.flush()

    def _write_report(self) -> None:
        if self._report_path is None:
            return
        counts = {"rows": self._appended, "rows_dropped": self._dropped}
        # A reader sees the old counters or the new, never half of them.
        fresh = self._report_path.with_suffix(self._report_path.suffix + ".new")
        fresh.write_text(json.dumps({**self._report(), **counts}, indent=1) + "\n", encoding="utf-8")
        fresh.replace(self._report_path)
