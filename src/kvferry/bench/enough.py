"""How many requests a figure needs before its interval says anything.

An interval is drawn from the samples themselves (`statistics`) and cannot reach beyond them. Of n samples
n * (1 - q) are expected above the quantile q, and n * q below. Where they are few on one side, the interval
is too short there, however far one more sample might have lain. Tried with independent requests in two
repeats: with six expected on the thinner side, an interval that should hold the true value in 95 of 100 cases
does so in 83 (median) and 88 (95th percentile); with four and with twenty requests in 65 and 62. So it is
six: 12 requests for a median, 120 for a 95th percentile.

Repeats start the engines anew. What differs from one start to the next is not in the samples of one.
"""

from __future__ import annotations

import math

SAMPLES_BESIDE_MIN = 6
"""How many samples must be expected on either side of a quantile."""
REPEATS_MIN = 2


def requests_needed(share: float) -> int:
    """The fewest requests with which a quantile is judged."""
    # Rounded, so that 6 / (1 - 0.95) is 120 and not a little more.
    return math.ceil(round(SAMPLES_BESIDE_MIN / min(share, 1 - share), 6))


def shortage(requests: int, repeats: int, share: float) -> str | None:
    """What is missing for judging a quantile, in words; None when nothing is."""
    if requests < requests_needed(share):
        return f"{_counted(requests, 'request')}, at least {requests_needed(share)} are needed"
    return too_few_repeats(repeats)


def too_few_repeats(repeats: int) -> str | None:
    """The same for what is measured once per repeat."""
    if repeats < REPEATS_MIN:
        return f"{_counted(repeats, 'repeat')}, at least {REPEATS_MIN} are needed"
    return None


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
