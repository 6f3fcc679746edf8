"""What kvferry promises of its speed, beside what a comparison has measured.

A target is met, missed, or open: the comparison did not measure it, or has too few requests or repeats for a
verdict. Nothing is rounded in its favour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvferry.bench.analysis import GAP, HANDOVER, Comparison
from kvferry.bench.connectors import BASELINE, CONNECTORS, PULL, PUSH, STOCK_PULL
from kvferry.bench.costs import SIDES
from kvferry.bench.enough import too_few_repeats
from kvferry.bench.grid import Cell

Verdict = Literal["met", "missed", "not judged", "not measured"]

LONG_PROMPT_TOKENS = 16384
HANDOVER_RATES = (1.0, 4.0)
HANDOVER_RATIO_MAX = {2048: 1 / 3, 8192: 0.55}
"""By the tokens that one step of prefill computes."""
BUSY = Cell(8, LONG_PROMPT_TOKENS)
HANDOVER_STEPS_MAX = 3
HANDOVER_SECONDS_MAX = 0.003
TTFT_RATIO_MAX = {0.5: 0.8, 0.95: 0.7}
TPOT_RATIO_MAX = 1.03
GAP_RATIO_MAX = 0.5
HOOK_SECONDS_MAX = 0.0005
IDLE_SHARE_MAX = 0.02
PULL_HOOKS_RATIO_MAX = 1.2


@dataclass(frozen=True, slots=True)
class Target:
    """One promise and what became of it."""

    what: str
    limit: str
    figure: str
    verdict: Verdict


def targets(comparison: Comparison) -> list[Target]:
    """All targets of those connectors of ours that have run; none when none has."""
    ours = comparison.ours()
    found: list[Target] = []
    if PUSH in ours:
        found += _of_push(comparison, PUSH)
    if PULL in ours:
        found += _of_pull(comparison)
    return [*found, _right(comparison)] if found else []


def _of_push(comparison: Comparison, ours: str) -> Iterator[Target]:
    chunk = comparison.options.engines.get("step_tokens")
    if chunk in HANDOVER_RATIO_MAX:
        for rate in HANDOVER_RATES:
            cell = Cell(rate, LONG_PROMPT_TOKENS)
            limit = HANDOVER_RATIO_MAX[chunk]
            yield _better(comparison, ours, cell, HANDOVER, 0.5, limit, f"hand-over p50, chunks of {chunk}")
    if isinstance(chunk, int):
        yield _handover_bound(comparison, ours, chunk)
    for share, limit in TTFT_RATIO_MAX.items():
        yield _better(comparison, ours, BUSY, "ttft", share, limit, f"TTFT p{share * 100:g}")
        if comparison.stock(BUSY, synchronous=True):
            what = f"TTFT p{share * 100:g}, synchronous posting"
            yield _better(comparison, ours, BUSY, "ttft", share, limit, what, synchronous=True)
    yield _nowhere_worse(comparison, ours, CONNECTORS, "every cell, TTFT and TPOT p50", "a stock connector")
    yield _like_the_baseline(comparison, ours)
    yield _better(comparison, ours, BUSY, GAP, 0.95, GAP_RATIO_MAX, "gap between chunks p95")
    for side in SIDES:
        yield _hooks(comparison, ours, side)
    for side in SIDES:
        yield _idle(comparison, ours, side)


def _of_pull(comparison: Comparison) -> Iterator[Target]:
    what = "pull in every cell, TTFT and TPOT p50"
    yield _nowhere_worse(comparison, PULL, STOCK_PULL, what, "stock pull")
    yield _like_push(comparison, ("decode",), "on decode")
    yield _like_push(comparison, SIDES, "on both engines")


def _better(
    comparison: Comparison,
    ours: str,
    cell: Cell,
    metric: str,
    share: float,
    limit: float,
    what: str,
    *,
    synchronous: bool = False,
) -> Target:
    told = comparison.against_better(ours, cell, metric, share, synchronous=synchronous)
    what, limited = f"{what} at {cell.name}", f"at most {limit:.2f} x the better stock connector"
    if told is None:
        return Target(what, limited, "", "not measured")
    one = told.ratio
    few = comparison.shortage((ours, told.connector), cell, metric, share)
    interval = f" ({one.low:.2f} to {one.high:.2f})" if one.high > one.low and few is None else ""
    figure = f"{one.figure:.2f} x {CONNECTORS[told.connector].label}{interval}"
    return _judged(Target(what, limited, figure, "met" if one.figure <= limit else "missed"), few)


def _judged(target: Target, few: str | None) -> Target:
    """The target without a verdict where there are too `few` requests or repeats for one."""
    if few is None:
        return target
    return replace(target, figure=f"{target.figure}; {few}", verdict="not judged")


def _handover_bound(comparison: Comparison, ours: str, chunk_tokens: int) -> Target:
    """What a hand-over takes beside the last chunk's write: that share of the time in which KV moved."""
    cell = Cell(1, LONG_PROMPT_TOKENS)
    what = f"hand-over p50 at {cell.name}"
    limit = (
        f"the last chunk's write, {HANDOVER_STEPS_MAX} decode steps and {HANDOVER_SECONDS_MAX * 1000:g} ms"
    )
    one = comparison.figure(ours, cell, HANDOVER, 0.5)
    steps = comparison.costs.steps(ours, cell, "decode")
    moving = comparison.moving(ours, cell)
    if one is None or steps is None or moving is None:
        return Target(what, limit, "", "not measured")
    write = moving * min(chunk_tokens / cell.input_tokens, 1.0)
    bound = write + HANDOVER_STEPS_MAX * steps.modelled + HANDOVER_SECONDS_MAX
    figure = f"{one.figure * 1000:.1f} of {bound * 1000:.1f} ms, {write * 1000:.1f} of them for the write"
    few = comparison.shortage((ours,), cell, HANDOVER, 0.5)
    return _judged(Target(what, limit, figure, "met" if one.figure <= bound else "missed"), few)


