"""What the machine is and who used it, read from made-up files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.bench import machine as subject
from kvferry.bench.machine import MachineUse, machine, moment, use

TICKS = os.sysconf("SC_CLK_TCK")


def stat(
    user: float, system: float, *, idle: float = 0.0, interrupts: float = 0.0, stolen: float = 0.0
) -> str:
    ticks = (user, 0, system, idle, 50, 0, interrupts, stolen, user, 0)
    line = " ".join(str(round(seconds * TICKS)) for seconds in ticks)
    return f"cpu  {line}\ncpu0 1 2 3\ncpu1 1 2 3\nintr 5\n"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(subject, "PROC", tmp_path)
    (tmp_path / "stat").write_text(stat(100.0, 50.0))
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Imagined 9000 @ 3 GHz\nmodel name\t: other\n"
    )
    (tmp_path / "meminfo").write_text("MemTotal:       2097152 kB\nMemFree: 1 kB\n")
    return tmp_path


@pytest.mark.usefixtures("proc")
def test_the_machine_is_told_by_processor_cores_memory_and_kernel() -> None:
    found = machine()
    assert found is not None
    assert (found.processor, found.cores, found.memory_bytes) == ("Imagined 9000 @ 3 GHz", 2, 2 << 30)
    assert found.kernel == f"Linux {os.uname().release}"
    assert found.words.startswith("2 cores of Imagined 9000 @ 3 GHz, 2 GiB of memory, Linux ")


def test_others_are_who_is_neither_engine_nor_load_generator(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idling, waiting and what guests use a second time are not counted; interrupts are."""
    own = iter([3.0, 3.5])
    times = iter([20.0, 30.0])
    monkeypatch.setattr(subject.time, "process_time", lambda: next(own))
    monkeypatch.setattr(subject.time, "monotonic", lambda: next(times))
    before = moment(engines=7.0)
    (proc / "stat").write_text(stat(104.0, 51.0, idle=14.0, interrupts=1.0, stolen=0.5))
    found = use(before, moment(engines=10.0))
    assert found == MachineUse(seconds=10.0, cores=2, used=6.0, engines=3.0, load_generator=0.5, stolen=0.5)
    assert found.others == pytest.approx(2.5)
    assert found.others_share == pytest.approx(3.0 / 20.0)


def test_engines_that_are_counted_a_tick_late_make_no_negative_others() -> None:
    found = MachineUse(seconds=10.0, cores=2, used=5.0, engines=5.01, load_generator=0.2)
    assert (found.others, found.others_share) == (0.0, 0.0)


def test_where_there_is_no_proc_nothing_is_told(proc: Path) -> None:
    now = moment(1.0)
    (proc / "stat").unlink()
    assert machine() is None
    assert moment(1.0) is None
    assert use(now, None) is use(None, now) is None
