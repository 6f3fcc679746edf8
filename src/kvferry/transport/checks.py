"""What every transport asks of runs and messages before it posts or sends."""

from __future__ import annotations

import numpy as np

from kvferry.errors import TransportError
from kvferry.layout.runs import Runs


def check_runs(runs: Runs) -> None:
    """Check that three arrays describe one list of runs.

    Raises:
        TransportError: there are no runs, or the arrays differ in length or type.
    """
    if not len(runs):
        raise TransportError("a transfer needs at least one run; send a message instead")
    if not len(runs.source) == len(runs.target) == len(runs.length):
        raise TransportError(
            f"runs are uneven: {len(runs.source)} sources, {len(runs.target)} targets, "
            f"{len(runs.length)} lengths"
        )
    for name, array in (("source", runs.source), ("target", runs.target), ("length", runs.length)):
        if array.dtype != np.uint64 or array.ndim != 1:
            raise TransportError(
                f"runs.{name} must be a vector of uint64, not {array.dtype} with {array.ndim} axes"
            )


def check_payload(payload: bytes, bytes_max: int) -> None:
    """Check a message's length.

    Raises:
        TransportError: it is empty, which NIXL cannot carry, or too long.
    """
    if not payload:
        raise TransportError("a message needs at least one byte")
    if len(payload) > bytes_max:
        raise TransportError(f"message has {len(payload)} bytes, at most {bytes_max} go; split it")
