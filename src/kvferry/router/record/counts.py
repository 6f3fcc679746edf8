"""Counters for what is counted with every request: an addition, no lock.

They belong to the event loop's thread, as the histograms do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Total:
    """What was counted with one set of label values."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count so much more."""
        self.value += amount


class Count:
    """A Prometheus counter; label values are bounded by whoever gives them."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._children: dict[tuple[str, ...], Total] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Total:
        """What is counted with these label values."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = Total()
        return child

    def inc(self, amount: float = 1.0) -> None:
        """Count with a counter without labels."""
        self.labels().inc(amount)

    def collect(self) -> list[CounterMetricFamily]:
        """What the registry asks for."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
        return [family]
