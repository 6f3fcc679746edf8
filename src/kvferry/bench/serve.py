"""One load against one OpenAI-compatible endpoint: `kvferry bench serve`."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from kvferry.bench.arrivals import schedule
from kvferry.bench.dispatch import Ask, Direct, Style, asks_of
from kvferry.bench.load import LoadLimits, client, run_load
from kvferry.bench.metrics import as_milliseconds, summaries, totals
from kvferry.bench.prompts import VOCABULARY_DEFAULT, text_prompts, token_prompts
from kvferry.bench.records import Load, Record
from kvferry.errors import UsageError

PROMPTS_MAX = 1_000_000
PROMPT_TOKENS_MAX = 1 << 28
"""Of all prompts together: they are made before the load starts, and kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to send, and to whom."""

    url: str
    model: str
    rate: float = math.inf
    burstiness: float = 1.0
    prompts: int = 100
    input_tokens: int = 1024
    output_tokens: int = 128
    kind: Literal["tokens", "text"] = "tokens"
    vocabulary: tuple[int, int] = VOCABULARY_DEFAULT
    seed: int = 0
    limits: LoadLimits = field(default_factory=LoadLimits)
    objectives: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url must be http://HOST:PORT, not {self.url!r}")
        if not 1 <= self.prompts <= PROMPTS_MAX:
            raise UsageError(f"--num-prompts must be from 1 to {PROMPTS_MAX}, not {self.prompts}")
        if self.output_tokens < 1:
            raise UsageError(f"--random-output-len must be at least 1, not {self.output_tokens}")
        if self.prompts * self.input_tokens > PROMPT_TOKENS_MAX:
            raise UsageError(
                f"--num-prompts times --random-input-len must be at most {PROMPT_TOKENS_MAX} tokens, not "
                f"{self.prompts * self.input_tokens}"
            )


async def serve(options: ServeOptions, on_record: Callable[[Record], None]) -> Load:
    """Run the load."""
    asks = planned(options)
    due = schedule(options.prompts, options.rate, options.burstiness, options.seed)
    style = Style(model=options.model, extra=options.extra, headers=options.headers)
    dispatch = Direct(options.url.rstrip("/").removesuffix("/v1"), style)
    async with client() as session:
        return await run_load(session, dispatch, asks, due, options.limits, on_record)


def planned(options: ServeOptions) -> list[Ask]:
    """The requests of the load, in order; their ids are new in every run."""
    run = secrets.token_hex(4)
    prompts = (
        text_prompts(options.prompts, options.input_tokens, options.seed)
        if options.kind == "text"
        else token_prompts(options.prompts, options.input_tokens, options.vocabulary, options.seed)
    )
    return asks_of(f"bench-{run}", prompts, options.output_tokens)


def result(options: ServeOptions, load: Load, metrics: Sequence[str]) -> dict[str, Any]:
    """Everything about a finished load, for a file."""
    told = asdict(options) | {"headers": sorted(options.headers), "rate": _number(options.rate)}
    figures = summaries(metrics, load.records)
    return {
        "options": told,
        "totals": asdict(totals(load, options.objectives)),
        "metrics": list(metrics),
        "samples": {name: one.count for name, one in figures.items()},
        "milliseconds": {name: as_milliseconds(one) for name, one in figures.items()},
        "started_ns": load.started_ns,
        "requests": msgspec.to_builtins(load.records),
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)
