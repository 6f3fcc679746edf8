"""The emulator's options: the object `emulator` in vLLM's `--additional-config`.

`additional_config` is part of vLLM's configuration, so front end, executor, scheduler and workers read the
same options, whichever process they run in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvferry.emulator.cost import Costs
from kvferry.emulator.presets import DEFAULT, Link, preset_of
from kvferry.errors import UsageError

KEY = "emulator"
TESTING_VARIABLE = "KVFERRY_TESTING"
LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
ROWS_MAX_DEFAULT = 1_000_000
PATIENCE_MICROSECONDS = 100

Verify = Literal["stamps", "full", "off"]
Fragmentation = Literal["none", "shuffled", "churned"]


class _Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator may write."""

    preset: str = DEFAULT
    costs: dict[str, float] | None = None
    link: dict[str, float] | None = None
    content_scale: int = 1
    patience_microseconds: int | None = PATIENCE_MICROSECONDS
    step_tokens: int | None = None
    layouts: list[str] | None = None
    verify: Verify = "stamps"
    fragmentation: Fragmentation = "churned"
    seed: int = 0
    journal: str | None = None
    report: str | None = None
    journal_rows_max: int = ROWS_MAX_DEFAULT
    test_corrupt_block: int | None = None
    test_ignore_events: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How an engine is emulated."""

    preset: str
    costs: Costs
    link: Link | None
    content_scale: int
    """Bytes of the emulated device per byte of this cache; only the link needs it."""
    patience_microseconds: int | None
    """How long NIXL's progress thread sleeps between its rounds; None leaves it spinning on a core."""
    step_tokens: int | None
    """Most tokens per step of a model with MLA; vLLM's CPU platform overrides what vLLM itself was told."""
    layouts: tuple[str, ...]
    """Memory orders that the attention backend offers, the preferred one first."""
    verify: Verify
    """What of each page is stamped and compared: its ends, all of it, or nothing."""
    fragmentation: Fragmentation
    seed: int
    journal: str | None
    """File for one JSON line per request, step and snapshot of counters."""
    report: str | None
    """File for the counters, replaced about once per second while something happens."""
    journal_rows_max: int
    corrupt_block: int | None
    """Test hook: this block of each prompt gets wrong content when it is computed."""
    ignores_events: bool
    """Test hook: whoever asks whether the device has passed a mark is told that it has."""


def read_options(additional_config: object, environment: Mapping[str, str] = os.environ) -> Options:
    """The options in vLLM's `additional_config`, on top of their preset's values.

    Raises:
        UsageError: a key is unknown, has a wrong type or makes no sense; names it.
    """
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    try:
        keys = msgspec.convert(given, _Keys)
        preset = preset_of(keys.preset)
        return Options(
            preset=preset.name,
            costs=_overridden("costs", preset.costs, keys.costs, Costs),
            link=_overridden("link", preset.link, keys.link, Link),
            content_scale=_least("content_scale", keys.content_scale, 1),
            patience_microseconds=_unset_or_positive("patience_microseconds", keys.patience_microseconds),
            step_tokens=_unset_or_positive("step_tokens", keys.step_tokens),
            layouts=_layouts(keys.layouts),
            verify=keys.verify,
            fragmentation=keys.fragmentation,
            seed=keys.seed,
            journal=keys.journal,
            report=keys.report,
            journal_rows_max=_least("journal_rows_max", keys.journal_rows_max, 1),
            corrupt_block=_corrupt_block(keys.test_corrupt_block, environment),
            ignores_events=keys.test_ignore_events and _testing("test_ignore_events", environment),
        )
    except (UsageError, msgspec.ValidationError) as error:
        raise UsageError(f"--additional-config, {KEY}: {error}") from error


def _overridden(name: str, base: Any, given: dict[str, float] | None, kind: type) -> Any:
    """`base` with the given fields replaced."""
    if given is None:
        return base
    values = {} if base is None else {key: getattr(base, key) for key in base.__dataclass_fields__}
    unknown = set(given) - set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if unknown:
        known = ", ".join(kind.__dataclass_fields__)  # type: ignore[attr-defined]
        raise UsageError(f"{name} has no field {sorted(unknown)[0]!r}; it has {known}")
    try:
        return kind(**{**values, **given})
    except TypeError as error:
        raise UsageError(f"{name}: {error}") from error


def _layouts(given: list[str] | None) -> tuple[str, ...]:
    if given is None:
        return LAYOUTS
    unknown = [name for name in given if name not in LAYOUTS]
    if unknown or not given:
        raise UsageError(f"layouts must name one or more of {', '.join(LAYOUTS)}, not {unknown or given}")
    return tuple(dict.fromkeys(given))


def _unset_or_positive(key: str, value: int | None) -> int | None:
    return None if value is None else _least(key, value, 1)


def _corrupt_block(block: int | None, environment: Mapping[str, str]) -> int | None:
    if block is None:
        return None
    _testing("test_corrupt_block", environment)
    return _least("test_corrupt_block", block, 0)


def _testing(key: str, environment: Mapping[str, str]) -> bool:
    if environment.get(TESTING_VARIABLE) != "1":
        raise UsageError(f"{key} makes KV wrong on purpose and needs {TESTING_VARIABLE}=1")
    return True


def _least(key: str, value: int, least: int) -> int:
    if value < least:
        raise UsageError(f"{key} must be at least {least}, not {value}")
    return value
