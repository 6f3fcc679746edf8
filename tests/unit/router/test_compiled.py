"""The router's compiled modules are served if every one of them fits the sources; else none is."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from kvferry import compiled


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sources and a stamp that fits them; the extensions are not real ones."""
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    directory = tmp_path / "compiled"
    directory.mkdir()
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    for name in ("one", "two", "shared_library"):
        (directory / f"{name}{compiled.suffix()}").write_bytes(b"not an extension")
    stamp = {
        "format": compiled.FORMAT,
        "suffix": compiled.suffix(),
        "modules": {name: compiled.source_digest(tmp_path, name) for name in ("one", "two")},
        "extensions": {
            name: compiled.digest_of(directory / f"{name}{compiled.suffix()}")
            for name in ("one", "two", "shared_library")
        },
    }
    (directory / compiled.STAMP).write_text(json.dumps(stamp))
    return tmp_path


def reason(root: Path) -> str:
    return compiled.unfit(root, root / "compiled", compiled.read_stamp(root / "compiled"))


def test_what_was_just_compiled_fits(made: Path) -> None:
    assert reason(made) == ""


def test_one_changed_byte_leaves_every_module_interpreted(made: Path) -> None:
    (made / "two.py").write_text("x = 2\n")
    state = compiled.install(made, made / "compiled")
    assert state == "interpreted: the sources have changed since; run `make compiled`"


def test_another_python_does_not_load_them(made: Path) -> None:
    file = made / "compiled" / compiled.STAMP
    file.write_text(json.dumps(json.loads(file.read_text()) | {"suffix": ".cpython-39.so"}))
    assert reason(made).startswith("it was compiled for another Python")


@pytest.mark.parametrize("damaged", [b"not", b"not an extensiom", b""])
def test_a_damaged_extension_is_not_loaded(made: Path, damaged: bytes) -> None:
    (made / "compiled" / f"one{compiled.suffix()}").write_bytes(damaged)
    assert "one is missing or damaged" in reason(made)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "modules": {"one": 1}}', "\x00"])
def test_a_damaged_stamp_leaves_the_router_interpreted(made: Path, text: str) -> None:
    (made / "compiled" / compiled.STAMP).write_text(text)
    assert "cannot be used" in compiled.install(made, made / "compiled")


def test_what_the_host_cannot_load_leaves_no_finder(made: Path) -> None:
    before = list(sys.meta_path)
    assert "cannot be loaded" in compiled.install(made, made / "compiled")
    assert sys.meta_path == before


def test_the_switch_turns_it_off(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "1")
    assert compiled.install(made, made / "compiled") == "interpreted: KVFERRY_INTERPRETED is set"


def test_nothing_compiled_is_a_state_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    assert compiled.install(tmp_path, tmp_path) == "interpreted: nothing has been compiled"


@pytest.mark.skipif(not os.environ.get("KVFERRY_DEMANDS_COMPILED"), reason="`make test` demands it")
def test_what_is_tested_is_what_was_compiled() -> None:
    """Else a set-up that stopped compiling would go unnoticed, and the compiled modules untried."""
    importlib.import_module("kvferry.router.server")
    assert compiled.state() == "compiled"
    for name in compiled.listed():
        assert str(sys.modules[name].__file__).endswith(compiled.suffix())


def test_a_host_without_headers_is_told_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler alone compiles nothing, and set-up is to go on interpreted there, too."""
    root = Path(__file__).parents[3]
    spec = importlib.util.spec_from_file_location("_compile_router", root / "scripts/compile_router.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    headers = tmp_path / "Python.h"
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: str(tmp_path) if name == "include" else "")
    told = "Python's headers (python3-dev)"
    assert told in script.missing_tools()
    headers.write_text("")
    assert told not in script.missing_tools()
