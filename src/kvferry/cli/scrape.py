"""What an engine's metrics say about its transfers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kvferry.cli.requests import fetch

SCRAPE_SECONDS_MAX = 10.0

BYTES = "kvferry_transfer_bytes_total"
BYTES_EARLY = "kvferry_bytes_before_prefill_end_total"
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
CACHE_FACTS = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class Counters:
    """An engine's counters at one moment; subtract an earlier one to see what has happened since."""

    bytes: int = 0
    """KV bytes pushed or received."""
    bytes_early: int = 0
    """KV bytes posted before their prefill had ended."""
    tokens_computed: int = 0
    """Prompt tokens that the engine computed itself."""
    tokens_cached: int = 0
    """Prompt tokens that were in its own prefix cache."""
    tokens_received: int = 0
    """Prompt tokens whose KV came from another engine."""

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens, wherever their KV came from."""
        return self.tokens_computed + self.tokens_cached + self.tokens_received

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.bytes - earlier.bytes,
            self.bytes_early - earlier.bytes_early,
            self.tokens_computed - earlier.tokens_computed,
            self.tokens_cached - earlier.tokens_cached,
            self.tokens_received - earlier.tokens_received,
        )


def read_counters(url: str) -> Counters:
    """Ask the engine at `url`. A counter that it has not counted yet is 0."""
    return parse_counters(fetch(url, "/metrics", seconds=SCRAPE_SECONDS_MAX))


def read_block_tokens(url: str) -> int:
    """Tokens in one KV block of the engine at `url`, 0 if it does not say."""
    text = fetch(url, "/metrics", seconds=SCRAPE_SECONDS_MAX)
    sizes = [int(labels["block_size"]) for name, labels, _ in _samples(text) if name == CACHE_FACTS]
    return sizes[0] if sizes else 0


def parse_counters(text: str) -> Counters:
    """Sum the samples of a Prometheus exposition over their other labels."""
    values: dict[tuple[str, str], float] = {}
    for name, labels, value in _samples(text):
        key = (name, labels.get("source", ""))
        values[key] = values.get(key, 0.0) + value
    return Counters(
        bytes=int(values.get((BYTES, ""), 0)),
        bytes_early=int(values.get((BYTES_EARLY, ""), 0)),
        tokens_computed=int(values.get((PROMPT_TOKENS, "local_compute"), 0)),
        tokens_cached=int(values.get((PROMPT_TOKENS, "local_cache_hit"), 0)),
        tokens_received=int(values.get((PROMPT_TOKENS, "external_kv_transfer"), 0)),
    )


def _samples(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value
