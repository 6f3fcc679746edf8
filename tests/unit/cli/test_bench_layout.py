"""`kvferry bench layout`: options, the table, limits, and the figures of a small request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli import layout_costs
from kvferry.cli import main as cli
from kvferry.cli.bench_layout import LAYERS_OUTERMOST, over_limits
from kvferry.cli.layout_costs import PAIRS, Figure, Options, measure

SMALL = ("--blocks", "6", "--layers", "3", "--heads", "2", "--block-tokens", "2", "--repeats", "1")
STATED = Options(1024, 64, 8, 16, 1)


def figures(scattered_ms: float = 1.0, temporaries: float = 0.5, descriptors: int = 1) -> list[Figure]:
    """Made-up figures of every pair."""
    return [
        Figure(title, blocks, descriptors, 0.1, scattered_ms, temporaries)
        for title, _, _ in PAIRS
        for blocks in ("in order", "scattered")
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--blocks", "0"], "--blocks must be at least 1, not 0"),
        (["--block-tokens", "-1"], "--block-tokens must be at least 1, not -1"),
        (["--json", "/nowhere/layout.json"], "--json: there is no directory /nowhere; make it first"),
    ],
)
def test_impossible_options_say_what_is_possible(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "layout", *arguments]) == 2
    assert capsys.readouterr().err == f"kvferry: {said}\n"


def test_descriptors_follow_from_the_layouts() -> None:
    """G02: blocks outermost: one per run of blocks; layers outermost: one per layer and run."""
    options = Options(blocks=6, layers=3, heads=2, block_tokens=2, repeats=1)
    found = {(one.title, one.blocks): one.descriptors for one in measure(options)}
    assert found == {
        ("blocks outermost, equal", "in order"): 1,
        ("blocks outermost, equal", "scattered"): 6,
        ("layers outermost, equal", "in order"): 3,
        ("layers outermost, equal", "scattered"): 18,
        ("layers outermost to blocks outermost", "in order"): 18,
        ("layers outermost to blocks outermost", "scattered"): 18,
        ("blocks outermost, TP 2 to TP 1", "in order"): 18,
        ("blocks outermost, TP 2 to TP 1", "scattered"): 18,
        ("layers outermost, TP 1 to TP 2", "in order"): 18,
        ("layers outermost, TP 1 to TP 2", "scattered"): 18,
        ("layers outermost, blocks twice as large", "in order"): 30,
        ("layers outermost, blocks twice as large", "scattered"): 36,
        ("heads and tokens exchanged", "in order"): 55,
        ("heads and tokens exchanged", "scattered"): 60,
    }


def test_the_table_and_the_file_hold_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "layout.json"
    code = cli.main(["bench", "layout", *SMALL, "--json", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "layouts",
        "blocks",
        "descriptors",
        "plan,",
        "ms",
        "expand,",
        "ms",
        "temporaries",
    ]
    assert len(lines[1 : lines.index("")]) == 2 * len(PAIRS)
    assert lines[-1].startswith("layout ")
    assert "6 blocks x 3 layers scattered, 18 descriptors in " in lines[-1]
    written = json.loads(file.read_text())
    assert written["options"] == {"blocks": 6, "layers": 3, "heads": 2, "block_tokens": 2, "repeats": 1}
    assert len(written["figures"]) == 2 * len(PAIRS)
    # So small a request takes many times its result, which a limit on large ones has to say.
    assert code == 1


def test_within_limits_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout_costs, "measure", lambda options: figures())
    assert cli.main(["bench", "layout"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "layout within limits: 1,024 blocks x 64 layers scattered, 1 descriptors in 1.0 ms, "
        "temporaries 0.5 times the result"
    )


def test_each_limit_is_seen() -> None:
    assert over_limits(figures(), STATED) == []
    assert over_limits(figures(scattered_ms=8.1), STATED) == [
        f"{LAYERS_OUTERMOST}, scattered: 8.1 ms, at most 8"
    ]
    assert over_limits(figures(scattered_ms=8.1), Options(2048, 64, 8, 16, 1)) == []
    assert len(over_limits(figures(temporaries=3.1), STATED)) == len(PAIRS)
    assert over_limits(figures(descriptors=2), STATED) == [
        "blocks outermost, equal, in order: 2 descriptors, at most 1"
    ]
    assert len(over_limits(figures(descriptors=65), STATED)) == 2
