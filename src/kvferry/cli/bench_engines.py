"""The emulated engines of `kvferry bench compare`: one prefill and one decode engine per connector."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.bench.connectors import Connector
from kvferry.bench.results import Side
from kvferry.cli.emulated import EmulatedEngine, write_emulated_model
from kvferry.cli.fleet import Fleet
from kvferry.cli.ports import free_ports
from kvferry.cli.processes import ServerProcess, ServerSpec

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_TICKS = os.sysconf("SC_CLK_TCK")
_ENGINE = "VLLM::Engine"
"""How the name of an engine core's process begins; a server's other processes speak HTTP."""
_THREADS = {
    "kvferry": ("kvferry-transf", "kvferry-direct", "kvferry-resolv", "kvferry-probe"),
    "emulator": ("kvferry-device", "kvferry-journal"),
}
"""Parts of an engine core by how the names of their threads begin, as Linux cuts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What all engines of a comparison are started with."""

    preset: str
    content_scale: int
    cache_bytes: int
    step_tokens: int
    """Tokens that one step computes at most: the chunks of long prompts."""
    options: Mapping[str, Any]
    """More keys of the emulator."""


class EmulatedPair:
    """A running pair, as the benchmark sees it."""

    def __init__(self, fleet: Fleet, journals: Mapping[Side, Path]) -> None:
        self._fleet = fleet
        self.journals = journals
        self.urls = {side: fleet[side].spec.url for side in journals}

    def cpu_seconds(self) -> dict[Side, float]:
        """CPU time of each engine's processes so far; those that have ended are no longer counted."""
        return {side: cpu_seconds(self._fleet[side]) for side in self.urls}

    def part_seconds(self) -> dict[Side, dict[str, float]]:
        """CPU time of each engine so far, by the parts that `part_seconds` names."""
        return {side: part_seconds(self._fleet[side]) for side in self.urls}

    def check(self) -> None:
        """Raise `FleetError` if an engine has ended."""
        self._fleet.watch(0.0)


def launcher(
    emulation: Emulation, directory: Path, report: Callable[[str], None], startup_seconds: float
) -> Callable[[Connector, int], Any]:
    """A function that starts a connector's engines for a repeat; logs and journals go into `directory`."""
    model = directory / "model"
    write_emulated_model(model, preset=emulation.preset, content_scale=emulation.content_scale)

    @contextmanager
    def launch(connector: Connector, repeat: int) -> Iterator[EmulatedPair]:
        home = directory / "engines" / f"{repeat}-{connector.name}"
        home.mkdir(parents=True, exist_ok=True)
        sides: list[Side] = ["prefill", "decode"] if connector.needs_prefill else ["decode"]
        journals = {side: home / f"{side}.jsonl" for side in sides}
        ports = free_ports(2 * len(sides))
        specs = [
            engine(emulation, connector, side, model, home, (ports[2 * index], ports[2 * index + 1]))
            for index, side in enumerate(sides)
        ]
        with Fleet(report=report) as fleet:
            fleet.start(specs)
            fleet.wait_ready(startup_seconds)
            yield EmulatedPair(fleet, journals)

    return launch


def engine(
    emulation: Emulation, connector: Connector, side: Side, model: Path, home: Path, ports: tuple[int, int]
) -> ServerSpec:
    """One engine; `ports` are its HTTP port and the side channel's."""
    options = {
        **emulation.options,
        "journal": str((home / f"{side}.jsonl").resolve()),
        "report": str((home / f"{side}.json").resolve()),
    }
    if connector.kind == "baseline":
        # Nothing was written, so there is nothing to compare with.
        options["verify"] = "off"
    made = EmulatedEngine(
        name=side,
        transfer=transfer_config(connector, side),
        preset=emulation.preset,
        options=options | {"content_scale": emulation.content_scale},
        cache_bytes=emulation.cache_bytes,
        step_tokens=emulation.step_tokens,
        environment=_side_channel(connector, ports[1]),
    )
    return made.server(model, ports[0], home / f"{side}.log")


def transfer_config(connector: Connector, side: Side) -> dict[str, Any]:
    """The value of `--kv-transfer-config`."""
    if connector.kind == "baseline":
        return {
            "kv_connector": "ResidentConnector",
            "kv_connector_module_path": "kvferry.emulator.baseline",
            "kv_role": "kv_both",
            "engine_id": f"{side}-0",
        }
    config: dict[str, Any] = {"kv_role": ROLES[side], "engine_id": f"{side}-0"}
    config |= {"kv_connector": connector.kv_connector, "kv_load_failure_policy": "recompute"}
    if connector.kind == "ours":
        own = {"side_channel_host": "127.0.0.1", "side_channel_port": 0}
        return config | {"kv_connector_extra_config": {**own, **connector.extra}}
    return config | {"kv_buffer_device": "cpu", "kv_connector_extra_config": dict(connector.extra)}


def cpu_seconds(server: ServerProcess) -> float:
    """CPU time, user and system, of the processes of a server that are running."""
    return sum(_ticks(pid) for pid in server.members()) / _TICKS


def part_seconds(server: ServerProcess) -> dict[str, float]:
    """CPU time of the threads of a server that are running, by what they do.

    `http`: the processes that speak HTTP. `main`: the engine core's main thread, where steps are planned and
    a connector's hooks run. `kvferry`: its threads, and those that its backends have started. `emulator`: the
    emulated device and the journal. `other`: what is left of the engine core; threads that NIXL has started
    for vLLM's connectors are here.
    """
    found = dict.fromkeys(("http", "main", *_THREADS, "other"), 0)
    for pid in server.members():
        in_core = _read(Path(f"/proc/{pid}/comm")).startswith(_ENGINE)
        for task in Path(f"/proc/{pid}/task").glob("*"):
            part = "http" if not in_core else "main" if task.name == str(pid) else _part(task)
            # The first figure is the time on a core, in nanoseconds.
            found[part] += int((_read(task / "schedstat").split() or ["0"])[0])
    return {part: nanoseconds / 1e9 for part, nanoseconds in found.items()}


def _part(task: Path) -> str:
    name = _read(task / "comm")
    return next((part for part, begins in _THREADS.items() if name.startswith(begins)), "other")


def _read(path: Path) -> str:
    """Empty for a thread that has ended meanwhile."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _ticks(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _side_channel(connector: Connector, port: int) -> dict[str, str]:
    if connector.kind != "stock":
        return {}
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
