"""Why two ranks' caches cannot be joined, field by field.

Each rule reads one value from both sides; where they differ, its fix says what to change. A rule falls when
the copy plan learns to bridge what it guards (sizes, heads, block sizes). Stride orders, addresses and the
number of blocks have no rule, because every plan bridges them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.errors import GeometryError
from kvferry.layout.ranks import EngineSizes, size_errors
from kvferry.layout.spec import CacheSpec, GroupSpec

STRICT_FACTS = frozenset({"attention_backend", "model_revision", "quantization", "speculative_config"})
"""Facts that decide what equal bytes mean: a side that lacks one is no match for a side that has it."""

INFORMATIONAL_FACTS = frozenset({"engine_version", "kvferry_version", "layout", "max_model_len"})
"""Facts that may differ, of which an operator should hear."""

NAMES_SHOWN_MAX = 4

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
    _Rule("groups", lambda spec: len(spec.groups), "start both engines with the same hybrid cache settings"),
)

_GROUP_RULES: tuple[_Rule[GroupSpec], ...] = (
    _Rule("kind", lambda group: group.kind, "serve the same model with the same hybrid cache settings"),
    _Rule("block_tokens", lambda group: group.block_tokens, "start both engines with the same --block-size"),
    _Rule(
        "content_bytes", lambda group: group.content_bytes, "use the same attention backend on both engines"
    ),
    _Rule("heads_total", lambda group: group.heads_total, "serve the same model on both engines"),
    _Rule(
        "heads",
        lambda group: f"{group.head_first} to {group.head_first + group.head_count - 1}",
        "start both engines with the same --tensor-parallel-size and join equal ranks",
    ),
)


def compare(ours: CacheSpec, theirs: CacheSpec) -> list[GeometryError]:
    """Every field that keeps the two caches from being joined; empty when a plan can be made."""
    errors = size_errors(_sizes(ours), _sizes(theirs))
    errors += _differences("", _CACHE_RULES, ours, theirs)
    for index, (our_group, their_group) in enumerate(zip(ours.groups, theirs.groups, strict=False)):
        errors += _differences(f"groups[{index}].", _GROUP_RULES, our_group, their_group)
        errors += _layers(f"groups[{index}].layers", our_group, their_group)
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


def _sizes(spec: CacheSpec) -> EngineSizes:
    return EngineSizes(tp=spec.tp_size, pp=spec.pp_size)


def _differences(
    prefix: str, rules: Sequence[_Rule[Part]], ours: Part, theirs: Part
) -> Iterator[GeometryError]:
    for rule in rules:
        our_value, their_value = rule.value(ours), rule.value(theirs)
        if our_value != their_value:
            yield GeometryError(prefix + rule.field, our_value, their_value, rule.fix)


def _layers(field: str, ours: GroupSpec, theirs: GroupSpec) -> Iterator[GeometryError]:
    """Planes meet by name; a name that one side lacks has nowhere to go."""
    our_names = [plane.name for plane in ours.planes]
    their_names = [plane.name for plane in theirs.planes]
    only_ours = _shown(sorted(set(our_names) - set(their_names)))
    only_theirs = _shown(sorted(set(their_names) - set(our_names)))
    if only_ours or only_theirs:
        yield GeometryError(
            field,
            f"{len(our_names)} planes" + (f", {only_ours} only here" if only_ours else ""),
            f"{len(their_names)} planes" + (f", {only_theirs} only there" if only_theirs else ""),
            "serve the same model on both engines, with the same attention backend",
        )


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
