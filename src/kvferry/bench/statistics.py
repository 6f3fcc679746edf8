"""Quantiles, and intervals by the bootstrap.

Requests of one load are not independent: a queue that has built up delays the next ones too. So the
bootstrap draws runs of neighbouring requests, in each repeat for itself, and two connectors that met the same
requests at the same moments are drawn together.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""From samples, one draw per row, to one figure per row."""

DRAWS = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Summary:
    """What the field reports of one metric."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the range that holds it with a confidence of 95 %."""

    figure: float
    low: float
    high: float


def quantile(share: float) -> Statistic:
    """The statistic that is a quantile, interpolated between the two nearest samples."""

    def of(samples: Floats) -> Floats:
        return np.asarray(np.quantile(samples, share, axis=-1), dtype=np.float64)

    return of


def mean(samples: Floats) -> Floats:
    """The arithmetic mean as a statistic."""
    return np.asarray(samples.mean(axis=-1), dtype=np.float64)


def summary(samples: Sequence[float] | Floats) -> Summary | None:
    """The usual figures of some samples; None of none."""
    values = np.asarray(samples, dtype=np.float64)
    if not values.size:
        return None
    p50, p90, p95, p99 = (float(figure) for figure in np.quantile(values, (0.5, 0.9, 0.95, 0.99)))
    return Summary(values.size, float(values.mean()), p50, p90, p95, p99)


def interval(groups: Sequence[Floats], statistic: Statistic, *, seed: int, draws: int = DRAWS) -> Interval:
    """A statistic of all groups' samples together, and its interval. `groups` has one array per repeat.

    Raises:
        ValueError: there is no sample.
    """
    pooled = _pooled(groups)
    sizes = [group.size for group in groups]
    drawn = statistic(pooled[_draws(sizes, draws, _chance(seed))])
    return Interval(float(statistic(pooled)), *_bounds(drawn))


def ratio(
    ours: Sequence[Floats], theirs: Sequence[Floats], statistic: Statistic, *, seed: int, draws: int = DRAWS
) -> Interval:
    """Our statistic over theirs, and its interval.

    Groups of equal sizes are taken as the same requests, sample by sample, and drawn together.

    Raises:
        ValueError: there is no sample.
    """
    our_sizes, their_sizes = ([group.size for group in groups] for groups in (ours, theirs))
    chance = _chance(seed)
    our_draws = _draws(our_sizes, draws, chance)
    their_draws = our_draws if our_sizes == their_sizes else _draws(their_sizes, draws, chance)
    above, below = _pooled(ours), _pooled(theirs)
    drawn = statistic(above[our_draws]) / statistic(below[their_draws])
    return Interval(float(statistic(above) / statistic(below)), *_bounds(drawn))


def seed_of(*parts: object) -> int:
    """A seed that follows from a name, the same in every process."""
    return zlib.crc32(repr(parts).encode())


def _pooled(groups: Sequence[Floats]) -> Floats:
    pooled = np.concatenate([np.asarray(group, dtype=np.float64) for group in groups]) if groups else None
    if pooled is None or not pooled.size:
        raise ValueError("no samples to draw from")
    return pooled


def _draws(sizes: Sequence[int], draws: int, chance: np.random.Generator) -> npt.NDArray[np.intp]:
    """Positions in the pooled samples, one draw per row; each group keeps its size."""
    parts, offset = [], 0
    for size in sizes:
        if size:
            parts.append(offset + _blocks(size, draws, chance))
        offset += size
    return np.concatenate(parts, axis=1)


def _blocks(size: int, draws: int, chance: np.random.Generator) -> npt.NDArray[np.intp]:
    """Positions of runs of neighbours, about the cube root of `size` long; the first follows the last."""
    length = max(1, round(size ** (1 / 3)))
    starts = chance.integers(0, size, (draws, -(-size // length)))
    runs = starts[:, :, None] + np.arange(length)
    return np.asarray(runs.reshape(draws, -1)[:, :size] % size, dtype=np.intp)


def _bounds(drawn: Floats) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return float(low), float(high)


def _chance(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
