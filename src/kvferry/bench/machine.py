"""The machine under a comparison: what it is, and how much of it others used meanwhile."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

PROC = Path("/proc")
OTHERS_SHARE_MAX = 0.05
"""Of all processors' time. What others use beyond it is in the figures: on two cores, a tenth of a core."""
_USED = slice(0, 3), slice(5, 7)
"""User, nice, system; interrupts. What guests use is within user; waiting and idling are none of it."""
_STOLEN = 7
"""Taken by the host under a virtual machine."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What it is."""

    processor: str
    cores: int
    memory_bytes: int
    kernel: str

    @property
    def words(self) -> str:
        """On one line."""
        return (
            f"{self.cores} cores of {self.processor or 'an unnamed processor'}, "
            f"{self.memory_bytes / 2**30:.0f} GiB of memory, {self.kernel}"
        )


class MachineUse(msgspec.Struct, frozen=True, kw_only=True):
    """Whose processor time the machine spent during a cell, in seconds of one core."""

    seconds: float
    """How long the cell was watched."""
    cores: int
    used: float
    """By everything that runs here."""
    engines: float
    load_generator: float
    stolen: float = 0.0
    """Wanted here and given to others by the host of a virtual machine."""

    @property
    def others(self) -> float:
        """By processes that have nothing to do with the comparison, the kernel's own work included."""
        return max(self.used - self.engines - self.load_generator, 0.0)

    @property
    def others_share(self) -> float:
        """What others used, or the host took, of all processors' time."""
        return (self.others + self.stolen) / max(self.seconds * self.cores, 1e-9)


@dataclass(frozen=True, slots=True)
class Moment:
    """How much processor time everybody has used so far."""

    at: float
    cores: int
    used: float
    stolen: float
    engines: float
    load_generator: float


def machine() -> Machine | None:
    """This machine; None where there is no `/proc`."""
    try:
        stat, processors, memory = (_read(name) for name in ("stat", "cpuinfo", "meminfo"))
    except OSError:
        return None
    named = (
        line.partition(":")[2].strip() for line in processors.splitlines() if line.startswith("model name")
    )
    total = next((line.split()[1] for line in memory.splitlines() if line.startswith("MemTotal:")), "0")
    return Machine(
        processor=next(named, platform.machine()),
        cores=_cores(stat),
        memory_bytes=int(total) * 1024,
        kernel=f"{platform.system()} {platform.release()}",
    )


def moment(engines: float) -> Moment | None:
    """Now; `engines` is what the engines' processes have used so far. None where there is no `/proc`."""
    try:
        stat = _read("stat")
    except OSError:
        return None
    ticks = [int(field) for field in stat.splitlines()[0].split()[1:]]
    per_second = os.sysconf("SC_CLK_TCK")
    return Moment(
        at=time.monotonic(),
        cores=_cores(stat),
        used=sum(sum(ticks[part]) for part in _USED) / per_second,
        stolen=sum(ticks[_STOLEN : _STOLEN + 1]) / per_second,
        engines=engines,
        load_generator=time.process_time(),
    )


def use(before: Moment | None, after: Moment | None) -> MachineUse | None:
    """What was used in between; None where nobody could tell."""
    if before is None or after is None:
        return None
    return MachineUse(
        seconds=round(after.at - before.at, 3),
        cores=after.cores,
        used=round(after.used - before.used, 3),
        # A process that has ended meanwhile takes its time along.
        engines=round(max(after.engines - before.engines, 0.0), 3),
        load_generator=round(after.load_generator - before.load_generator, 3),
        stolen=round(after.stolen - before.stolen, 3),
    )


def _cores(stat: str) -> int:
    return sum(line.startswith("cpu") and line[3:4].isdigit() for line in stat.splitlines())


def _read(name: str) -> str:
    return (PROC / name).read_text(encoding="utf-8", errors="replace")
