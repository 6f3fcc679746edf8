"""The access log: one JSON object a line for each request that has ended.

Lines are gathered and written by a thread, so that a slow disk delays no request. When it cannot keep up,
lines are dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

STANDARD_OUTPUT = "-"
_FLUSH_SECONDS = 0.2
_LINES_MAX = 50_000


class AccessLog:
    """Writes to the file at `path`, to standard output for `-`, nowhere for an empty path.

    The file is opened anew for each batch of lines, so it may be moved away at any time.
    """

    def __init__(self, path: str, dropped: Callable[[int], None] = lambda count: None) -> None:
        self._path = path
        self._dropped = dropped
        self._lines: list[bytes] = []
        self._writing: asyncio.Task[None] | None = None
        self._told = False

    @property
    def wanted(self) -> bool:
        """Whether anything is logged."""
        return bool(self._path)

    def note(self, entry: Mapping[str, Any]) -> None:
        """Log one request that has ended just now."""
        if len(self._lines) >= _LINES_MAX:
            self._dropped(1)
            return
        ended = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        self._lines.append(msgspec.json.encode({"time": ended, **entry}))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_soon())

    async def close(self) -> None:
        """Write what is left."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._lines:
            self._append(self._taken())

    async def _write_soon(self) -> None:
        try:
            while self._lines:
                await asyncio.sleep(_FLUSH_SECONDS)
                lines = self._taken()
                # Shielded: what a thread writes is written to its end, so it is not written again.
                await asyncio.shield(asyncio.to_thread(self._append, lines))
        finally:
            self._writing = None

    def _taken(self) -> list[bytes]:
        lines, self._lines = self._lines, []
        return lines

    def _append(self, lines: list[bytes]) -> None:
        data = b"\n".join(lines) + b"\n"
        try:
            if self._path == STANDARD_OUTPUT:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            else:
                with Path(self._path).open("ab") as file:
                    file.write(data)
        except OSError as error:
            self._dropped(len(lines))
            if not self._told:
                self._told = True
                logger.warning("--access-log: %s cannot be written: %s", self._path, error.strerror or error)
