"""Names of threads as the system shows them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

_CHARACTERS_MAX = 15
"""What Linux keeps of a thread's name."""


def show_name() -> None:
    """Show this thread's name in `top -H`, where the system lets us; Python itself does not before 3.14.

    Threads that it starts from then on inherit it.
    """
    thread = threading.current_thread()
    with contextlib.suppress(OSError):
        comm = Path(f"/proc/self/task/{thread.native_id}/comm")
        comm.write_text(thread.name[:_CHARACTERS_MAX], encoding="ascii")
