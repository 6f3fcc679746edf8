"""What a comparison has measured, in a directory: its options, and one JSON line per session and cell.

Lines are appended as soon as they are known, so an interrupted run keeps what it has, and the same command
goes on from there. `PLAN` holds the options; other options are refused, because their figures cannot stand
together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvferry.bench.flags import differences, refusal
from kvferry.bench.grid import Cell
from kvferry.bench.machine import Machine, MachineUse
from kvferry.bench.phases import Phases
from kvferry.bench.plan import Options, Session
from kvferry.bench.records import Load
from kvferry.errors import UsageError

PLAN = "plan.json"
RESULTS = "results.jsonl"

Side = str
"""`prefill` or `decode`."""


class HookCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one hook has cost the main thread during a cell.

    `idle_*` is the part of the calls in which it had nothing to do for any request.
    """

    side: str
    hook: str
    count: int
    seconds: float
    cpu_seconds: float
    max_seconds: float
    idle_count: int = 0
    idle_seconds: float = 0.0
    idle_cpu_seconds: float = 0.0

    @property
    def busy_count(self) -> int:
        """Calls that had to do with a request."""
        return self.count - self.idle_count

    @property
    def busy_seconds(self) -> float:
        """Their time."""
        return max(self.seconds - self.idle_seconds, 0.0)

    @property
    def busy_cpu_seconds(self) -> float:
        """Their CPU time."""
        return max(self.cpu_seconds - self.idle_cpu_seconds, 0.0)


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer than the cost model says the steps of an engine took during a cell, in seconds."""

    count: int
    modelled: float
    """What the step in the middle should have taken."""
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class EngineCost(msgspec.Struct, frozen=True, kw_only=True):
    """One engine during a cell."""

    cpu_seconds: float
    parts: dict[str, float] = {}
    """CPU time by what the engine's threads do."""
    hooks: tuple[HookCost, ...] = ()
    steps: StepCost | None = None
    pages: int = 0
    """Received and compared with what they should hold."""
    mismatches: int = 0
    counters: dict[str, float] = {}
    """What its metrics have counted, summed over labels."""


class CellRun(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """One cell of one connector in one repeat."""

    connector: str
    repeat: int
    cell: tuple[float, int]
    load: Load
    phases: tuple[Phases, ...]
    engines: dict[Side, EngineCost]
    machine: MachineUse | None = None
    """None in runs that are older than it."""

    @property
    def key(self) -> tuple[str, int, Cell]:
        """What no other run of the comparison has."""
        return self.connector, self.repeat, Cell(*self.cell)


class SessionRun(msgspec.Struct, frozen=True, kw_only=True, tag="session"):
    """What was measured of a pair of engines before its first cell: while it warmed up, and idle."""

    connector: str
    repeat: int
    startup_seconds: float
    idle_seconds: float
    idle_cpu_seconds: dict[Side, float]
    idle_thread_seconds: dict[Side, float] = {}
    """CPU time of kvferry's own threads; the rest is vLLM's."""
    pages: int = 0
    """Compared while the engines warmed up."""
    mismatches: int = 0
    machine: Machine | None = None


Line = CellRun | SessionRun
_LINES = msgspec.json.Decoder(Line)


class Results:
    """The directory of one comparison."""

    def __init__(self, directory: Path, options: Options, lines: Sequence[Line]) -> None:
        self.directory = directory
        self.options = options
        self._lines = list(lines)

    @property
    def runs(self) -> list[CellRun]:
        """Each cell that has been run, once."""
        return list({line.key: line for line in self._lines if isinstance(line, CellRun)}.values())

    @property
    def sessions(self) -> list[SessionRun]:
        """Each pair of engines that was started."""
        return [line for line in self._lines if isinstance(line, SessionRun)]

    def missing(self, session: Session) -> Session:
        """The session with only those cells that have not been run."""
        done = {run.key for run in self.runs}
        cells = [cell for cell in session.cells if (session.connector, session.repeat, cell) not in done]
        return Session(session.repeat, session.connector, tuple(cells))

    def append(self, line: Line) -> None:
        """Keep one more line, on the disk before this returns."""
        self._lines.append(line)
        with (self.directory / RESULTS).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def open_results(directory: Path, options: Options) -> Results:
    """Start a comparison in a directory, or go on with the one that is there.

    Raises:
        UsageError: what is there was measured with other options, or is no comparison, or cannot be read.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / PLAN).exists():
        found = read_results(directory)
        differing = differences(options, found.options)
        if differing:
            raise UsageError(refusal(directory, differing))
        return found
    if any(directory.iterdir()):
        raise UsageError(f"--output {directory} is neither empty nor a comparison; choose another directory")
    text = msgspec.json.format(msgspec.json.encode(options), indent=2)
    fresh = directory / f"{PLAN}.new"
    fresh.write_bytes(text + b"\n")
    fresh.replace(directory / PLAN)
    return Results(directory, options, ())


def read_results(directory: Path) -> Results:
    """What is in a directory. A last line that was cut off is taken away.

    Raises:
        UsageError: there is no comparison in it, or a file cannot be read.
    """
    try:
        options = msgspec.json.decode((directory / PLAN).read_bytes(), type=Options)
    except FileNotFoundError as error:
        raise UsageError(f"{directory} holds no comparison: there is no {PLAN}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{directory / PLAN} cannot be read: {error}; remove the directory") from error
    return Results(directory, options, _read_lines(directory / RESULTS))


def _read_lines(path: Path) -> list[Line]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    lines = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            lines.append(_LINES.decode(line))
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path}, line {number} cannot be read: {error}; remove that line") from error
    return lines
