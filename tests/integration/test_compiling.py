"""How the router's modules are compiled, on two small ones: what is made is used, unless it does not fit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = """
[tool.kvferry.compiled]
modules = ["kvferry.router.one", "kvferry.router.two"]
[tool.mypy]
strict = true
"""
ONE = """
class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, more: int) -> int:
        self.value += more
        return self.value
"""
TWO = """
from kvferry.router.one import Counter

def twice(counter: Counter) -> int:
    return counter.add(1) + counter.add(1)
"""
PROBE = """
import kvferry.router
from kvferry import compiled
from kvferry.router import one, two
print(compiled.state())
print(one.__file__.endswith(".so"), two.__file__.endswith(".so"), two.twice(one.Counter()))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    package = tmp_path / "src/kvferry"
    (package / "router").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (package / "__init__.py").write_text("")
    shutil.copy(ROOT / "src/kvferry/compiled.py", package)
    shutil.copy(ROOT / "scripts/compile_router.py", tmp_path / "scripts")
    (package / "router/__init__.py").write_text("from kvferry import compiled\n\ncompiled.install_once()\n")
    (package / "router/one.py").write_text(ONE)
    (package / "router/two.py").write_text(TWO)
    return tmp_path


def run(checkout: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "KVFERRY_INTERPRETED": ""} | variables
    return subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


def compiling(checkout: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(checkout, "scripts/compile_router.py", *options, **variables)


def test_what_is_compiled_is_used_until_a_source_changes(checkout: Path) -> None:
    made = compiling(checkout)
    assert made.returncode == 0, made.stdout + made.stderr
    assert run(checkout, "-c", PROBE).stdout == "compiled\nTrue True 3\n"
    off = run(checkout, "-c", PROBE, KVFERRY_INTERPRETED="1").stdout
    assert off == "interpreted: KVFERRY_INTERPRETED is set\nFalse False 3\n"
    stamp = checkout / "src/kvferry/_compiled/stamp.json"
    before = stamp.stat().st_mtime_ns
    assert compiling(checkout).stdout == ""
    assert stamp.stat().st_mtime_ns == before
    # One that compiles, but cannot be imported, is not put in place.
    source = checkout / "src/kvferry/router/two.py"
    source.write_text(TWO + "\nraise RuntimeError('at its import')\n")
    failed = compiling(checkout, "--optional")
    assert failed.returncode == 1
    assert "at its import" in failed.stderr
    assert stamp.stat().st_mtime_ns == before
    source.write_text(TWO + "\n# changed\n")
    stale = run(checkout, "-c", PROBE).stdout
    assert stale == "interpreted: the sources have changed since; run `make compiled`\nFalse False 3\n"


def test_without_a_compiler_set_up_goes_on_only_where_that_is_allowed(checkout: Path) -> None:
    for options, code in (((), 1), (("--optional",), 0)):
        made = compiling(checkout, *options, CC="no-such-compiler")
        assert made.returncode == code
        assert "install a C compiler" in made.stdout
    assert run(checkout, "-c", PROBE).stdout == "interpreted: nothing has been compiled\nFalse False 3\n"


@pytest.mark.long
def test_a_wheel_has_the_compiled_modules(tmp_path: Path) -> None:
    """And one that was asked for without them has none; both are of this checkout's tracked files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "c" / name)
    wheels = {}
    for wanted in ("1", "0"):
        out = tmp_path / wanted
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "-w",
            str(out),
            str(tmp_path / "c"),
        ]
        subprocess.run(command, env=os.environ | {"KVFERRY_COMPILE": wanted}, check=True)
        (wheels[wanted],) = out.glob("*.whl")
    assert "none-any" not in wheels["1"].name
    assert "none-any" in wheels["0"].name
    shutil.unpack_archive(wheels["1"], tmp_path / "installed", "zip")
    probe = "import kvferry.router.server; print(kvferry.router.code_state())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "KVFERRY_INTERPRETED": ""}
    told = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "compiled\n"
