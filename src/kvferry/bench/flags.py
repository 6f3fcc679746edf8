"""The options of a comparison as the flags that give them, to say in which two runs differ."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.bench.grid import Cell, tokens_text
from kvferry.bench.plan import Options

_ENGINES = {"preset": "--preset", "content_scale": "--content-scale", "step_tokens": "--chunk-tokens"}
_CACHE, _EMULATOR = "cache_bytes", "emulator."
_NONE = "none"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two runs differ, each value as it is written on a command line."""

    name: str
    """A flag, or a package where `is_version`."""
    theirs: str
    ours: str
    is_version: bool = False


def differences(ours: Options, theirs: Options) -> list[Difference]:
    """In what two runs differ: flags first, then versions; nothing when their results can stand together."""
    flags = _differing(_flags(ours), _flags(theirs))
    return [
        *(Difference(name, *values) for name, values in flags.items()),
        *(
            Difference(name, *values, is_version=True)
            for name, values in _differing(ours.versions, theirs.versions).items()
        ),
    ]


def refusal(directory: object, found: list[Difference]) -> str:
    """Why a directory is refused, what differs, and what can be done."""
    width = max(len(one.name) for one in found)
    words = {True: "installed now", False: "now"}
    lines = [
        f"--output {directory} holds a run with other settings, and figures of both cannot stand together:"
    ]
    lines += [
        f"  {one.name:<{width}}  there {one.theirs}, {words[one.is_version]} {one.ours}" for one in found
    ]
    if any(one.is_version for one in found):
        return "\n".join(
            [*lines, "choose another directory; a run goes on only with the versions that it began with"]
        )
    given = " ".join(_given(one) for one in found)
    return "\n".join(
        [*lines, f"choose another directory, or go on with that run by its own settings: {given}"]
    )


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Theirs and ours of each name in which they differ."""
    names = [*theirs, *(name for name in ours if name not in theirs)]
    values = {name: (theirs.get(name, _NONE), ours.get(name, _NONE)) for name in names}
    return {name: both for name, both in values.items() if both[0] != both[1]}


def _given(one: Difference) -> str:
    """The flag as it must be given to have their value."""
    return one.theirs if one.theirs.startswith("--") else f"{one.name} {shlex.quote(one.theirs)}"


def _flags(options: Options) -> dict[str, str]:
    engines = options.engines
    found = {
        "--connectors": ",".join(options.connectors),
        "--cells": ",".join(_cell(Cell(*cell)) for cell in options.cells),
        "--repeats": str(options.repeats),
        "--cell-seconds": _number(options.cell_seconds),
        "--output-tokens": str(options.output_tokens),
        # Its value is its spelling: it takes none.
        "--baseline": "--baseline" if options.baseline else "--no-baseline",
        "--seed": str(options.seed),
        "--vocabulary": ":".join(map(str, options.vocabulary)),
    }
    found |= {flag: str(engines[key]) for key, flag in _ENGINES.items() if key in engines}
    if _CACHE in engines:
        found["--kv-cache-mib"] = _number(engines[_CACHE] / 2**20)
    known = {*_ENGINES, _CACHE}
    found |= {
        key: str(value)
        for key, value in engines.items()
        if key not in known and not key.startswith(_EMULATOR)
    }
    emulator = {
        key.removeprefix(_EMULATOR): value for key, value in engines.items() if key.startswith(_EMULATOR)
    }
    return found | {"--emulator": json.dumps(emulator, sort_keys=True, separators=(",", ":"))}


def _cell(cell: Cell) -> str:
    return f"{_number(cell.rate)}x{tokens_text(cell.input_tokens)}"


def _number(value: float) -> str:
    """As short as it can be read back."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)
