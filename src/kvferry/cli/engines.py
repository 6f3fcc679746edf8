"""From "so many prefill and decode engines of this model" to the server processes that make it."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvferry.cli.accelerators import split_accelerators, split_cores, visible_accelerators, vllm_runs_on_cpu
from kvferry.cli.fleet import Fleet
from kvferry.cli.ports import claim_port, free_ports
from kvferry.cli.processes import ServerSpec
from kvferry.errors import UsageError

Role = Literal["prefill", "decode", "reference"]

KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
BOTH_WAYS = "kv_both"
"""The role of engines of either kind where KV flows back."""
ENGINES_MAX = 256
CPU_CACHE_GIB_DEFAULT = 1
TENSOR_OPTIONS = ("--tensor-parallel-size", "-tp")
PIPELINE_OPTIONS = ("--pipeline-parallel-size", "-pp")
EXECUTOR_OPTION = "--distributed-executor-backend"
# On the CPU vLLM puts even a single rank behind a shared-memory queue that loses wake-ups when cores are
# short, and steps then stall for seconds. This is what vLLM uses for a single GPU.
IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What to start on this machine."""

    model: str
    served_name: str
    prefill: int = 1
    decode: int = 1
    reference: bool = False
    """One more engine, alone and without a connector, to compare answers with."""
    prefill_arguments: tuple[str, ...] = ()
    decode_arguments: tuple[str, ...] = ()
    """Also those of the reference engine."""
    router_arguments: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    logs: Path = Path(".kvferry/logs")
    cache_gib: int | None = None
    """KV cache of each engine; None leaves it to vLLM, or to a small default on the CPU."""
    accelerators: tuple[str, ...] = ()
    """Per engine, in the order of `roles`; empty lets `gpus_per_engine` decide."""
    gpus_per_engine: int | None = None
    prefill_config: Mapping[str, object] = field(default_factory=dict)
    """More keys for the prefill engines' `kv_connector_extra_config`."""
    decode_config: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    both_directions: bool = False
    """Decode engines keep what they have decoded, and prefill engines receive it with the next turn."""

    def __post_init__(self) -> None:
        for option, count in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not 1 <= count <= ENGINES_MAX:
                raise UsageError(f"{option} must be from 1 to {ENGINES_MAX}, not {count}")
        if self.cache_gib is not None and self.cache_gib < 1:
            raise UsageError(f"--kv-cache-gib must be at least 1, not {self.cache_gib}")
        if self.gpus_per_engine is not None and self.gpus_per_engine < 1:
            raise UsageError(f"--gpus-per-engine must be at least 1, not {self.gpus_per_engine}")
        if self.accelerators and len(self.accelerators) != len(self.roles):
            raise UsageError(
                f"--accelerators names {len(self.accelerators)} engines, but {len(self.roles)} are to be "
                f"started: {', '.join(self.names)}"
            )

    @property
    def roles(self) -> list[Role]:
        """The role of each engine, prefill first, reference last."""
        roles: list[Role] = []
        roles += ["prefill"] * self.prefill
        roles += ["decode"] * self.decode
        roles += ["reference"] * self.reference
        return roles

    @property
    def names(self) -> list[str]:
        """The name of each engine, which is also its engine id."""
        prefill = [f"prefill-{index}" for index in range(self.prefill)]
        decode = [f"decode-{index}" for index in range(self.decode)]
        return prefill + decode + ["reference"] * self.reference

    def arguments(self, role: Role) -> tuple[str, ...]:
        """The vLLM arguments that the operator gave for engines of this role."""
        return self.prefill_arguments if role == "prefill" else self.decode_arguments


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a started deployment answers."""

    router: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    reference: str | None


def bring_up(fleet: Fleet, deployment: Deployment, *, startup_seconds: float) -> Endpoints:
    """Start the engines, then the router, and return when all are ready.

    Raises:
        UsageError: something is missing or taken on this machine.
        FleetError: a server ended or was not ready in time.
    """
    _check(deployment, startup_seconds)
    router_port = claim_port(deployment.host, deployment.port)
    engines = engine_specs(deployment)
    fleet.start(engines)
    fleet.wait_ready(startup_seconds)
    urls = {
        role: tuple(s.url for s, r in zip(engines, deployment.roles, strict=True) if r == role)
        for role in KV_ROLES
    }
    router = router_spec(deployment, urls["prefill"], urls["decode"], router_port)
    fleet.start([router])
    fleet.wait_ready(startup_seconds)
    reference = engines[-1].url if deployment.reference else None
    return Endpoints(router.url, urls["prefill"], urls["decode"], reference)


def _check(deployment: Deployment, startup_seconds: float) -> None:
    """That what is common to all commands that start engines can work."""
    if not 0 < startup_seconds < math.inf:
        raise UsageError(
            f"--startup-seconds must be greater than 0, and have an end, not {startup_seconds:g}; "
            "engines take tens of seconds to load"
        )
    try:
        deployment.logs.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=deployment.logs).close()
    except OSError as error:
        raise UsageError(
            f"--log-dir {deployment.logs} takes no files: {error.strerror}; name another directory"
        ) from error


def engine_specs(deployment: Deployment) -> list[ServerSpec]:
    """One server per engine, on free ports of the loopback interface."""
    on_cpu = vllm_runs_on_cpu()
    ports = free_ports(len(deployment.roles))
    shares = _cpu_environments(deployment) if on_cpu else _gpu_environments(deployment)
    return [
        ServerSpec(
            name=name,
            command=_engine_command(deployment, role, name, port, on_cpu=on_cpu),
            host="127.0.0.1",
            port=port,
            log=deployment.logs / f"{name}.log",
            environment=_common_environment(deployment) | share | dict(deployment.environment),
        )
        for name, role, port, share in zip(deployment.names, deployment.roles, ports, shares, strict=True)
    ]


def router_spec(
    deployment: Deployment, prefill: Sequence[str], decode: Sequence[str], port: int
) -> ServerSpec:
    """The router over those engines."""
    command = [
        sys.executable,
        "-m",
        "kvferry.cli.main",
        "router",
        "--host",
        deployment.host,
        "--port",
        str(port),
    ]
    for url in prefill:
        command += ["--prefill", url]
    for url in decode:
        command += ["--decode", url]
    return ServerSpec(
        name="router",
        command=(*command, *deployment.router_arguments),
        host=deployment.host,
        port=port,
        log=deployment.logs / "router.log",
    )


def kv_transfer_config(
    role: Role, engine: str, extra: Mapping[str, object], *, both_directions: bool = False
) -> dict[str, object]:
    """The value of `--kv-transfer-config` of an engine. The side channel takes any free port."""
    if both_directions:
        extra = {"bidirectional_kv_xfer": True, **extra}
    return {
        "kv_connector": "FerryConnector",
        "kv_role": BOTH_WAYS if both_directions else KV_ROLES[role],
        "engine_id": engine,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"side_channel_host": "127.0.0.1", "side_channel_port": 0, **extra},
    }


def rank_count(arguments: Sequence[str]) -> int:
    """How many ranks, each with a GPU or cores of its own, vLLM will start with these arguments.

    Raises:
        UsageError: a size is no whole number.
    """
    return _size(arguments, TENSOR_OPTIONS) * _size(arguments, PIPELINE_OPTIONS)


def _size(arguments: Sequence[str], options: tuple[str, ...]) -> int:
    size = "1"
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option in options:
            size = value if equals else "".join(arguments[index + 1 : index + 2])
    if not size.isdecimal() or int(size) < 1:
        raise UsageError(f"{options[0]} must be a whole number from 1 on, not {size!r}")
    return int(size)


def _engine_command(
    deployment: Deployment, role: Role, name: str, port: int, *, on_cpu: bool
) -> tuple[str, ...]:
    given = deployment.arguments(role)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", deployment.model, "--served-model-name", deployment.served_name]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    if role != "reference":
        extra = deployment.prefill_config if role == "prefill" else deployment.decode_config
        config = kv_transfer_config(role, name, extra, both_directions=deployment.both_directions)
        command += ["--kv-transfer-config", json.dumps(config)]
    if on_cpu:
        command += ["--enforce-eager"]
        if rank_count(given) == 1 and EXECUTOR_OPTION not in given:
            command += [EXECUTOR_OPTION, IN_PROCESS_EXECUTOR]
    elif deployment.cache_gib is not None:
        command += ["--kv-cache-memory-bytes", str(deployment.cache_gib << 30)]
    # The operator's arguments come last: they win.
    return (*command, *given)


def _cpu_environments(deployment: Deployment) -> list[dict[str, str]]:
    if deployment.accelerators or deployment.gpus_per_engine is not None:
        raise UsageError(
            "--accelerators and --gpus-per-engine need a GPU build of vLLM; the one installed here runs on "
            "the CPU"
        )
    ranks = [rank_count(deployment.arguments(role)) for role in deployment.roles]
    bindings = split_cores(sorted(os.sched_getaffinity(0)), ranks)
    space = str(deployment.cache_gib or CPU_CACHE_GIB_DEFAULT)
    return [{"VLLM_CPU_KVCACHE_SPACE": space, "VLLM_CPU_OMP_THREADS_BIND": binding} for binding in bindings]


def _gpu_environments(deployment: Deployment) -> list[dict[str, str]]:
    shares = list(deployment.accelerators)
    if not shares:
        sizes = [
            deployment.gpus_per_engine or rank_count(deployment.arguments(role)) for role in deployment.roles
        ]
        shares = split_accelerators(visible_accelerators(), sizes)
    return [{"CUDA_VISIBLE_DEVICES": share} for share in shares]


def _common_environment(deployment: Deployment) -> dict[str, str]:
    # All of a local fleet talks over loopback, whatever the machine's first address is.
    environment = {"VLLM_HOST_IP": "127.0.0.1"}
    if Path(deployment.model).is_dir():
        # A model on disk needs no hub, and an unreachable one costs a minute of retries.
        environment["HF_HUB_OFFLINE"] = "1"
    return environment
