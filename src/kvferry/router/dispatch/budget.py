"""A bound on retries over all requests, so that a fleet that fails is not asked several times as much. Pure.

Each request earns a share of a retry, each retry spends one. What is earned adds up to a bound, which is also
what a router starts with: few requests may be retried freely, many only in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RESERVE = 100.0
"""Retries that may be saved up."""


@dataclass(slots=True)
class RetryBudget:
    """What all requests of one router share."""

    per_request: float
    """0 for no retries beyond the reserve, which then does not grow again."""
    _saved: float = field(default=RESERVE)

    def request(self) -> None:
        """A request has come."""
        self._saved = min(self._saved + self.per_request, RESERVE)

    @property
    def allows(self) -> bool:
        """Whether a retry may be made."""
        return self._saved >= 1.0

    def spend(self) -> None:
        """A retry is made."""
        self._saved -= 1.0
