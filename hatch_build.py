"""Compiles the router's hot modules into wheels.

Where they cannot be compiled the wheel has the sources alone, and the router runs interpreted.
KVFERRY_COMPILE=0 asks for that.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledModules(BuildHookInterface):  # type: ignore[type-arg]
    """The hook that hatchling calls for each wheel."""

    def dependencies(self) -> list[str]:
        """What the compilation needs, and what the modules import: mypy reads its types."""
        if not _wanted():
            return []
        project = tomllib.loads(Path(self.root, "pyproject.toml").read_text(encoding="utf-8"))
        return [*project["tool"]["kvferry"]["compiled"]["needs"], *project["project"]["dependencies"]]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, if it is a wheel to be installed; an editable one has `make compiled`."""
        if version == "editable" or not _wanted():
            return
        if not self._compiled():
            self.app.display_warning("The wheel has no compiled modules: the router will run interpreted.")
            return
        build_data["artifacts"].append("/src/kvferry/_compiled/*")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def _compiled(self) -> bool:
        script = _script(Path(self.root))
        modules = script.listed(Path(self.root))
        # Metadata and wheel are asked for one after the other.
        if script.is_fresh(Path(self.root), modules):
            return True
        if lacking := script.missing_tools():
            self.app.display_warning(f"To compile the router, install {' and '.join(lacking)}.")
            return False
        try:
            script.compile_modules(Path(self.root), modules)
        except subprocess.CalledProcessError:
            return False
        return True


def _wanted() -> bool:
    return os.environ.get("KVFERRY_COMPILE", "1") != "0"


def _script(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_compile_router", root / "scripts/compile_router.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
