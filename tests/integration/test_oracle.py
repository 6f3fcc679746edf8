"""The tests of equality would see a single wrong block."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live import BLOCK_TOKENS, Client, Live, completion, make_deployment, one_more_engine, run

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("block", [pytest.param(0, marks=pytest.mark.long), 5])
def test_one_damaged_block_changes_the_answer(engines: Live, tmp_path: Path, block: int) -> None:
    """A prefill engine damages one block of the prompt before it is pushed.

    That the model's answer depends on every block, `tests/unit/cli/test_tinymodel.py` shows.
    """
    damaging = make_deployment(
        Path(engines.deployment.model),
        tmp_path,
        reference=False,
        prefill_config={"test_corrupt_block": block},
        environment={"KVFERRY_TESTING": "1"},
    )
    prompt = engines.prompt(7 * BLOCK_TOKENS)
    transfer = secrets.token_hex(16)

    async def work(client: Client, damaged: str) -> None:
        expected = await client.tokens(engines.reference, completion(prompt))
        probe = completion([500], 1, kv_transfer_params={"do_remote_decode": True, "probe": True})
        source = (await client.post(damaged, probe))["kv_transfer_params"]
        prefill = {"do_remote_decode": True, "transfer_id": transfer}
        answer, _ = await asyncio.gather(
            client.tokens(
                engines.decode,
                completion(prompt, kv_transfer_params=source | {"transfer_id": transfer}),
            ),
            client.post(damaged, completion(prompt, 1, kv_transfer_params=prefill)),
        )
        assert answer != expected

    with one_more_engine(damaging, "prefill-damaging") as damaged:
        run(lambda client: work(client, damaged))
    engines.assert_empty()


@pytest.mark.long
@pytest.mark.parametrize(("arguments", "code"), [((), 0), (("--corrupt",), 1)])
def test_the_demo_passes_and_fails_with_a_damaged_block(
    tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    command = [sys.executable, "-m", "kvferry.cli.main", "demo", "--log-dir", str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("PASSED: 12 of 12" if code == 0 else "FAILED: 1 of 12")
