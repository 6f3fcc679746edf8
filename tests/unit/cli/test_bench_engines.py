"""The engines of a comparison: connector, role, files and environment of each."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the emulator's options are vLLM's")

from kvferry.agent.threads import show_name
from kvferry.bench.connectors import BASELINE, CONNECTORS
from kvferry.cli import bench_engines
from kvferry.cli.bench_engines import Emulation, cpu_seconds, engine, part_seconds, transfer_config
from kvferry.cli.fleet import Fleet
from tests.support.stub_fleet import eventually, stub_spec

EMULATION = Emulation(
    preset="qwen3-32b-unsaturated",
    content_scale=4,
    cache_bytes=1 << 30,
    step_tokens=2048,
    options={"fragmentation": "none"},
)


def value(command: tuple[str, ...], option: str) -> str:
    return command[command.index(option) + 1]


@pytest.mark.parametrize(
    ("name", "connector", "extra"),
    [
        ("ferry-push", "FerryConnector", {"side_channel_host": "127.0.0.1", "side_channel_port": 0}),
        ("vllm-push", "NixlPushConnector", {}),
        ("vllm-pull-sync", "NixlConnector", {"num_threads": 0}),
    ],
)
def test_each_connector_is_loaded_with_its_settings(
    name: str, connector: str, extra: dict[str, object]
) -> None:
    for side, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        config = transfer_config(CONNECTORS[name], side)
        assert (config["kv_connector"], config["kv_role"]) == (connector, role)
        assert config["kv_connector_extra_config"] == extra
        assert config["engine_id"] == f"{side}-0"
        assert ("kv_buffer_device" in config) == name.startswith("vllm")


def test_the_baseline_receives_nothing_and_compares_nothing(tmp_path: Path) -> None:
    config = transfer_config(CONNECTORS[BASELINE], "decode")
    assert config["kv_connector"] == "ResidentConnector"
    assert config["kv_connector_module_path"] == "kvferry.emulator.baseline"
    spec = engine(EMULATION, CONNECTORS[BASELINE], "decode", tmp_path, tmp_path, (8100, 5600))
    assert json.loads(value(spec.command, "--additional-config"))["emulator"]["verify"] == "off"


def test_an_engine_keeps_its_files_in_its_sessions_directory(tmp_path: Path) -> None:
    spec = engine(EMULATION, CONNECTORS["vllm-push"], "decode", tmp_path / "model", tmp_path, (8100, 5600))
    options = json.loads(value(spec.command, "--additional-config"))["emulator"]
    assert options["journal"] == str(tmp_path / "decode.jsonl")
    assert options["report"] == str(tmp_path / "decode.json")
    assert (options["preset"], options["content_scale"], options["fragmentation"]) == (
        "qwen3-32b-unsaturated",
        4,
        "none",
    )
    assert value(spec.command, "--max-num-batched-tokens") == "2048"
    assert "--no-enable-prefix-caching" in spec.command
    assert (spec.host, spec.port, spec.log) == ("127.0.0.1", 8100, tmp_path / "decode.log")
    assert spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"


def test_only_vllms_connectors_get_a_side_channel_from_the_environment(tmp_path: Path) -> None:
    spec = engine(EMULATION, CONNECTORS["ferry-push"], "prefill", tmp_path, tmp_path, (8100, 5600))
    assert not [name for name in spec.environment if "SIDE_CHANNEL" in name]


def test_cpu_time_is_that_of_the_server_and_ends_with_it(tmp_path: Path) -> None:
    spec = stub_spec(tmp_path, "engine")
    with Fleet(report=lambda line: None) as fleet:
        fleet.start([spec])
        fleet.wait_ready(20)
        used = cpu_seconds(fleet["engine"])
        # A Python server that answers has used some, and it cannot have used more than all cores since then.
        assert 0 < used < 20 * (os.cpu_count() or 1)
        parts = part_seconds(fleet["engine"])
        assert parts["http"] > 0, "no part of it is an engine core"
        assert sum(parts.values()) == parts["http"]
        fleet["engine"].kill()
        assert cpu_seconds(fleet["engine"]) == 0


def test_an_engine_cores_threads_are_told_apart_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process plays the engine core."""
    monkeypatch.setattr(bench_engines, "_ENGINE", Path("/proc/self/comm").read_text().strip())
    server: Any = SimpleNamespace(members=lambda: [os.getpid()])
    done = threading.Event()

    def work() -> None:
        show_name()
        while not done.is_set():
            pass

    names = ("kvferry-transfer", "kvferry-device", "pt_main_thread")
    threads = [threading.Thread(target=work, name=name) for name in names]
    for thread in threads:
        thread.start()
    try:
        for part in ("main", "kvferry", "emulator", "other"):
            assert eventually(lambda part=part: part_seconds(server)[part] > 0), part
        assert part_seconds(server)["http"] == 0
    finally:
        done.set()
        for thread in threads:
            thread.join()
