"""One server process: started with a log file, watched without spinning, stopped with all its children.

A server runs under a guard (`kvferry.cli.guard`) in a session of its own: a Ctrl-C in the terminal reaches
only us, so the order of stopping is ours, and the guard ends the server should we die in whatever way.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TAIL_BYTES_MAX = 256 * 1024
HEALTH_SECONDS_MAX = 2.0
STOP_SECONDS_MAX = 15.0
PAUSE_SECONDS_MAX = 5.0
"""A process that waits for a disk stops when that is over."""
_PAUSE_INTERVAL_SECONDS = 0.005
# Letters of /proc.
_STOPPED, _ENDED = frozenset("Tt"), frozenset("ZX")
_SIGNALS = frozenset(int(number) for number in signal.Signals)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What to start. `environment` is laid over our own; `host` and `port` are where it will listen."""

    name: str
    command: tuple[str, ...]
    host: str
    port: int
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    health_path: str = "/health"

    @property
    def url(self) -> str:
        """Where the server answers, without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class ServerProcess:
    """A started server. Call `kill` at last, even when it has ended by itself: its children may be left."""

    def __init__(self, spec: ServerSpec) -> None:
        """Start it.

        Raises:
            OSError: the program or the log file cannot be opened.
        """
        self.spec = spec
        self.ready = False
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvferry.cli.guard", str(STOP_SECONDS_MAX), *spec.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(spec.environment),
                start_new_session=True,
            )
        self._exit_file = os.pidfd_open(self.pid)

    @property
    def pid(self) -> int:
        """Id of the guard, which is also that of the process group of the server and its children."""
        return self._process.pid

    def fileno(self) -> int:
        """Becomes readable when the process ends."""
        return self._exit_file

    @property
    def exited(self) -> bool:
        """Whether it has ended; it is not reaped, so that its group's id stays its own until `kill`."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def exit_text(self) -> str:
        """How it ended, in words; call it only once `exited`."""
        if self._process.returncode is not None:
            code = self._process.returncode
        else:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            assert status is not None
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        # The guard shows the server's signal as a shell does.
        number = code - 128 if code > 128 else -code
        return f"signal {signal.Signals(number).name}" if number in _SIGNALS else f"exit code {code}"

    def answers(self) -> bool:
        """Whether its health endpoint says that it is well, now."""
        return _answers_ok(self.spec)

    def check_ready(self) -> bool:
        """Ask its health endpoint once; remembers a yes."""
        if not self.ready:
            self.ready = _answers_ok(self.spec)
        return self.ready

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log, or why there are none."""
        try:
            return "\n".join(self.log_lines()[-lines:])
        except OSError as error:
            return f"(no log: {error})"

    def log_lines(self) -> list[str]:
        """The lines of the last `TAIL_BYTES_MAX` of its log; the first may lack its beginning.

        Raises:
            OSError: the log cannot be read.
        """
        with self.spec.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - TAIL_BYTES_MAX))
            return log.read(TAIL_BYTES_MAX).decode("utf-8", errors="replace").splitlines()

    def request_stop(self) -> None:
        """Ask for an orderly end: SIGTERM to the server, SIGKILL to its group after `STOP_SECONDS_MAX`."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def members(self) -> list[int]:
        """Process ids of the server and its children, without the guard and what has ended."""
        if self._process.returncode is not None:
            return []
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
        return [pid for pid in pids if pid != self.pid and _group(pid) == self.pid]

    def pause(self) -> None:
        """SIGSTOP the server and its children, until `resume`; returns when all have stopped.

        The guard goes on: should we die meanwhile, it still ends the stopped ones.
        """
        deadline = time.monotonic() + PAUSE_SECONDS_MAX
        # A process may start another before its own stop reaches it.
        while running := [pid for pid in self.members() if _is_running(pid)]:
            _signal_each(running, signal.SIGSTOP)
            if time.monotonic() > deadline:
                return
            time.sleep(_PAUSE_INTERVAL_SECONDS)

    def resume(self) -> None:
        """SIGCONT what `pause` has stopped; does no harm to a running or ended server."""
        _signal_each(self.members(), signal.SIGCONT)

    def memory_bytes(self) -> int:
        """Resident memory of the server and its children; pages that they share count for each."""
        return sum(_resident_bytes(pid) for pid in self.members())

    def kill(self) -> None:
        """SIGKILL the server with all its children, now, and reap it. Can be called again."""
        if self._process.returncode is not None:
            return
        # It is not reaped yet, so the id cannot be another's; at worst the group is empty.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.request_stop()
        if self._exit_file >= 0:
            os.close(self._exit_file)
            self._exit_file = -1


def wait_for_exit(processes: Sequence[ServerProcess], seconds: float | None) -> list[ServerProcess]:
    """Sleep until one of the processes ends or the time is over; those that have ended."""
    poller = select.poll()
    for process in processes:
        # An id cannot be waited on after `kill` has reaped it; its end is then known anyway.
        if not process.exited:
            poller.register(process, select.POLLIN)
    if all(not process.exited for process in processes):
        poller.poll(None if seconds is None else max(seconds, 0) * 1000)
    return [process for process in processes if process.exited]


def _group(pid: int) -> int | None:
    """A process's group, None if it has ended."""
    fields = _stat(pid)
    return int(fields[2]) if fields else None


def _is_running(pid: int) -> bool:
    """Whether it has neither ended nor been stopped."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in _STOPPED


def _stat(pid: int) -> list[str]:
    """The fields behind a process's name in /proc: state, parent, group, ...; none if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    fields = text.rpartition(")")[2].split()
    return [] if fields[0] in _ENDED else fields


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _signal_each(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _answers_ok(spec: ServerSpec) -> bool:
    connection = http.client.HTTPConnection(spec.host, spec.port, timeout=HEALTH_SECONDS_MAX)
    try:
        connection.request("GET", spec.health_path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
