"""When requests are due: an open-loop schedule that a seed decides, before anything is sent."""

from __future__ import annotations

import math
import random

from kvferry.errors import UsageError


def schedule(count: int, rate: float, burstiness: float, seed: int) -> list[float] | None:
    """When each request is due, in seconds after the first; None for an infinite rate.

    Gaps are drawn from a gamma distribution with a mean of 1/`rate` and the shape `burstiness`: 1 is a
    Poisson process, less comes in bursts, more is more even.

    Raises:
        UsageError: the rate or the burstiness is not positive.
    """
    if not rate > 0:
        raise UsageError(f"--request-rate must be above 0 (inf sends all at once), not {rate}")
    if not 0 < burstiness < math.inf:
        raise UsageError(f"--burstiness must be above 0, not {burstiness}; 1 is a Poisson process")
    if math.isinf(rate):
        return None
    chance = random.Random(f"arrivals {seed}")
    due, at = [], 0.0
    for _ in range(count):
        due.append(at)
        at += chance.gammavariate(burstiness, 1 / (rate * burstiness))
    return due
