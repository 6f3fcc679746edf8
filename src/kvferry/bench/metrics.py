"""The field's metrics: from records to samples, and goodput."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from kvferry.bench.records import Load, Record
from kvferry.bench.statistics import Summary, summary
from kvferry.errors import UsageError

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "gap between stream chunks",
    "e2el": "time to the end of the answer",
}
"""Metrics by the names that benchmarks of this field use; all are in seconds here."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What a load achieved as a whole."""

    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    requests_per_second: float
    completion_tokens_per_second: float
    goodput_per_second: float | None
    """Requests per second that met every objective; None when none was given."""


def samples(metric: str, records: Iterable[Record]) -> list[float]:
    """The samples of one metric, in seconds, of the requests that were answered in full."""
    found: list[float] = []
    for record in records:
        if not record.succeeded:
            continue
        if metric == "itl":
            found += record.gaps_seconds
        elif (value := _value(metric, record)) is not None:
            found.append(value)
    return found


def summaries(names: Sequence[str], records: Sequence[Record]) -> dict[str, Summary]:
    """The summary of each metric that has samples."""
    found = {name: summary(samples(name, records)) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def totals(load: Load, objectives: Mapping[str, float]) -> Totals:
    """The whole load; `objectives` has the most seconds per metric that a good request may take."""
    done = [record for record in load.records if record.succeeded]
    tokens = sum(record.completion_tokens for record in done)
    good = sum(all(_meets(name, record, limit) for name, limit in objectives.items()) for record in done)
    seconds = max(load.seconds, 1e-9)
    return Totals(
        requests=len(load.records),
        failed=len(load.records) - len(done),
        seconds=load.seconds,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        completion_tokens=tokens,
        requests_per_second=len(done) / seconds,
        completion_tokens_per_second=tokens / seconds,
        goodput_per_second=good / seconds if objectives else None,
    )


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Read `--goodput ttft:500 tpot:20`, in milliseconds, into seconds per metric.

    Raises:
        UsageError: a part cannot be read, or names an unknown metric.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        known = [metric for metric in METRICS if metric != "itl"]
        try:
            milliseconds = float(limit)
        except ValueError:
            milliseconds = -1.0
        if name not in known or not milliseconds > 0:
            raise UsageError(
                f"--goodput must be METRIC:MILLISECONDS with one of {', '.join(known)}, such as ttft:500, "
                f"not {text!r}"
            )
        found[name] = milliseconds / 1000
    return found


def parse_metrics(text: str) -> tuple[str, ...]:
    """Read `--percentile-metrics ttft,tpot`.

    Raises:
        UsageError: an unknown metric is named.
    """
    names = tuple(filter(None, text.split(",")))
    unknown = [name for name in names if name not in METRICS]
    if unknown or not names:
        raise UsageError(
            f"--percentile-metrics must be some of {','.join(METRICS)}, not {','.join(unknown) or 'nothing'}"
        )
    return names


def as_milliseconds(one: Summary) -> dict[str, float]:
    """A summary for people and files: milliseconds, without the count."""
    return {key: round(value * 1000, 3) for key, value in asdict(one).items() if key != "count"}


def _value(metric: str, record: Record) -> float | None:
    if metric == "ttft":
        return record.ttft_seconds
    return record.tpot_seconds if metric == "tpot" else record.e2e_seconds


def _meets(metric: str, record: Record, limit: float) -> bool:
    value = _value(metric, record)
    # A single token has no time per token to be judged by.
    return value <= limit if value is not None else metric == "tpot"
