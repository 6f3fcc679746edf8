"""Each `*.txt` beside this file is a scenario; see `tests.support.transcript` for how to read one.

Goal: what the cores say to each other, and when, in a form that a reviewer reads. After a wanted change,
run `pytest tests/transcripts --rewrite` and review the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.transcript import rewrite

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=[path.stem for path in TRANSCRIPTS])
def test_transcript(path: Path, rewriting: bool) -> None:
    before = path.read_text(encoding="utf-8")
    after = rewrite(before)
    if rewriting:
        path.write_text(after, encoding="utf-8")
    assert after == before or rewriting


def test_a_changed_output_is_noticed() -> None:
    text = "A transfer.\n\n> world\n> expect t tokens=4\n> finish t\n  something else\n"
    assert rewrite(text) != text


def test_every_transcript_says_what_it_shows() -> None:
    assert len(TRANSCRIPTS) >= 12
    for path in TRANSCRIPTS:
        paragraph, _, rest = path.read_text(encoding="utf-8").partition("\n\n")
        assert len(paragraph) > 80, f"{path.name} does not say what it shows"
        assert rest.startswith(("> world", "# "))
