"""A fleet of stub servers as a program of its own, so that tests can kill it; and what such tests need."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvferry.cli.fleet import Fleet, termination_interrupts
from kvferry.cli.ports import free_ports
from kvferry.cli.processes import ServerSpec

STUB = Path(__file__).with_name("stub_server.py")


def stub_spec(directory: Path, name: str, *extra: str) -> ServerSpec:
    """A stub server on a free port, with its log in `directory`."""
    (port,) = free_ports(1)
    return ServerSpec(
        name=name,
        command=(sys.executable, str(STUB), "--port", str(port), *extra),
        host="127.0.0.1",
        port=port,
        log=directory / f"{name}.log",
    )


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition comes true; it is looked at often, and the bound is only for a broken product."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def ends(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process, ours or another's, has ended or ends within the time."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(file, select.POLLIN)
        return bool(poller.poll(seconds * 1000))
    finally:
        os.close(file)


def main() -> None:
    """Run one stub with the given arguments until interrupted; says `ready` and `stopped`."""
    directory = Path(sys.argv[1])
    # A shell starts what it runs in the background with SIGINT ignored, and we inherit that from our tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with termination_interrupts():
        try:
            with Fleet(report=lambda line: None) as fleet:
                fleet.start(
                    [stub_spec(directory, "stub", "--child", str(directory / "child"), *sys.argv[2:])]
                )
                fleet.wait_ready(10)
                print("ready", flush=True)
                fleet.watch()
        except KeyboardInterrupt:
            print("stopped", flush=True)


if __name__ == "__main__":
    main()
