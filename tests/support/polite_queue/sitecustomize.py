"""For the PYTHONPATH of engines under test: vLLM's queue between engine and workers sleeps, not spins.

With tensor parallelism every worker and every engine core polls that queue by yielding the processor in a
loop. On two cores six such loops leave so little to everything else that other threads of a worker stand
still for half a minute. A GPU machine has a core for each; a small one needs this to show anything at all.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import time
from types import ModuleType

MODULE = "vllm.distributed.utils"
PAUSE_SECONDS = 0.0005


class _Polite(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module as it is and then replaces its `sched_yield`."""

    def __init__(self) -> None:
        self._loader: importlib.abc.Loader | None = None

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE or self._loader is not None:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        self._loader.exec_module(module)
        module.sched_yield = lambda: time.sleep(PAUSE_SECONDS)  # type: ignore[attr-defined]


sys.meta_path.insert(0, _Polite())
