"""Versions of vLLM that nobody should expose, as far as this release of kvferry knows.

The list is short on purpose: faults that let a client or a model take over an engine, or a client use it
without its key. Ranges and effects are those of vLLM's published advisories, and no substitute for following
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBERS = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Advisory:
    """A fault in the versions from `since` on, before `fixed`."""

    name: str
    since: tuple[int, int, int]
    fixed: tuple[int, int, int]
    what: str


ADVISORIES = (
    Advisory("CVE-2026-48746", (0, 3, 0), (0, 22, 0), "who reaches it directly needs no API key"),
    Advisory("CVE-2026-22778", (0, 8, 3), (0, 14, 1), "clients of a model for videos can run code"),
    Advisory("CVE-2026-22807", (0, 10, 1), (0, 14, 0), "a model's own code runs, trusted or not"),
    Advisory("CVE-2025-62164", (0, 10, 2), (0, 11, 1), "prompt embeddings can corrupt memory"),
)


def advisories_for(version: str) -> list[Advisory]:
    """Those that concern a version as `/version` tells it; none for one that cannot be read."""
    match = _NUMBERS.match(version)
    if match is None:
        return []
    major, minor, patch = (int(part or 0) for part in match.groups())
    return [each for each in ADVISORIES if each.since <= (major, minor, patch) < each.fixed]
