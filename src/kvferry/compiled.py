"""Serves the router's compiled modules, where all of them fit the sources beside them; else none.

Compiled modules know the layout of each other's classes, so one that is older than its neighbours must not be
loaded. The standard library alone is imported here: this runs before anything of the router.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

FORMAT = 1
STAMP = "stamp.json"
SWITCH = "KVFERRY_INTERPRETED"
ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "kvferry" / "_compiled"

_state: list[str] = []


def suffix() -> str:
    """The ending of extension modules that this interpreter loads: it names version, ABI and platform."""
    return importlib.machinery.EXTENSION_SUFFIXES[0]


def source_digest(root: Path, module: str) -> str:
    """The SHA-256 of a module's source below `root`, in hexadecimal; empty where there is none."""
    return digest_of(root.joinpath(*module.split(".")).with_suffix(".py"))


def digest_of(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal; empty where it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def read_stamp(directory: Path) -> dict[str, Any]:
    """What the last compilation wrote; ValueError if damaged, FileNotFoundError if there is none."""
    stamp = json.loads((directory / STAMP).read_text(encoding="utf-8"))
    if not isinstance(stamp, dict) or stamp.get("format") != FORMAT:
        raise ValueError("its format is another")
    for part in ("modules", "extensions"):
        entries = stamp.get(part)
        if not isinstance(entries, dict) or not entries:
            raise ValueError(f"it has no {part}")
        if not all(isinstance(digest, str) for digest in entries.values()):
            raise ValueError(f"its {part} are damaged")
    if not set(stamp["modules"]) < set(stamp["extensions"]):
        raise ValueError("it lacks an extension")
    return stamp


def unfit(root: Path, directory: Path, stamp: dict[str, Any]) -> str:
    """Why what was compiled does not fit these sources and this interpreter; empty where it does."""
    if stamp.get("suffix") != suffix():
        return "it was compiled for another Python; run `make compiled`"
    if any(source_digest(root, module) != digest for module, digest in stamp["modules"].items()):
        return "the sources have changed since; run `make compiled`"
    for module, digest in stamp["extensions"].items():
        if digest_of(directory / f"{module}{suffix()}") != digest:
            return f"the compiled {module} is missing or damaged; run `make compiled`"
    return ""


class Finder:
    """A finder for `sys.meta_path` that knows the compiled modules of one directory, and no others."""

    def __init__(self, directory: Path, modules: Sequence[str]) -> None:
        self._paths = {module: str(directory / f"{module}{suffix()}") for module in modules}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The compiled module's specification, or None."""
        file = self._paths.get(fullname)
        if file is None:
            return None
        loader = importlib.machinery.ExtensionFileLoader(fullname, file)
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


def install(root: Path = ROOT, directory: Path = DIRECTORY) -> str:
    """Puts the finder in front where everything fits; returns the state in words, with the reason."""
    if os.environ.get(SWITCH, "") not in ("", "0"):
        return f"interpreted: {SWITCH} is set"
    try:
        stamp = read_stamp(directory)
    except FileNotFoundError:
        return "interpreted: nothing has been compiled"
    except (OSError, ValueError) as error:
        return f"interpreted: {directory / STAMP} cannot be used ({error}); run `make compiled`"
    if reason := unfit(root, directory, stamp):
        return f"interpreted: {reason}"
    if any(module in sys.modules for module in stamp["modules"]):
        return "interpreted: a module was imported before the compiled ones were found"
    finder = Finder(directory, list(stamp["extensions"]))
    sys.meta_path.insert(0, finder)
    try:
        # The shared library first: if the host cannot load it, no module has been taken from it yet.
        for library in stamp["extensions"].keys() - stamp["modules"].keys():
            importlib.import_module(library)
    except ImportError as error:
        sys.meta_path.remove(finder)
        return f"interpreted: the compiled modules cannot be loaded ({error})"
    return "compiled"


def install_once(root: Path = ROOT, directory: Path = DIRECTORY) -> None:
    """Decides for this process; later calls change nothing."""
    if not _state:
        _state.append(install(root, directory))


def listed(directory: Path = DIRECTORY) -> list[str]:
    """The names of the modules that were compiled."""
    return list(read_stamp(directory)["modules"])


def state() -> str:
    """Is `compiled`, or `interpreted: ` and the reason, for people to read; `kvferry.router` decides it."""
    return _state[0] if _state else "interpreted: the router has not been imported"
