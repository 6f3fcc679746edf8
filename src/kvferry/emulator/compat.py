"""What differs between the vLLM versions that the emulator stands in for a device of, and which they are.

It replaces an engine's executor, worker and runner, so it depends on more of vLLM's inside than the connector
does. 0.29 and 0.30 collect a step's transfers by `get_finished`, later ones by `get_transfer_results`. Memory
orders, block pools and the order of a step's hooks are alike.

The check imports nothing of vLLM's inside, so that it can speak before something is missing there.
"""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any

from kvferry.errors import UsageError

logger = logging.getLogger(__name__)

OLDEST = (0, 29)
NEWEST_TESTED = (0, 32)


def check_version(version: str | None = None) -> None:
    """Refuse a vLLM that is too old; warn of one that is newer than what has been tried.

    Raises:
        UsageError: names the versions that do.
    """
    found = str(importlib.import_module("vllm").__version__) if version is None else version
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    supported = f"{_text(OLDEST)} to {_text(NEWEST_TESTED)}"
    if numbers < OLDEST:
        raise UsageError(f"emulated engines need vLLM {supported}, and this is {found}; install one of them")
    if numbers > NEWEST_TESTED:
        logger.warning("emulated engines have been tried with vLLM %s, and this is %s", supported, found)


def transfer_reports(result: Any) -> tuple[set[str], set[str], set[str]]:
    """Requests sent, received and failed, of `get_transfer_results` (0.31 on) or `get_finished`."""
    if isinstance(result, tuple):
        sent, received = result
        return set(sent or ()), set(received or ()), set()
    return (
        set(result.finished_sending or ()),
        set(result.finished_recving or ()),
        set(result.failed_recving or ()),
    )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
