"""The classes that vLLM loads by name: what they refuse, and what they change of vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from kvferry.cli.emulated import CLASSES, RANKS_EXECUTOR
from kvferry.emulator.attention import EmulatedBackend
from kvferry.emulator.baseline import ResidentConnector
from kvferry.emulator.executor import EmulatedExecutor, EmulatedRanksExecutor
from kvferry.emulator.worker import EmulatedWorker
from kvferry.errors import UsageError


def config(*, mla: bool = False, **parallel: Any) -> Any:
    sizes = {"world_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, **parallel}
    return SimpleNamespace(
        additional_config={},
        parallel_config=SimpleNamespace(**sizes),
        scheduler_config=SimpleNamespace(
            async_scheduling=False,
            enable_chunked_prefill=False,
            max_num_batched_tokens=32768,
            max_num_scheduled_tokens=32768,
        ),
        model_config=SimpleNamespace(use_mla=mla),
        compilation_config=SimpleNamespace(custom_ops=["all"]),
    )


def started(
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any = EmulatedExecutor,
    base: Any = UniProcExecutor,
) -> list[bool]:
    """Start an executor; whether scheduling was asynchronous when vLLM's own part began."""
    seen: list[bool] = []

    def begin(self: Any) -> None:
        seen.append(self.vllm_config.scheduler_config.async_scheduling)

    monkeypatch.setattr(base, "_init_executor", begin)
    executor = kind.__new__(kind)
    executor.vllm_config = vllm_config
    executor._init_executor()
    return seen


def test_the_names_that_the_command_line_gives_are_those_of_the_classes() -> None:
    found = [resolve_obj_by_qualname(name) for name in CLASSES.values()]
    assert found[:2] == [EmulatedWorker, EmulatedExecutor]
    assert issubclass(found[2], AsyncScheduler)
    assert resolve_obj_by_qualname(RANKS_EXECUTOR) is EmulatedRanksExecutor


def test_scheduling_is_asynchronous_though_the_cpu_platform_turns_it_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert EmulatedExecutor.supports_async_scheduling()
    assert started(config(), monkeypatch) == [True]


def test_more_than_one_rank_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"2 ranks \(tensor parallel 2.*one rank at its true shape"):
        started(config(world_size=2, tensor_parallel_size=2), monkeypatch)


@pytest.mark.parametrize("shape", [{}, {"mla": True, "pipeline_parallel_size": 2}])
def test_several_ranks_are_for_mla_in_one_stage(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other models keep is split between ranks, and the pages' patterns know nothing of that."""
    given = config(world_size=2, tensor_parallel_size=2, **shape)
    with pytest.raises(UsageError, match=r"a model with MLA.*EmulatedExecutor"):
        started(given, monkeypatch, EmulatedRanksExecutor, MultiprocExecutor)


@pytest.mark.parametrize(
    ("kind", "base"),
    [(EmulatedExecutor, UniProcExecutor), (EmulatedRanksExecutor, MultiprocExecutor)],
)
def test_mla_is_scheduled_in_chunks_though_the_cpu_platform_does_not(
    kind: Any, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no connector believes that vLLM's operation for the CPU, which is wrong for MLA, is used."""
    given = config(mla=True)
    given.additional_config = {"emulator": {"step_tokens": 512}}
    assert started(given, monkeypatch, kind, base) == [True]
    scheduler = given.scheduler_config
    assert scheduler.enable_chunked_prefill
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens) == (512, 512)
    assert given.compilation_config.custom_ops == ["all", "-rotary_embedding"]


def test_options_are_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = config()
    wrong.additional_config = {"emulator": {"verify": "some"}}
    with pytest.raises(UsageError, match="verify"):
        started(wrong, monkeypatch)


def test_a_worker_without_memory_for_kv_is_refused() -> None:
    worker = EmulatedWorker.__new__(EmulatedWorker)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    with pytest.raises(UsageError, match="--kv-cache-memory-bytes"):
        worker.determine_available_memory()
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=12345)
    assert worker.determine_available_memory() == 12345


def test_the_backend_offers_the_options_layouts_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedBackend, "offered", ("BLHNC", "LBHNC"))
    assert [layout.name for layout in EmulatedBackend.supported_kv_cache_layouts()] == ["BLHNC", "LBHNC"]
    assert EmulatedBackend.supports_block_size(16)


@pytest.mark.parametrize(("prompt", "computed", "wanted"), [(100, 0, 99), (100, 64, 35), (1, 0, 0)])
def test_the_baseline_takes_all_of_a_prompt_but_its_last_token_for_loaded(
    prompt: int, computed: int, wanted: int
) -> None:
    connector = ResidentConnector.__new__(ResidentConnector)
    request = SimpleNamespace(num_prompt_tokens=prompt)
    assert connector.get_num_new_matched_tokens(request, computed) == (wanted, False)
