"""TP 2 to TP 2: four ranks, each with an agent of its own; every rank gets its heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.live import Client, Live, arguments, completion, live, make_deployment, run

POLITE = Path(__file__).parents[1] / "support" / "polite_queue"


@pytest.mark.timeout(420)
def test_every_rank_gets_its_part(engines: Live, tmp_path: Path) -> None:
    """P51, V06: equal tensor parallelism on both sides; answers equal those of one engine with one rank."""
    two = arguments("--tensor-parallel-size", "2")
    deployment = make_deployment(
        Path(engines.deployment.model),
        tmp_path,
        reference=False,
        prefill_arguments=two,
        decode_arguments=two,
        environment={"PYTHONPATH": str(POLITE)},
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
