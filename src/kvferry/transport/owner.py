"""One thread owns a transport; this is how an implementation notices that another one came in."""

from __future__ import annotations

import threading


class ThreadOwner:
    """Remembers the first thread that enters and refuses every other one."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._owner: int | None = None

    def check(self) -> None:
        """Take ownership on the first call.

        Raises:
            AssertionError: this is not the owning thread. It is our own mistake, never a peer's.
        """
        caller = threading.get_ident()
        if self._owner is None:
            self._owner = caller
        if self._owner != caller:
            raise AssertionError(f"{self._what} belongs to thread {self._owner}, thread {caller} called it")
