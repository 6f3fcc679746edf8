"""Writes the table of supported pairs in docs/layout.md; each of its rows is tried.

python -m tests.support.layout_table            # write it anew
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from kvferry.ids import Rank
from kvferry.layout.compare import compare
from kvferry.layout.descriptors import expand
from kvferry.layout.plan import plan
from kvferry.layout.ranks import meetings, shape_of
from kvferry.layout.spec import CacheSpec
from tests.support.copies import check_engines
from tests.support.engines import Sizes, caches_of, covering, end_of

PAGE = Path(__file__).parents[2] / "docs" / "layout.md"
BEGIN, END = "<!-- begin supported -->\n", "<!-- end supported -->"
TOKENS = range(64)
MODEL = Sizes(split=(4,), heads=8, block_tokens=16, blocks=8)


@dataclass(frozen=True)
class Pair:
    """What a row is about, and its two engines."""

    title: str
    ours: Sizes
    theirs: Sizes


def pairs() -> Iterator[Pair]:
    """Rows that are to be exact."""

    def pair(title: str, ours: dict[str, object], theirs: dict[str, object], **both: object) -> Pair:
        model = replace(MODEL, **both)  # type: ignore[arg-type]
        return Pair(title, replace(model, **ours), replace(model, **theirs))  # type: ignore[arg-type]

    yield pair("equal engines, layers outermost", {}, {})
    yield pair("equal engines, blocks outermost", {}, {}, order="BLHNC")
    for ours, theirs in ((2, 1), (1, 2), (4, 1), (1, 4), (8, 2), (2, 8)):
        yield pair(f"TP {ours} to TP {theirs}, 8 KV heads", {"tp": ours}, {"tp": theirs})
    for ours, theirs in ((2, 4), (4, 2), (8, 8), (8, 1), (1, 8)):
        yield pair(f"TP {ours} to TP {theirs}, 2 KV heads", {"tp": ours}, {"tp": theirs}, heads=2)
    for ours, theirs in ((4, 1), (1, 4), (4, 4), (8, 2)):
        yield pair(f"MLA, TP {ours} to TP {theirs}", {"tp": ours}, {"tp": theirs}, heads=1)
    for mine, yours in (((2, 2), (4,)), ((4,), (2, 2)), ((1, 3), (2, 1, 1))):
        stages = [" + ".join(map(str, split)) for split in (mine, yours)]
        yield pair(f"PP, stages of {stages[0]} layers to {stages[1]}", {"split": mine}, {"split": yours})
    yield pair("TP 2 and PP 2 to TP 4", {"tp": 2, "split": (2, 2)}, {"tp": 4})
    for ours, theirs in ((16, 32), (32, 16), (16, 48), (64, 16), (16, 24)):
        sides: list[dict[str, object]] = [{"block_tokens": ours}, {"block_tokens": theirs}]
        yield pair(f"blocks of {ours} tokens to blocks of {theirs}", *sides)
    yield pair("LBHNC to BLHNC", {}, {"order": "BLHNC"})
    yield pair("LBHNC to LBNHC (heads and tokens exchanged)", {}, {"order": "LBNHC"})
    yield pair("BHLNC to LHBNC", {"order": "BHLNC"}, {"order": "LHBNC"})
    yield pair("K and V together to K and V apart", {}, {"form": "apart"})
    yield pair("K and V of unlike size apart to together", {"form": "uneven"}, {})
    yield pair(
        "keys transposed within blocks (CPU), 16 tokens to 32", {}, {"block_tokens": 32}, form="transposed"
    )
    yield pair("with quantisation scales, TP 2 to TP 1", {"tp": 2}, {}, scales=True)
    yield pair("every other layer with a window of 32 tokens, TP 1 to TP 2", {}, {"tp": 2}, window=32)
    sides = [{"block_tokens": 32}, {"block_tokens": 16}]
    yield pair("every other layer with a window, blocks of 32 tokens to blocks of 16", *sides, window=32)


def refused() -> Iterator[tuple[str, CacheSpec, CacheSpec]]:
    """Rows that are to be refused, and what the consumer finds."""
    ours = caches_of(MODEL)[Rank(0, 0)]

    def group(**changes: object) -> CacheSpec:
        (only,) = ours.groups
        return msgspec.structs.replace(ours, groups=(msgspec.structs.replace(only, **changes),))

    yield "another model", ours, msgspec.structs.replace(ours, model="another")
    yield "another cache type", ours, msgspec.structs.replace(ours, kv_dtype="fp8_e4m3")
    yield (
        "other facts (attention backend)",
        *(msgspec.structs.replace(ours, facts={"attention_backend": name}) for name in ("A", "B")),
    )  # type: ignore[misc]
    yield "another number of KV heads", ours, caches_of(replace(MODEL, heads=4))[Rank(0, 0)]
    yield "TP 3, 8 KV heads", ours, msgspec.structs.replace(ours, tp_size=3)
    yield "a layer that one side lacks", ours, caches_of(replace(MODEL, split=(5,)))[Rank(0, 0)]
    yield "windows of unlike length", group(window_tokens=32), group(window_tokens=64)
    yield (
        "layers with a window, blocks of 16 tokens to blocks of 32",
        *(caches_of(replace(MODEL, window=32, block_tokens=size))[Rank(0, 0)] for size in (32, 16)),
    )  # type: ignore[misc]
    yield "hybrid cache on one side only", ours, caches_of(replace(MODEL, window=32))[Rank(0, 0)]
    yield "state-space layers, equal or not", group(kind="mamba"), group(kind="mamba")
    yield (
        "blocks of 16 and 32 tokens whose inside only the kernel knows",
        *(
            msgspec.structs.replace(
                spec,
                groups=tuple(msgspec.structs.replace(g, tile_tokens=g.block_tokens) for g in spec.groups),
            )
            for spec in (ours, caches_of(replace(MODEL, block_tokens=32))[Rank(0, 0)])
        ),
    )  # type: ignore[misc]
    yield "stages that nobody describes", ours, msgspec.structs.replace(group(stages=()), pp_size=2)


def descriptors(pair: Pair) -> int:
    """Runs that 64 tokens take to the first rank, from all ranks that serve it; blocks in order."""
    producer = caches_of(pair.ours)
    target = caches_of(pair.theirs, 1 + max(map(end_of, producer.values())))[Rank(0, 0)]
    shape = shape_of(producer[Rank(0, 0)])
    total = 0
    for meeting in meetings(Rank(0, 0), shape_of(target), shape):
        found = plan(producer[meeting.rank], target)
        for table, (ours, theirs) in enumerate(
            zip(producer[meeting.rank].block_tokens, target.block_tokens, strict=True)
        ):
            source, needed = (np.arange(covering(TOKENS, size)) for size in (ours, theirs))
            total += len(expand(found, table, source, needed, 0, TOKENS.stop))
    return total


def table() -> str:
    """The table, once each row is what it says."""
    lines = [
        "| pair | producer ranks that a consumer rank registers with | descriptors |",
        "| --- | --- | --- |",
    ]
    for pair in pairs():
        check_engines(pair.ours, pair.theirs, TOKENS, Random(pair.title))
        consumer, producer = (shape_of(caches_of(sizes)[Rank(0, 0)]) for sizes in (pair.theirs, pair.ours))
        met = meetings(Rank(0, 0), consumer, producer)
        spared = sum(not meeting.writes for meeting in met)
        ranks = f"{len(met) - spared}" + (f", and {spared} that need not send" if spared else "")
        lines.append(f"| {pair.title} | {ranks} | {descriptors(pair)} |")
    lines += [
        "",
        "Descriptors are those of 64 tokens in four layers to one rank, blocks in order on both sides.",
        "",
    ]
    lines += ["| refused | field | fix |", "| --- | --- | --- |"]
    for title, ours, theirs in refused():
        error = compare(ours, theirs, we_send=False)[0]
        lines.append(f"| {title} | `{error.field}` | {str(error).rpartition('; ')[2]} |")
    return "\n".join(lines) + "\n"


def written(page: str, text: str) -> str:
    """The page with its generated part exchanged."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
