"""One interrupt ends a command in good order, and those that follow it in haste do not disturb that."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def first_interrupt_only() -> Iterator[None]:
    """Let Ctrl-C or SIGTERM end the block by KeyboardInterrupt, once.

    Both stay ignored after that, behind the block too: the process is about to end, its children with it.
    """
    if threading.current_thread() is not threading.main_thread():
        # No other thread may set a handler, nor is interrupted.
        yield
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    # What is ignored already, as Ctrl-C is by what a script starts in the background, stays so.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in taken.items():
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)