def _nowhere_worse(comparison: Comparison, ours: str, rivals: Iterable[str], what: str, whom: str) -> Target:
    limit = f"not worse than {whom} beyond the interval"
    worse, compared, few = [], 0, []
    for cell in comparison.cells:
        stock = (*comparison.stock(cell), *comparison.stock(cell, synchronous=True))
        for theirs in filter(frozenset(rivals).__contains__, stock):
            for metric in ("ttft", "tpot"):
                one = comparison.against(ours, theirs, cell, metric, 0.5)
                if one is None:
                    continue
                short = comparison.shortage((ours, theirs), cell, metric, 0.5)
                few += [] if short is None else [short]
                compared += short is None
                if short is None and one.low > 1:
                    label = CONNECTORS[theirs].label
                    worse.append(f"{metric.upper()} at {cell.name} {one.figure:.3f} x {label}")
    if not compared and not few:
        return Target(what, limit, "", "not measured")
    figure = "; ".join(worse) if worse else f"none of {compared} comparisons"
    if few:
        figure += f"; {len(few)} not judged, such as with {few[0]}"
    return Target(what, limit, figure, "missed" if worse else "met" if compared else "not judged")


def _like_the_baseline(comparison: Comparison, ours: str) -> Target:
    what, limit = f"TPOT p50 at {BUSY.name}", f"at most {TPOT_RATIO_MAX:.2f} x decode without transfers"
    one = comparison.against(ours, BASELINE, BUSY, "tpot", 0.5)
    if one is None:
        return Target(what, limit, "", "not measured")
    few = comparison.shortage((ours, BASELINE), BUSY, "tpot", 0.5)
    figure = f"{one.figure:.3f} x" + (f" ({one.low:.3f} to {one.high:.3f})" if few is None else "")
    return _judged(Target(what, limit, figure, "met" if one.figure <= TPOT_RATIO_MAX else "missed"), few)


