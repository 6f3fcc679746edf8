"""The import contracts of pyproject.toml hold, and every package that exists has its contract."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {path.parent.name for path in (ROOT / "src" / "kvferry").glob("*/__init__.py")}


def contracts() -> dict[str, dict[str, object]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return {contract["name"]: contract for contract in listed}


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_bench_is_bound_to_http() -> None:
    bound = contracts()["bench measures from outside"]
    assert bound["source_modules"] == ["kvferry.bench"]
    assert {"kvferry.agent", "kvferry.transport", "nixl", "torch", "vllm"} <= set(bound["forbidden_modules"])


def test_only_connector_and_emulator_use_vllm() -> None:
    importers = contracts()["vllm stays in the adapters"]["allowed_importers"]
    assert importers == ["kvferry.connector", "kvferry.emulator"]


def test_simulator_never_meets_hardware_as_soon_as_it_exists() -> None:
    bound = contracts().get("the simulator never meets real hardware")
    assert ("simulator" in PACKAGES) == (bound is not None)
    if bound is not None:
        assert bound["source_modules"] == ["kvferry.simulator"]
        assert bound["forbidden_modules"] == ["kvferry.transport.nixl", "nixl", "torch", "vllm"]
