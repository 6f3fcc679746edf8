"""From a deployment to the commands and environments of its servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvferry.cli import engines
from kvferry.cli.engines import Deployment, bring_up, engine_specs, rank_count, router_spec
from kvferry.cli.fleet import Fleet
from kvferry.cli.processes import ServerSpec
from kvferry.errors import UsageError
from tests.support.stub_fleet import stub_spec


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "vllm_runs_on_cpu", lambda: True)
    monkeypatch.setattr(engines.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "vllm_runs_on_cpu", lambda: False)
    monkeypatch.setattr(engines, "visible_accelerators", lambda: ["0", "1", "2", "3"])


def deployment(**changes: object) -> Deployment:
    return Deployment(**({"model": "org/model", "served_name": "model"} | changes))  # type: ignore[arg-type]


def option(spec: ServerSpec, name: str) -> str:
    """The last value of an option, which is the one that wins."""
    positions = [index for index, part in enumerate(spec.command) if part == name]
    return spec.command[positions[-1] + 1]


@pytest.mark.usefixtures("on_cpu")
def test_each_engine_has_its_role_id_port_and_log() -> None:
    specs = engine_specs(deployment(prefill=2, decode=1, reference=True, logs=Path("/logs")))
    assert [spec.name for spec in specs] == ["prefill-0", "prefill-1", "decode-0", "reference"]
    assert len({spec.port for spec in specs}) == 4
    assert [spec.log for spec in specs] == [Path("/logs") / f"{spec.name}.log" for spec in specs]
    for spec in specs:
        assert spec.command[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
        assert option(spec, "--port") == str(spec.port)
        assert option(spec, "--host") == spec.host == "127.0.0.1"
        assert option(spec, "--served-model-name") == "model"
    configs = [json.loads(option(spec, "--kv-transfer-config")) for spec in specs[:3]]
    assert [config["kv_role"] for config in configs] == ["kv_producer", "kv_producer", "kv_consumer"]
    assert [config["engine_id"] for config in configs] == ["prefill-0", "prefill-1", "decode-0"]
    for config in configs:
        assert config["kv_connector"] == "FerryConnector"
        assert config["kv_load_failure_policy"] == "recompute"
        assert config["kv_connector_extra_config"] == {
            "side_channel_host": "127.0.0.1",
            "side_channel_port": 0,
        }
    assert "--kv-transfer-config" not in specs[3].command


@pytest.mark.usefixtures("on_cpu")
def test_kv_that_flows_back_needs_engines_of_both_roles() -> None:
    specs = engine_specs(deployment(both_directions=True, decode_config={"decoder_kv_blocks_ttl": 5}))
    configs = [json.loads(option(spec, "--kv-transfer-config")) for spec in specs]
    assert [config["kv_role"] for config in configs] == ["kv_both", "kv_both"]
    extras = [config["kv_connector_extra_config"] for config in configs]
    assert all(extra["bidirectional_kv_xfer"] for extra in extras)
    assert [extra.get("decoder_kv_blocks_ttl") for extra in extras] == [None, 5]


@pytest.mark.usefixtures("on_cpu")
def test_more_keys_reach_the_connectors_of_their_role_only() -> None:
    specs = engine_specs(deployment(prefill_config={"slice_bytes": 7}, decode_config={"renew_seconds": 1}))
    extra = [json.loads(option(spec, "--kv-transfer-config"))["kv_connector_extra_config"] for spec in specs]
    assert [config.get("slice_bytes") for config in extra] == [7, None]
    assert [config.get("renew_seconds") for config in extra] == [None, 1]


@pytest.mark.usefixtures("on_cpu")
def test_on_the_cpu_engines_share_the_cores_and_run_in_process() -> None:
    specs = engine_specs(deployment(cache_gib=3))
    assert [spec.environment["VLLM_CPU_OMP_THREADS_BIND"] for spec in specs] == ["0,1", "2,3"]
    assert {spec.environment["VLLM_CPU_KVCACHE_SPACE"] for spec in specs} == {"3"}
    for spec in specs:
        assert "--enforce-eager" in spec.command
        assert option(spec, "--distributed-executor-backend").endswith(".UniProcExecutor")


@pytest.mark.usefixtures("on_cpu")
def test_on_the_cpu_several_ranks_need_processes() -> None:
    (prefill, decode) = engine_specs(deployment(prefill_arguments=("--tensor-parallel-size", "2")))
    assert "--distributed-executor-backend" not in prefill.command
    assert "--distributed-executor-backend" in decode.command
    assert prefill.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert decode.environment["VLLM_CPU_OMP_THREADS_BIND"] == "2"


@pytest.mark.usefixtures("on_cpu")
def test_the_operators_arguments_come_last_and_win() -> None:
    given = ("--max-num-seqs", "4", "--distributed-executor-backend", "mp", "--served-model-name", "mine")
    (prefill, decode) = engine_specs(deployment(prefill_arguments=given))
    assert prefill.command[-len(given) :] == given
    assert prefill.command.count("--distributed-executor-backend") == 1
    assert "--max-num-seqs" not in decode.command


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("changes", [{"accelerators": ("0", "1")}, {"gpus_per_engine": 1}])
def test_accelerators_on_the_cpu_are_wrong_use(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="need a GPU build of vLLM"):
        engine_specs(deployment(**changes))


@pytest.mark.usefixtures("on_gpu")
def test_on_gpus_each_engine_gets_as_many_as_it_has_ranks() -> None:
    specs = engine_specs(deployment(prefill_arguments=("-tp=2",), cache_gib=2))
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0,1", "2"]
    assert {option(spec, "--kv-cache-memory-bytes") for spec in specs} == {str(2 << 30)}
    assert all("--enforce-eager" not in spec.command for spec in specs)


@pytest.mark.usefixtures("on_gpu")
def test_gpus_per_engine_and_explicit_accelerators() -> None:
    specs = engine_specs(deployment(gpus_per_engine=2))
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0,1", "2,3"]
    specs = engine_specs(deployment(accelerators=("3", "3")))
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["3", "3"]


@pytest.mark.usefixtures("on_cpu")
def test_a_model_on_disk_needs_no_hub(tmp_path: Path) -> None:
    (local, _) = engine_specs(deployment(model=str(tmp_path)))
    (remote, _) = engine_specs(deployment())
    assert local.environment["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in remote.environment


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": 0}, "--prefill must be from 1 to 256, not 0"),
        ({"decode": 257}, "--decode must be from 1 to 256, not 257"),
        ({"cache_gib": 0}, "--kv-cache-gib must be at least 1"),
        ({"gpus_per_engine": 0}, "--gpus-per-engine must be at least 1"),
        ({"accelerators": ("0",)}, "--accelerators names 1 engines, but 2 .* prefill-0, decode-0"),
    ],
)
def test_an_impossible_deployment_names_its_option(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        deployment(**changes)


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ((), 1),
        (("--tensor-parallel-size", "4"), 4),
        (("--tensor-parallel-size=4", "--seed", "2"), 4),
        (("-tp", "2"), 2),
        (("-tp", "2", "-tp", "8"), 8),
        (("--pipeline-parallel-size", "3"), 3),
        (("-tp=2", "-pp", "2"), 4),
    ],
)
def test_the_number_of_ranks_is_read(arguments: tuple[str, ...], size: int) -> None:
    assert rank_count(arguments) == size


@pytest.mark.parametrize(
    "arguments", [("-tp", "two"), ("-tp",), ("-tp=0",), ("--tensor-parallel-size", "-1"), ("-pp", "x")]
)
def test_a_parallel_size_that_is_none_is_an_error(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"--(tensor|pipeline)-parallel-size must be a whole number"):
        rank_count(arguments)


def test_the_router_is_told_every_engine() -> None:
    plan = deployment(host="127.0.0.2", router_arguments=("--retries", "5"))
    spec = router_spec(plan, ["http://p0", "http://p1"], ["http://d0"], 8123)
    text = " ".join(spec.command)
    assert "-m kvferry.cli.main router --host 127.0.0.2 --port 8123" in text
    assert "--prefill http://p0 --prefill http://p1 --decode http://d0" in text
    assert text.endswith("--retries 5")
    assert spec.url == "http://127.0.0.2:8123"


def test_the_router_accepts_what_it_is_given() -> None:
    import argparse

    from kvferry.router import server

    spec = router_spec(deployment(), ["http://p0:1"], ["http://d0:1"], 8123)
    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    namespace = parser.parse_args(spec.command[4:])
    assert (namespace.prefill, namespace.decode) == (["http://p0:1"], ["http://d0:1"])
    assert (namespace.host, namespace.port) == ("127.0.0.1", 8123)


def test_bring_up_starts_engines_then_the_router(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = deployment(reference=True)
    monkeypatch.setattr(
        engines, "engine_specs", lambda given: [stub_spec(tmp_path, name) for name in given.names]
    )
    told: list[tuple[str, ...]] = []

    def router(given: Deployment, prefill: tuple[str, ...], decode: tuple[str, ...], port: int) -> ServerSpec:
        told.append((*prefill, *decode))
        return stub_spec(tmp_path, "router")

    monkeypatch.setattr(engines, "router_spec", router)
    with Fleet(report=lambda line: None) as fleet:
        endpoints = bring_up(fleet, plan, startup_seconds=10)
        assert [server.spec.name for server in fleet.servers] == [*plan.names, "router"]
        assert all(server.ready for server in fleet.servers)
        assert endpoints.router == fleet["router"].spec.url
        assert endpoints.prefill == (fleet["prefill-0"].spec.url,)
        assert endpoints.decode == (fleet["decode-0"].spec.url,)
        assert endpoints.reference == fleet["reference"].spec.url
        assert told == [(*endpoints.prefill, *endpoints.decode)]
