"""Why two ranks' caches cannot be joined, field by field.

Each rule reads one value from both sides; where they differ, its fix says what to change. What has no rule is
bridged by every plan: tensor and pipeline parallel sizes, block sizes, stride orders, K and V together or
apart, addresses and the number of blocks. A pair without a difference is copied exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Generic, TypeVar

from kvferry.errors import GeometryError
from kvferry.layout.ranks import heads_of, splits
from kvferry.layout.spec import CacheSpec, GroupSpec

STRICT_FACTS = frozenset({"attention_backend", "model_revision", "quantization", "speculative_config"})
"""Facts that decide what equal bytes mean: a side that lacks one is no match for a side that has it."""

INFORMATIONAL_FACTS = frozenset({"engine_version", "kvferry_version", "layout", "max_model_len"})
"""Facts that may differ, of which an operator should hear."""

MOVABLE_KINDS = frozenset({"full", "mla", "scales", "sliding_window"})
"""What a block may mean for its copy to mean the same: it holds its tokens' own values and nothing else. The
state of a state-space layer sums up all tokens before and is overwritten with each new one."""

NAMES_SHOWN_MAX = 4

Groups = Sequence[GroupSpec]
"""The groups of one block table."""
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class _Rule(Generic[Part]):
    """One value that must be equal on both sides."""

    field: str
    value: Callable[[Part], object]
    fix: str


_CACHE_RULES: tuple[_Rule[CacheSpec], ...] = (
    _Rule("model", lambda spec: spec.model, "serve the same model on both engines"),
    _Rule("dtype", lambda spec: spec.dtype, "start both engines with the same --dtype"),
    _Rule("kv_dtype", lambda spec: spec.kv_dtype, "start both engines with the same --kv-cache-dtype"),
    _Rule("groups", lambda spec: len(spec.tables), "start both engines with the same hybrid cache settings"),
)

_GROUP_RULES: tuple[_Rule[GroupSpec], ...] = (
    _Rule("kind", lambda group: group.kind, "serve the same model with the same hybrid cache settings"),
    _Rule("heads_total", lambda group: group.heads_total, "serve the same model on both engines"),
    _Rule("element_bytes", lambda group: group.whole_bytes, "use the same attention backend on both engines"),
    _Rule("window_tokens", lambda group: group.window_tokens, "serve the same model on both engines"),
)


def compare(ours: CacheSpec, theirs: CacheSpec, *, we_send: bool | None = None) -> list[GeometryError]:
    """Every field that keeps the two caches from being joined; empty when a plan can be made.

    `we_send`: whether KV goes from ours to theirs; None looks only at what holds both ways.
    """
    errors = [*_unknown_stages(ours, theirs), *_differences("", _CACHE_RULES, ours, theirs)]
    pairs = zip(ours.tables, theirs.tables, strict=False)
    for index, (our_groups, their_groups) in enumerate(pairs):
        field = f"groups[{index}]"
        errors += _immovable(f"{field}.kind", our_groups, their_groups)
        errors += _group_differences(f"{field}.", our_groups, their_groups)
        errors += _tiles(f"{field}.", our_groups, their_groups)
        if we_send is not None:
            errors += _windows(f"{field}.block_tokens", our_groups, their_groups, we_send=we_send)
        errors += _uneven_heads(f"{field}.heads", (ours, our_groups), (theirs, their_groups))
        errors += _layers(f"{field}.layers", our_groups, their_groups)
    errors += [
        GeometryError(
            f"facts.{key}",
            ours.facts.get(key),
            theirs.facts.get(key),
            f"configure the same {key} on both engines",
        )
        for key in _differing_facts(ours, theirs)
        if _must_agree(key, ours, theirs)
    ]
    return errors


def warnings(ours: CacheSpec, theirs: CacheSpec) -> list[str]:
    """One sentence for each fact that differs and does not keep the caches from being joined."""
    return [
        f"facts.{key}: ours is {ours.facts.get(key)!r}, theirs is {theirs.facts.get(key)!r}"
        for key in _differing_facts(ours, theirs)
        if not _must_agree(key, ours, theirs)
    ]


def _differences(
    prefix: str, rules: Sequence[_Rule[Part]], ours: Part, theirs: Part
) -> Iterator[GeometryError]:
    for rule in rules:
        our_value, their_value = rule.value(ours), rule.value(theirs)
        if our_value != their_value:
            yield GeometryError(prefix + rule.field, our_value, their_value, rule.fix)


def _unknown_stages(ours: CacheSpec, theirs: CacheSpec) -> Iterator[GeometryError]:
    """With several pipeline stages, who holds what has to be said."""
    if not (_stages_are_known(ours) and _stages_are_known(theirs)):
        fix = "state the layers of every pipeline stage"
        yield GeometryError("stages", _stages(ours), _stages(theirs), fix)


def _stages_are_known(spec: CacheSpec) -> bool:
    return spec.pp_size == 1 or all(group.stages for group in spec.groups)


def _stages(spec: CacheSpec) -> str:
    return f"{spec.pp_size} stages, {'known' if _stages_are_known(spec) else 'their layers are not stated'}"


def _immovable(field: str, ours: Groups, theirs: Groups) -> Iterator[GeometryError]:
    if any(group.kind not in MOVABLE_KINDS for group in (*ours, *theirs)):
        fix = "what such layers keep cannot be moved exactly; prefill and decode this model in one engine"
        yield GeometryError(field, _kinds(ours), _kinds(theirs), fix)


def _kinds(groups: Groups) -> str:
    return ", ".join(sorted({group.kind for group in groups}))


def _group_differences(prefix: str, ours: Groups, theirs: Groups) -> list[GeometryError]:
    """Each differing field once, of entries that hold the same layer."""
    found: dict[str, GeometryError] = {}
    for our_group in ours:
        for their_group in theirs:
            if not our_group.layers.isdisjoint(their_group.layers):
                for error in _differences(prefix, _GROUP_RULES, our_group, their_group):
                    found.setdefault(error.field, error)
    return list(found.values())


def _tiles(prefix: str, ours: Groups, theirs: Groups) -> Iterator[GeometryError]:
    """Tiles are opaque: they meet whole, or their tokens would be put in another order."""
    for our_group, their_group in product(ours, theirs):
        tile = max(our_group.tile_tokens, their_group.tile_tokens)
        if tile == 1 or our_group.layers.isdisjoint(their_group.layers):
            continue
        cell_tokens = gcd(our_group.block_tokens, their_group.block_tokens)
        if our_group.tile_tokens != their_group.tile_tokens or cell_tokens % tile:
            fix = (
                "start both engines with the same --block-size; this attention backend orders tokens by block"
            )
            yield GeometryError(
                f"{prefix}block_tokens", _block_size(our_group), _block_size(their_group), fix
            )
        elif our_group.content_bytes != their_group.content_bytes:
            fix = "use the same attention backend on both engines"
            yield GeometryError(
                f"{prefix}content_bytes", our_group.content_bytes, their_group.content_bytes, fix
            )


def _windows(field: str, ours: Groups, theirs: Groups, *, we_send: bool) -> Iterator[GeometryError]:
    """A window's first block comes whole, as the consumer's engine takes it for whole in its prefix cache.

    Its producer has the window in blocks of its own, and nothing before the first of them.
    """
    mine, yours = ours[0].whole_tokens, theirs[0].whole_tokens
    source, target = (mine, yours) if we_send else (yours, mine)
    if ours[0].window_tokens and source % target:
        fix = (
            "for sliding windows start both engines with the same --block-size, or the decode engine with a "
        )
        yield GeometryError(field, mine, yours, f"{fix}divisor of the prefill engine's")


def _block_size(group: GroupSpec) -> str:
    return f"{group.block_tokens} in tiles of {group.tile_tokens}"


def _uneven_heads(
    field: str, ours: tuple[CacheSpec, Groups], theirs: tuple[CacheSpec, Groups]
) -> Iterator[GeometryError]:
    """Who holds which heads follows from the rank, or two ranks could not agree on who sends what."""
    if not all(_is_even(spec, group) for spec, groups in (ours, theirs) for group in groups):
        fix = "use a --tensor-parallel-size that is a divisor or a multiple of the model's KV heads"
        yield GeometryError(field, _heads(*ours), _heads(*theirs), fix)


def _heads(spec: CacheSpec, groups: Groups) -> str:
    held = ", ".join(
        f"{group.head_first} to {group.head_first + group.head_count - 1} of {group.heads_total}"
        for group in groups
    )
    return f"{held} on rank {spec.rank.tp} of {spec.tp_size}"


def _is_even(spec: CacheSpec, group: GroupSpec) -> bool:
    held = range(group.head_first, group.head_first + group.head_count)
    return splits(spec.tp_size, group.heads_total) and held == heads_of(
        spec.rank.tp, spec.tp_size, group.heads_total
    )


def _layers(field: str, ours: Groups, theirs: Groups) -> Iterator[GeometryError]:
    """Layers meet by name; one that an engine lacks has nowhere to go, or nowhere to come from."""
    our_names, their_names = _all_layers(ours), _all_layers(theirs)
    only_ours = _shown(sorted(our_names - their_names))
    only_theirs = _shown(sorted(their_names - our_names))
    if only_ours or only_theirs:
        yield GeometryError(
            field,
            f"{len(our_names)} layers" + (f", {only_ours} only here" if only_ours else ""),
            f"{len(their_names)} layers" + (f", {only_theirs} only there" if only_theirs else ""),
            "serve the same model on both engines, with the same attention backend",
        )


def _all_layers(groups: Groups) -> set[str]:
    """Of the whole engine, where it is said; else of this rank, which is all of an engine with one stage."""
    return {name for group in groups for stage in group.stages or (group.layers,) for name in stage}


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN_MAX])
    hidden = len(names) - NAMES_SHOWN_MAX
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def _differing_facts(ours: CacheSpec, theirs: CacheSpec) -> list[str]:
    keys = ours.facts.keys() | theirs.facts.keys()
    return sorted(key for key in keys if ours.facts.get(key) != theirs.facts.get(key))


def _must_agree(key: str, ours: CacheSpec, theirs: CacheSpec) -> bool:
    """Whether a fact that differs keeps the caches apart.

    One that neither list names is new to this release: stated by both it is taken seriously, stated by one
    alone it is not, or no fleet could be upgraded engine by engine.
    """
    if key in INFORMATIONAL_FACTS:
        return False
    return key in STRICT_FACTS or (key in ours.facts and key in theirs.facts)
