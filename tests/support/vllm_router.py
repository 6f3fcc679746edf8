"""`vllm-router` from PyPI, the router of the vLLM project, in front of engines of ours."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kvferry.cli.ports import free_ports
from kvferry.cli.processes import ServerSpec

VERSION = "0.1.17"


def program() -> str:
    """Where it is: beside this interpreter, where `make setup` puts it, or on the path."""
    found = shutil.which("vllm-router", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, f"vllm-router {VERSION} is not installed; `make setup` does that"
    return found


def spec_of(prefill: Sequence[str], decode: Sequence[str], log: Path) -> ServerSpec:
    """How it is started for these engines, with its own defaults for everything else."""
    port, metrics_port = free_ports(2)
    command = [program(), "--vllm-pd-disaggregation", "--policy", "round_robin"]
    for url in prefill:
        command += ["--prefill", url]
    for url in decode:
        command += ["--decode", url]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--worker-startup-check-interval", "1"]
    return ServerSpec(name="vllm-router", command=tuple(command), host="127.0.0.1", port=port, log=log)
