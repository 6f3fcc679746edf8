"""Finding out, on threads of its own, whether anybody listens at an address.

A message queue hides a refused connection and tries again; here a refusal is the answer: the process that
listened there has ended. Everything else (no route, no answer, a name that cannot be looked up) says nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

THREADS_MAX = 4
"""Addresses that are tried at one time; more wait for their turn."""
TRY_SECONDS = 2.0


def is_refused(host: str, port: int, timeout_seconds: float = TRY_SECONDS) -> bool:
    """Whether a connection to `host:port` is refused; blocks for about `timeout_seconds` per address of it.

    A host with several addresses refuses when each of them does.
    """
    try:
        socket.create_connection((host, port), timeout_seconds, all_errors=True).close()
    except ExceptionGroup as failures:
        return all(isinstance(failure, ConnectionRefusedError) for failure in failures.exceptions)
    except (OSError, OverflowError, ValueError):
        # The host has no address, or the pair is none.
        return False
    return False


class Prober:
    """Tries addresses on a small pool of threads that starts with the first one."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._lock = threading.Lock()

    def ask(self, host: str, port: int, callback: Callable[[bool], None]) -> None:
        """Call `callback` once, from a thread of the pool, with whether the connection was refused.

        Any thread. What waits when `close` comes is dropped; after it the answer is at once that it was not.
        """
        with self._lock:
            if not self._closed:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="kvferry-probe")
                self._pool.submit(lambda: callback(is_refused(host, port)))
                return
        callback(False)

    def close(self) -> None:
        """Drop what waits. Idempotent."""
        with self._lock:
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
