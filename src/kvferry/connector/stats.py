"""Transfer statistics on their way to vLLM's logger and to Prometheus.

Counters and observations are what has happened since the last report; gauges are the latest value.
Everything is plain data, because vLLM carries it between processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.host.metrics import (
    BYTES,
    BYTES_EARLY,
    HANDOVER,
    HISTORIES,
    HOLDS,
    LOST_TOKENS,
    TRANSFERS,
    WRITE,
)

COUNTERS = "counters"
OBSERVATIONS = "observations"
GAUGES = "gauges"

LEGACY_PAIRINGS = "kvferry_legacy_pairings"
REFUSED_PARAMS = "kvferry_refused_params"
IN_FLIGHT = "kvferry_transfers_in_flight"
QUARANTINED = "kvferry_quarantined_blocks"
READY = "kvferry_ready"
HELD_BLOCKS = "kvferry_held_blocks"

COUNTER_LABELS: dict[str, tuple[str, ...]] = {
    TRANSFERS: ("mode", "outcome", "reason"),
    BYTES: ("mode",),
    BYTES_EARLY: ("mode",),
    LOST_TOKENS: (),
    LEGACY_PAIRINGS: (),
    REFUSED_PARAMS: ("field",),
    HOLDS: ("outcome",),
    HISTORIES: ("outcome",),
}
GAUGE_LABELS: dict[str, tuple[str, ...]] = {
    IN_FLIGHT: ("state",),
    QUARANTINED: (),
    READY: (),
    HELD_BLOCKS: (),
}
_HISTOGRAMS = (HANDOVER, WRITE)
_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_HELP = {
    TRANSFERS: "Transfers that ended, by outcome.",
    BYTES: "KV bytes that this engine has pushed or received.",
    BYTES_EARLY: "KV bytes that were posted before the prefill of their request had ended.",
    LOST_TOKENS: "Prompt tokens whose KV did not come: computed here, or the request failed.",
    LEGACY_PAIRINGS: "Requests without a transfer_id, paired by the base of their X-Request-Id.",
    REFUSED_PARAMS: "Requests that ran locally because a key of their kv_transfer_params was wrong.",
    HANDOVER: "From the end of prefill until no consumer needs the source blocks.",
    WRITE: "From the registration of a destination until its last byte had arrived.",
    IN_FLIGHT: "Transfers by state: sending, held (prefill has ended), receiving.",
    QUARANTINED: "Blocks that nobody may have because a peer may still write or read them.",
    HOLDS: "Turns that were kept for the next one, by how that ended.",
    HISTORIES: "Prefill requests that came with what a decode engine keeps, by what became of it.",
    HELD_BLOCKS: "Blocks that are kept after turns.",
    READY: "1 while quarantine leaves room for remote KV, and the caches of producers that are named fit.",
}
_SEPARATOR = "\x1f"
_MOVED_KEYS = {name: _SEPARATOR.join((name, "push")) for name in (BYTES, BYTES_EARLY)}


class FerryStats(KVConnectorStats):
    """The statistics of an interval. `data` maps COUNTERS, OBSERVATIONS and GAUGES to `{key: value}`."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or _empty())

    def count(self, name: str, amount: int = 1, labels: tuple[str, ...] = ()) -> None:
        """Add to a counter."""
        counters, key = self.data[COUNTERS], _SEPARATOR.join((name, *labels))
        counters[key] = counters.get(key, 0) + amount

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a histogram."""
        self.data[OBSERVATIONS].setdefault(name, []).append(value)

    def gauge(self, name: str, value: float, labels: tuple[str, ...] = ()) -> None:
        """Set a gauge."""
        self.data[GAUGES][_SEPARATOR.join((name, *labels))] = value

    def reset(self) -> None:
        """Forget everything."""
        self.data = _empty()

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        """Add another rank's or interval's statistics; its gauges replace ours."""
        theirs = other.data
        for key, amount in theirs[COUNTERS].items():
            self.data[COUNTERS][key] = self.data[COUNTERS].get(key, 0) + amount
        for key, values in theirs[OBSERVATIONS].items():
            self.data[OBSERVATIONS].setdefault(key, []).extend(values)
        self.data[GAUGES].update(theirs[GAUGES])
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for the engine's log line."""
        line: dict[str, int | float] = {
            key.replace(_SEPARATOR, " ").removeprefix("kvferry_"): amount
            for key, amount in self.data[COUNTERS].items()
        }
        for name, values in self.data[OBSERVATIONS].items():
            line[f"{name.removeprefix('kvferry_')} mean"] = round(sum(values) / len(values), 4)
        return line

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.data[COUNTERS] or self.data[OBSERVATIONS] or self.data[GAUGES])


class FerryPromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics of design.md, one child per engine of a front end."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]
        self._counters = {
            name: counter(name=name, documentation=_HELP[name], labelnames=[*labelnames, *labels])
            for name, labels in COUNTER_LABELS.items()
        }
        self._gauges = {
            name: gauge(
                name=name,
                documentation=_HELP[name],
                labelnames=[*labelnames, *labels],
                multiprocess_mode="mostrecent",
            )
            for name, labels in GAUGE_LABELS.items()
        }
        self._histograms = {
            name: histogram(
                name=name, documentation=_HELP[name], labelnames=labelnames, buckets=list(_SECONDS_BUCKETS)
            )
            for name in _HISTOGRAMS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one report."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labels, amount in _entries(transfer_stats_data[COUNTERS]):
            self._counters[name].labels(*engine, *labels).inc(amount)
        for name, labels, value in _entries(transfer_stats_data[GAUGES]):
            self._gauges[name].labels(*engine, *labels).set(value)
        for name, values in transfer_stats_data[OBSERVATIONS].items():
            child = self._histograms[name].labels(*engine)
            for value in values:
                child.observe(value)


def moved_stats(moved: Mapping[str, int]) -> FerryStats | None:
    """A rank's statistics, made of the bytes that it has moved; None when it has moved none."""
    if not moved:
        return None
    counters = {_MOVED_KEYS[name]: amount for name, amount in moved.items()}
    return FerryStats({COUNTERS: counters, OBSERVATIONS: {}, GAUGES: {}})


def _entries(data: dict[str, Any]) -> Iterator[tuple[str, list[str], Any]]:
    for key, value in data.items():
        name, *labels = key.split(_SEPARATOR)
        yield name, labels, value


def _empty() -> dict[str, Any]:
    return {COUNTERS: {}, OBSERVATIONS: {}, GAUGES: {}}
