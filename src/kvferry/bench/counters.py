"""What an engine's metrics have counted about transfers."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvferry.bench.stream import LegError

PREFIXES = ("kvferry_", "vllm:nixl_")
_SUFFIXES = ("_total", "_sum", "_count")
_SECONDS_MAX = 30.0


async def read_counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Ask the engine at `url`.

    Raises:
        LegError: it does not answer.
    """
    try:
        timeout = aiohttp.ClientTimeout(total=_SECONDS_MAX)
        async with session.get(f"{url}/metrics", timeout=timeout) as response:
            if response.status != 200:
                raise LegError(f"{url}/metrics: answered {response.status}")
            return parse_counters(await response.text())
    except (aiohttp.ClientError, OSError) as error:
        raise LegError(f"{url}/metrics: {str(error) or type(error).__name__}") from error


def parse_counters(text: str) -> dict[str, float]:
    """Counters about transfers by name, summed over their labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIXES) and sample.name.endswith(_SUFFIXES):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def since(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """What has been counted in between; what has not moved is left out."""
    moved = {name: value - before.get(name, 0.0) for name, value in now.items()}
    return {name: round(value, 9) for name, value in moved.items() if value}
