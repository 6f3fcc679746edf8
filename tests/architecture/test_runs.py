"""Every folder of tests is run by `make test`.

Goal: a new folder of tests is not forgotten, since the targets name the folders. Method: the recipes of the
targets that `test` needs.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def recipe(target: str) -> str:
    """The lines that a target runs."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)*)", MAKEFILE, flags=re.MULTILINE)
    assert found, f"the Makefile has no target {target!r}"
    return found[1]


def needed_by(target: str) -> list[str]:
    found = re.search(rf"^{target}: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert found, f"the Makefile has no target {target!r}"
    return found[1].split()


def test_make_test_runs_every_folder_of_tests() -> None:
    with_tests = {
        path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").rglob("test_*.py") if path.is_file()
    }
    lines = "".join(recipe(target) for target in needed_by("test"))
    assert set(re.findall(r"\btests/(\w+)", lines)) == with_tests
