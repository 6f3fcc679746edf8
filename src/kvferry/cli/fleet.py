"""A group of server processes that live and die together.

    with Fleet(report=print) as fleet:
        fleet.start([...])
        fleet.wait_ready(seconds=180)
        fleet.watch()

Leaving the block stops every server, however it is left: SIGTERM to each, SIGKILL to what remains of it after
a bound, or at once on a second Ctrl-C.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType

from kvferry.cli.processes import STOP_SECONDS_MAX, ServerProcess, ServerSpec, wait_for_exit
from kvferry.cli.server_logs import cause, without_noise
from kvferry.errors import KvferryError, UsageError

# The guards need the grace of their servers, and a moment.
STOP_WAIT_SECONDS = STOP_SECONDS_MAX + 2.0
HEALTH_INTERVAL_SECONDS = 0.25
REPORT_INTERVAL_SECONDS = 10.0
FAILURE_LOG_LINES = 25


class FleetError(KvferryError):
    """A server ended or did not become ready; the message says which one and shows the end of its log."""


class Fleet:
    """Starts, watches and stops servers. `report` gets one line per step of progress."""

    def __init__(self, report: Callable[[str], None] = print) -> None:
        self._report = report
        self._servers: dict[str, ServerProcess] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __getitem__(self, name: str) -> ServerProcess:
        """The server of that name."""
        return self._servers[name]

    @property
    def servers(self) -> list[ServerProcess]:
        """All servers, in the order of their start."""
        return list(self._servers.values())

    def start(self, specs: Iterable[ServerSpec]) -> None:
        """Start servers; one of a name that is already there takes its place and must have ended.

        Raises:
            UsageError: a name is taken by a running server, or a program cannot be started.
        """
        if sys.platform != "linux":
            raise UsageError(
                "starting a fleet of servers needs Linux; start vLLM and `kvferry router` by hand"
            )
        for spec in specs:
            before = self._servers.get(spec.name)
            if before is not None and not before.exited:
                raise UsageError(f"{spec.name} is already running; stop it first")
            if before is not None:
                before.kill()
            try:
                self._servers[spec.name] = ServerProcess(spec)
            except OSError as error:
                raise UsageError(f"{spec.name} cannot be started: {error}") from error
            self._report(f"{spec.name}: starting on {spec.url}, log in {spec.log}")

    def wait_ready(self, seconds: float) -> None:
        """Return when every server answers its health check.

        Raises:
            FleetError: one ended before, or the time is over.
        """
        began = time.monotonic()
        reported = began
        while waiting := [server for server in self.servers if not server.ready]:
            self._fail_if_any(wait_for_exit(self.servers, HEALTH_INTERVAL_SECONDS))
            now = time.monotonic()
            for server in waiting:
                if server.check_ready():
                    self._report(f"{server.spec.name}: ready after {now - began:.0f} s")
            if now - began > seconds:
                self._fail_if_late([server for server in waiting if not server.ready], seconds)
            if now - reported > REPORT_INTERVAL_SECONDS:
                reported = now
                names = ", ".join(server.spec.name for server in waiting if not server.ready)
                if names:
                    self._report(f"waiting for {names} ({now - began:.0f} s)")

    def watch(self, seconds: float | None = None) -> None:
        """Sleep until a server ends, which raises `FleetError`, or until the time is over."""
        self._fail_if_any(wait_for_exit(self.servers, seconds))

    def stop(self) -> None:
        """Stop every server and all children of each; returns when all are gone."""
        try:
            for server in reversed(self.servers):
                server.request_stop()
            deadline = time.monotonic() + STOP_WAIT_SECONDS
            while running := [server for server in self.servers if not server.exited]:
                if time.monotonic() >= deadline:
                    break
                wait_for_exit(running, deadline - time.monotonic())
        finally:
            # Also the way of a second Ctrl-C: nothing may be left behind.
            for server in self.servers:
                server.kill()
            self._servers.clear()

    def _fail_if_any(self, ended: list[ServerProcess]) -> None:
        if ended:
            server = ended[0]
            how = server.exit_text
            ended_how = f"unexpectedly ({how})" if how == "exit code 0" else f"with {how}"
            raise FleetError(
                f"{server.spec.name} ended {ended_how}. {_cause_in_log(server)}{_end_of_log(server)}"
            )

    def _fail_if_late(self, late: list[ServerProcess], seconds: float) -> None:
        if late:
            server = late[0]
            raise FleetError(
                f"{server.spec.name} is not ready after {seconds:.0f} s (--startup-seconds sets this limit). "
                f"{_end_of_log(server)}"
            )


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, by KeyboardInterrupt, so that what it started is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_of_log(server: ServerProcess) -> str:
    try:
        tail = "\n".join(without_noise(server.log_lines())[-FAILURE_LOG_LINES:])
    except OSError as error:
        tail = f"(no log: {error})"
    return f"The end of its log ({server.spec.log}):\n{tail}"


def _cause_in_log(server: ServerProcess) -> str:
    try:
        found = cause(server.log_lines())
    except OSError:
        # The end of the log, which follows, says that there is none.
        return ""
    return f"The cause, as far as its log tells: {found}\n" if found else ""
