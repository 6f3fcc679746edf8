"""What all tests share: hypothesis profiles, and the marker of the integration folder."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
from pathlib import Path

# Before anything imports numpy: test workers share the cores, and BLAS threads of each would only wait for
# one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest

# What a shell starts in the background ignores interrupts, and so does all that it starts; tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `ci` finds the same examples on every run, so that a red build is red for its author too; `nightly`
# looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("nightly", max_examples=2000, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# What is loaded from here on, vLLM among it, stays for the whole run: see `pytest_collection_finish`.
gc.disable()

GARBAGE_THRESHOLDS = 20_000, 20, 20
"""Garbage is collected less often than usual: tests make many objects, and few cycles of them."""
INTEGRATION = Path(__file__).parent / "integration"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in `tests/integration` carries the marker, so that no slow test slips into the fast run."""
    for item in items:
        if INTEGRATION in item.path.parents:
            item.add_marker(pytest.mark.integration)


def pytest_collection_finish() -> None:
    """No collection of garbage in a test walks again through what all tests have loaded."""
    # Else pytest hangs its handlers on each of torch's many loggers, six times a test.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    # Extension modules complain at the end of the process of what nobody has collected.
    atexit.register(gc.unfreeze)
    gc.enable()
    gc.set_threshold(*GARBAGE_THRESHOLDS)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """`caplog` sees our loggers, whatever ran before in this process.

    vLLM's plugin loading hangs them under its own, and commands that run one test's worth of product quieten
    them for good.
    """
    logging.getLogger("kvferry").parent = logging.getLogger()
    for name, logger in list(logging.root.manager.loggerDict.items()):
        # To set a level walks through all loggers there are, and vLLM has hundreds.
        if name.startswith("kvferry") and isinstance(logger, logging.Logger) and logger.level:
            logger.setLevel(logging.NOTSET)
