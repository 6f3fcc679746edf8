"""In what two runs differ, in the words of a command line."""

from __future__ import annotations

import argparse
import shlex

import pytest

from kvferry.bench.flags import Difference, differences, refusal
from kvferry.cli import bench_compare
from tests.support.bench_results import options

ENGINES = {"preset": "made-up", "content_scale": 4, "cache_bytes": 2 << 30, "step_tokens": 2048}


def test_equal_runs_do_not_differ() -> None:
    assert differences(options(), options()) == []


@pytest.mark.parametrize(
    ("changed", "flag", "there", "now"),
    [
        ({"connectors": ("ferry-push",)}, "--connectors", "ferry-push,vllm-push,vllm-pull", "ferry-push"),
        ({"cells": ((0.5, 300), (8.0, 1024))}, "--cells", "1x1k,1x16k,8x16k", "0.5x300,8x1k"),
        ({"repeats": 5}, "--repeats", "2", "5"),
        ({"cell_seconds": 3.8}, "--cell-seconds", "8", "3.8"),
        ({"cell_seconds": 10.0000001}, "--cell-seconds", "8", "10.0000001"),
        ({"output_tokens": 16}, "--output-tokens", "64", "16"),
        ({"baseline": False}, "--baseline", "--baseline", "--no-baseline"),
        ({"seed": 4}, "--seed", "0", "4"),
        ({"vocabulary": (5, 9)}, "--vocabulary", "300:1000", "5:9"),
        ({"engines": ENGINES | {"preset": "other"}}, "--preset", "made-up", "other"),
        ({"engines": ENGINES | {"content_scale": 1}}, "--content-scale", "4", "1"),
        ({"engines": ENGINES | {"cache_bytes": 512 << 20}}, "--kv-cache-mib", "2048", "512"),
        ({"engines": ENGINES | {"step_tokens": 8192}}, "--chunk-tokens", "2048", "8192"),
        (
            {"engines": ENGINES | {"emulator.layouts": ["BLHNC"], "emulator.churn": 2}},
            "--emulator",
            "{}",
            '{"churn":2,"layouts":["BLHNC"]}',
        ),
    ],
)
def test_each_setting_is_told_by_its_flag(
    changed: dict[str, object], flag: str, there: str, now: str
) -> None:
    ours, theirs = options(**{"engines": ENGINES} | changed), options(engines=ENGINES)
    assert differences(ours, theirs) == [Difference(flag, there, now)]
    parser = argparse.ArgumentParser()
    bench_compare.add_arguments(parser)
    assert flag in {spelling for action in parser._actions for spelling in action.option_strings}


def test_every_option_of_a_run_has_its_flag() -> None:
    """A field that no flag tells of would let two runs differ without a word."""
    there, now = options(engines=ENGINES), options(engines=ENGINES)
    fields = set(there.__struct_fields__) - {"engines", "versions"}
    other = {
        "connectors": ("vllm-pull",),
        "cells": ((2, 2),),
        "vocabulary": (1, 2),
        "baseline": False,
    }
    for name in fields:
        changed = options(engines=ENGINES, **{name: other.get(name, 77)})
        assert len(differences(changed, now)) == 1, name
    assert differences(options(engines=ENGINES | {"new": 1}), now) == [Difference("new", "none", "1")]


def test_the_refusal_says_what_differs_and_how_to_go_on() -> None:
    ours = options(baseline=False, seed=5, engines=ENGINES)
    theirs = options(engines=ENGINES | {"emulator.layouts": ["BLHNC"]})
    first, *rows, advice = refusal("results", differences(ours, theirs)).splitlines()
    assert first == (
        "--output results holds a run with other settings, and figures of both cannot stand together:"
    )
    assert rows == [
        "  --baseline  there --baseline, now --no-baseline",
        "  --seed      there 0, now 5",
        """  --emulator  there {"layouts":["BLHNC"]}, now {}""",
    ]
    assert advice == (
        "choose another directory, or go on with that run by its own settings: "
        """--baseline --seed 0 --emulator '{"layouts":["BLHNC"]}'"""
    )
    parser = argparse.ArgumentParser()
    bench_compare.add_arguments(parser)
    given = parser.parse_args(["--output", "results", *shlex.split(advice.rpartition("settings: ")[2])])
    assert (given.baseline, given.seed, given.emulator) == (True, 0, '{"layouts":["BLHNC"]}')


def test_other_versions_have_no_flag() -> None:
    ours = options(seed=5, versions={"kvferry": "0", "nixl": "1.6"})
    theirs = options(versions={"kvferry": "0", "vllm": "0.31"})
    _, *rows, advice = refusal("results", differences(ours, theirs)).splitlines()
    assert rows == [
        "  --seed  there 0, now 5",
        "  vllm    there 0.31, installed now none",
        "  nixl    there none, installed now 1.6",
    ]
    assert advice == "choose another directory; a run goes on only with the versions that it began with"
