"""`kvferry bench compare` on emulated engines: two connectors, two cells, every page right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli import main as cli

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]


def test_two_connectors_and_two_cells_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results"
    arguments = ["bench", "compare", "--output", str(output), "--connectors", "ferry-push,vllm-pull"]
    arguments += ["--cells", "2x1k,2x4k", "--repeats", "1", "--cell-seconds", "3", "--no-baseline"]
    arguments += ["--output-tokens", "16", "--kv-cache-mib", "512"]
    code = cli.main(arguments)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert printed.splitlines()[-1].startswith("kvferry push at 2 x 4k: TTFT p50 ")
    told = json.loads((output / "report.json").read_text())
    assert (told["mismatches"], told["different_answers"], told["failures"]) == (0, 0, [])
    # Two cells of six requests under both connectors; a 1k prompt has 64 blocks in 64 layers.
    assert told["pages"] >= 2 * 6 * (64 + 256) * 64
    rows = {(row["connector"], row["input_tokens"]): row for row in told["cells"]}
    assert len(rows) == 4
    for row in rows.values():
        assert row["handover_p50_ms"] > 0
        assert row["prefill_hooks_ms_per_request"] > 0
    # Chunks of 2,048 tokens: the first half of a 4k prompt leaves while the second is computed.
    assert rows["ferry-push", 4096]["posted_before_prefill_end"] > 0.3
    assert (output / "report.html").is_file()
    assert (output / "summary.png").is_file()
