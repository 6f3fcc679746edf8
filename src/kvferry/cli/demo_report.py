"""What the demo found, as a table and a last line that says the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.handoff import TransferMode

MEBIBYTE = 1 << 20
HEADINGS = (
    "request",
    "tokens",
    "equal",
    "{mode}ed",
    "geometry",
    "early",
    "computed by D",
    "TTFT",
    "one engine",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request through the router, beside the same request to the reference engine."""

    name: str
    prompt_tokens: int
    prompts: int
    equal: bool
    mode: TransferMode = "push"
    moved_bytes: int
    expected_bytes: int
    early_bytes: int
    """Those of the moved bytes that were posted before prefill ended; none of a pull's."""
    computed_tokens: int
    """Prompt tokens that the decode engine computed itself."""
    computed_tokens_max: int
    """One block per prompt and answer."""
    first_token_seconds: float | None
    reference_first_token_seconds: float | None

    @property
    def problems(self) -> list[str]:
        """What is wrong with it, in words; empty when all is well."""
        found = []
        if not self.equal:
            found.append(f"{self.name}: the answer differs from the reference")
        if self.moved_bytes != self.expected_bytes:
            found.append(
                f"{self.name}: {self.moved_bytes} bytes {self.mode}ed, geometry says {self.expected_bytes}"
            )
        if self.computed_tokens > self.computed_tokens_max:
            found.append(
                f"{self.name}: the decode engine computed {self.computed_tokens} prompt tokens itself, more "
                f"than {self.computed_tokens_max}"
            )
        return found


def table(outcomes: Sequence[Outcome]) -> str:
    """One row per request under a heading; numbers to the right."""
    headings = tuple(heading.format(mode=outcomes[0].mode) for heading in HEADINGS)
    rows = [headings, *(_row(outcome) for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def verdict(outcomes: Sequence[Outcome]) -> str:
    """The last line."""
    equal = sum(outcome.equal for outcome in outcomes)
    moved = sum(outcome.moved_bytes for outcome in outcomes)
    early = sum(outcome.early_bytes for outcome in outcomes)
    well = not any(outcome.problems for outcome in outcomes)
    mode = outcomes[0].mode
    in_time = f", {_share(early, moved)} of it before prefill ended" if mode == "push" else ""
    return (
        f"{'PASSED' if well else 'FAILED'}: {equal} of {len(outcomes)} answers equal one engine's; "
        f"{_mebibytes(moved)} of KV {mode}ed{in_time}."
    )


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.name,
        str(outcome.prompt_tokens),
        "yes" if outcome.equal else "NO",
        _mebibytes(outcome.moved_bytes),
        "agrees" if outcome.moved_bytes == outcome.expected_bytes else _mebibytes(outcome.expected_bytes),
        # A pull begins when prefill has ended: it has no early part, not one of 0 %.
        _share(outcome.early_bytes, outcome.moved_bytes) if outcome.mode == "push" else "-",
        str(outcome.computed_tokens),
        _milliseconds(outcome.first_token_seconds),
        _milliseconds(outcome.reference_first_token_seconds),
    )


def _mebibytes(count: int) -> str:
    return f"{count / MEBIBYTE:.1f} MiB"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"
