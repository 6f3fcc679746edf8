"""Stands between a fleet and one of its servers, so that no server outlives the fleet, whatever kills that.

Run as `python -m kvferry.cli.guard GRACE_SECONDS PROGRAM ARGUMENT...`, as the leader of a new process group.
The fleet holds the other end of its standard input and never writes to it: end of file means that the fleet
wants the server to stop, or is gone. The guard then sends the server SIGTERM, and after the grace SIGKILL to
the whole group, itself included. vLLM needs this: its engine core survives a killed API server, and an API
server that is still loading may not end on SIGTERM at all.

It exits as the server did; a server ended by signal n gives 128 + n.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

NOT_STARTED = 127


def main(arguments: Sequence[str]) -> int:
    """Run one server to its end."""
    grace_seconds, command = float(arguments[0]), arguments[1:]
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error}\n")
        return NOT_STARTED
    # Whoever signals the group means the server; the guard ends by end of file, or with the server.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_file = os.pidfd_open(server.pid)
    ended, dismissed = _wait([exit_file, sys.stdin.fileno()], None)
    if dismissed and not ended:
        server.send_signal(signal.SIGTERM)
        _wait([exit_file], grace_seconds)
    if dismissed:
        # Nobody may be left to clean up behind us: take what remains of the group along.
        os.killpg(0, signal.SIGKILL)
    code = server.wait()
    return code if code >= 0 else 128 - code


def _wait(files: list[int], seconds: float | None) -> list[bool]:
    """Whether each file has become readable or was closed."""
    poller = select.poll()
    for file in files:
        poller.register(file, select.POLLIN)
    ready = dict(poller.poll(None if seconds is None else seconds * 1000))
    return [file in ready for file in files]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
