"""Threads show their names to the system's tools."""

from __future__ import annotations

import threading
from pathlib import Path

from kvferry.agent.threads import show_name


def test_a_thread_shows_its_name_as_far_as_the_system_keeps_it() -> None:
    shown: list[str] = []

    def run() -> None:
        show_name()
        task = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        shown.append(task.read_text(encoding="ascii").strip())

    thread = threading.Thread(target=run, name="kvferry-transfer")
    thread.start()
    thread.join()
    assert shown == ["kvferry-transfe"]
