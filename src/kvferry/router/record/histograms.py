"""Histograms for what is observed with every token: a bisection and two additions, no lock.

The Prometheus client's own takes a lock and walks the buckets. These belong to the event loop's thread, from
which `/metrics` is answered, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Buckets:
    """The observations of one set of label values."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, not cumulated; the last one has no upper bound."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Take in one value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Histogram:
    """A Prometheus histogram; label values are bounded by whoever gives them."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._children: dict[tuple[str, ...], Buckets] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Buckets:
        """The observations with these label values."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = Buckets(self._bounds)
        return child

    def observe(self, value: float) -> None:
        """Take in a value of a histogram without labels."""
        self.labels().observe(value)

    def collect(self) -> list[HistogramMetricFamily]:
        """What the registry asks for."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, child in self._children.items():
            count = 0
            buckets = []
            for name, more in zip(names, child.counts, strict=True):
                count += more
                buckets.append((name, count))
            family.add_metric(values, buckets, sum_value=child.total)
        return [family]