def _hooks(comparison: Comparison, ours: str, side: str) -> Target:
    cell = Cell(1, LONG_PROMPT_TOKENS)
    what, limit = f"hooks per request on {side} at {cell.name}", f"at most {HOOK_SECONDS_MAX * 1000:g} ms"
    costs = comparison.costs
    busy, every = costs.busy_hooks_per_request(ours, cell, side), costs.hooks_per_request(ours, cell, side)
    if busy is None or every is None:
        return Target(what, limit, "", "not measured")
    stock = [
        f"{CONNECTORS[name].label} {theirs * 1000:.2f} and {all_of_theirs * 1000:.2f} ms"
        for name in comparison.stock(cell)
        if (theirs := costs.busy_hooks_per_request(name, cell, side)) is not None
        and (all_of_theirs := costs.hooks_per_request(name, cell, side)) is not None
    ]
    figure = f"{busy * 1000:.2f} ms; with the idle calls of an answer's steps {every * 1000:.2f} ms"
    figure += f" ({', '.join(stock)})" if stock else ""
    few = comparison.shortage((ours,), cell, "e2el", 0.5)
    return _judged(Target(what, limit, figure, "met" if busy <= HOOK_SECONDS_MAX else "missed"), few)


def _like_push(comparison: Comparison, sides: Sequence[str], where: str) -> Target:
    """What a pulled request costs the engines' main threads, beside a pushed one."""
    cell = Cell(1, LONG_PROMPT_TOKENS)
    what = f"hooks per pulled request {where} at {cell.name}"
    limit = f"at most {PULL_HOOKS_RATIO_MAX:g} x those of a pushed one"
    pulled, pushed = (
        [comparison.costs.busy_hooks_per_request(name, cell, side) for side in sides] for name in (PULL, PUSH)
    )
    if None in pulled or None in pushed:
        return Target(what, limit, "", "not measured")
    ours, theirs = sum(filter(None, pulled)), sum(filter(None, pushed))
    figure = f"{ours * 1000:.2f} and {theirs * 1000:.2f} ms"
    verdict: Verdict = "met" if ours <= PULL_HOOKS_RATIO_MAX * theirs else "missed"
    few = comparison.shortage((PULL, PUSH), cell, "e2el", 0.5)
    return _judged(Target(what, limit, figure, verdict), few)


def _idle(comparison: Comparison, ours: str, side: str) -> Target:
    what, limit = f"idle CPU of kvferry's threads, {side}", f"under {IDLE_SHARE_MAX:.0%} of a core"
    share, whole = comparison.costs.idle_thread_share(ours, side), comparison.costs.idle_share(ours, side)
    if share is None or whole is None:
        return Target(what, limit, "", "not measured")
    stock = [
        f"{CONNECTORS[name].label} {theirs:.0%}"
        for name in comparison.connectors
        if CONNECTORS[name].kind == "stock"
        and (theirs := comparison.costs.idle_share(name, side)) is not None
    ]
    figure = f"{share:.1%} of a core, the whole engine {whole:.1%}"
    figure += f" ({', '.join(stock)})" if stock else ""
    started = sum(one.connector == ours for one in comparison.sessions)
    verdict: Verdict = "met" if share < IDLE_SHARE_MAX else "missed"
    return _judged(Target(what, limit, figure, verdict), too_few_repeats(started))


def _right(comparison: Comparison) -> Target:
    checks = comparison.checks
    wrong, different, failed = checks.mismatches(), checks.different_answers(), len(checks.failures())
    figure = (
        f"{wrong} of {checks.pages():,} pages wrong, {different} answers different, {failed} requests failed"
    )
    verdict: Verdict = "missed" if wrong or different or failed else "met"
    return Target("pages, answers, requests", "all right", figure, verdict)
