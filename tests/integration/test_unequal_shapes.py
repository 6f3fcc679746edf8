"""Prefill and decode engines of unlike shape, and models with sliding windows and with MLA.

Every answer equals that of one engine with one rank, which has computed it alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.emulated_pair import BUSY
from tests.support.live import (
    Client,
    Live,
    arguments,
    completion,
    live,
    make_deployment,
    one_more_router,
    run,
)
from tests.support.tiny_models import write_latent_model, write_windowed_model

pytestmark = pytest.mark.engines

TWO_RANKS = ("--tensor-parallel-size", "2")
TWO_STAGES = (
    *("--pipeline-parallel-size", "2"),
    *("--worker-cls", "tests.support.pipeline_worker.PipelineWorker"),
)
SMALL_BLOCKS = ("--block-size", "64")
LATENT = (
    *("--attention-backend", "CPU_MLA"),
    *("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'),
)
"""Without its second part vLLM rotates the wrong elements, and the connector refuses the engine."""


WINDOW = 200


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(TWO_RANKS, SMALL_BLOCKS, id="tp2 to tp1", marks=pytest.mark.long),
        pytest.param(SMALL_BLOCKS, TWO_RANKS, id="tp1 to tp2"),
        pytest.param(TWO_STAGES, (), id="pp2 to tp1", marks=pytest.mark.long),
        pytest.param(TWO_RANKS, TWO_RANKS, id="tp2 to tp2", marks=pytest.mark.long),
    ],
)
def test_answers_are_those_of_one_engine(
    engines: Live, tmp_path: Path, prefill: tuple[str, ...], decode: tuple[str, ...]
) -> None:
    """P51, V06, V07, V09, V11, V13: other tensor and pipeline parallel sizes, other block sizes."""
    deployment = make_deployment(
        Path(engines.deployment.model),
        tmp_path,
        reference=False,
        prefill_arguments=arguments(*prefill),
        decode_arguments=arguments(*decode),
        environment=BUSY,
    )
    bodies = [completion(engines.prompt(length)) for length in (20, 128, 700, 2100)]
    with live(deployment) as pair:

        async def work(client: Client) -> None:
            for body in bodies:
                expected = await client.tokens(engines.reference, body)
                assert await client.tokens(pair.endpoints.router, body) == expected

        run(work)
        for url in (pair.prefill, pair.decode):
            completed = pair.metric(url, "kvferry_transfers_total", outcome="completed")
            assert completed == len(bodies), pair.state()
        pair.assert_empty()


@pytest.mark.timeout(420)
def test_layers_with_a_sliding_window(tmp_path: Path) -> None:
    """V13, V14: two cache groups, blocks of 128 tokens to 64; prompts shorter and longer than the window.

    The decode engine has no prefix cache, so that asked without a router it computes the whole prompt itself.
    Twice through the router, the second time the prefill engine finds the prompt in its own cache.
    """
    write_windowed_model(tmp_path / "model", WINDOW)
    deployment = make_deployment(
        tmp_path / "model",
        tmp_path,
        reference=False,
        decode_arguments=arguments(*SMALL_BLOCKS, "--no-enable-prefix-caching"),
    )
    with live(deployment) as pair:
        bodies = [completion(pair.prompt(length), max_tokens=12) for length in (20, 200, 265, 328, 329, 1500)]

        async def work(client: Client) -> None:
            for body in bodies:
                expected = await client.tokens(pair.decode, body)
                for _ in range(2):
                    assert await client.tokens(pair.endpoints.router, body) == expected

        run(work)
        for url in (pair.prefill, pair.decode):
            completed = pair.metric(url, "kvferry_transfers_total", outcome="completed")
            assert completed == 2 * len(bodies), pair.state()
        pair.assert_empty()


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(TWO_RANKS, (), id="tp2 to tp1", marks=pytest.mark.long),
        pytest.param((), TWO_RANKS, id="tp1 to tp2", marks=pytest.mark.long),
        pytest.param(TWO_RANKS, TWO_RANKS, id="tp2 to tp2", marks=pytest.mark.long),
    ],
)
def test_latents_of_mla(tmp_path: Path, prefill: tuple[str, ...], decode: tuple[str, ...]) -> None:
    """V11: every rank has all latents; one sends them, pushed and pulled, and the others need not.

    An engine with MLA has no prefix cache on the CPU, so that asked without a router it computes everything.
    """
    write_latent_model(tmp_path / "model")
    deployment = make_deployment(
        tmp_path / "model",
        tmp_path,
        reference=False,
        prefill_arguments=arguments(*LATENT, *prefill),
        decode_arguments=arguments(*LATENT, *decode),
        environment=BUSY,
    )
    with live(deployment) as pair, one_more_router(pair, "pull", "--transfer-mode", "pull") as pulling:
        bodies = [completion(pair.prompt(length), max_tokens=12) for length in (17, 300, 701)]
        alone = pair.prefill if decode else pair.decode

        async def work(client: Client) -> None:
            for body in bodies:
                expected = await client.tokens(alone, body)
                for router in (pair.endpoints.router, pulling):
                    assert await client.tokens(router, body) == expected

        run(work)
        for url in (pair.prefill, pair.decode):
            completed = pair.metric(url, "kvferry_transfers_total", outcome="completed")
            assert completed == 2 * len(bodies), pair.state()
        pair.assert_empty()
