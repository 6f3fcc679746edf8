"""What is drawn into a world."""

from __future__ import annotations

from random import Random

import pytest

from kvferry.simulator.ground.options import HARMLESS, WORLDS, Options
from kvferry.simulator.world import shape


def drawn(world: str, count: int = 80) -> list[shape.Shape]:
    return [shape.draw(Options(world=world), Random(seed), Random(seed + 0.5)) for seed in range(count)]


@pytest.mark.parametrize("world", ["calm", "small"])
def test_links_are_given_up_soon_in_some_histories_of_every_kind(world: str) -> None:
    hurried = [
        all(facts.limits.idle_seconds == shape.IDLE_SECONDS for facts in one.engines) for one in drawn(world)
    ]
    assert {*hurried} == {True, False}


def test_small_tables_of_links_and_of_ended_transfers_are_faults() -> None:
    names = ("links_max", "hellos_max", "tombstones_max")
    for name in names:
        least = {
            world: min(getattr(facts.limits, name) for one in drawn(world) for facts in one.engines)
            for world in ("calm", "small")
        }
        assert least["small"] == 1
        assert least["calm"] > 100


@pytest.mark.parametrize(
    ("world", "producers", "consumers", "ranks", "told"),
    [
        ("small", 1, 2, {1, 2}, ("one prefill engine and one or two decode engines,", "one or two ranks")),
        ("both", 3, 0, {1, 2}, ("two or three engines that all prefill and decode;", "one or two ranks")),
        ("wide", 8, 8, {1, 2}, ("up to eight prefill engines and up to eight decode", "one or two ranks")),
        ("tall", 2, 2, {4}, ("one or two prefill engines and one or two decode", "four ranks each")),
        ("long", 3, 3, {1, 2}, ("up to three prefill engines and up to three decode", "one or two ranks")),
        ("calm", 2, 2, {1, 2}, ("one or two engines of each kind", "one or two ranks")),
    ],
)
def test_worlds_are_what_is_said_of_them(
    world: str, producers: int, consumers: int, ranks: set[int], told: tuple[str, ...]
) -> None:
    ranges = shape.RANGES[world]
    assert (ranges.producers[1], ranges.consumers[1]) == (producers, consumers)
    seen = drawn(world)
    assert {facts.cache.tp_size for one in seen for facts in one.engines} == ranks
    roles = {all(facts.produces and facts.consumes for facts in one.engines) for one in seen}
    assert roles == ({True} if world == "both" else {True, False})
    assert ("in some seeds of both roles" in WORLDS[world]) is (world != "both")
    assert all(words in WORLDS[world] for words in told)


def test_the_calm_world_has_no_faults_but_those_that_harm_nobody() -> None:
    assert {one.faults for one in drawn("calm")} == {frozenset()}
    assert {one.clocks_differ for one in drawn("calm")} == {True}
    assert {one.fabric.notification_bytes_max == shape.PART_BYTES for one in drawn("calm")} == {True, False}
    assert {"clock", "parts"} == HARMLESS


def test_engines_of_the_mixed_world_split_one_model_in_ways_of_their_own() -> None:
    worlds = drawn("mixed")
    caches = [facts.cache for one in worlds for facts in one.engines]
    assert {cache.tp_size for cache in caches} == {1, 2, 4}
    assert {cache.pp_size for cache in caches} == {1, 2}
    assert {cache.block_tokens for cache in caches} == {2, 4, 8}
    assert all(len({facts.cache.heads for facts in one.engines}) == 1 for one in worlds)
    unlike = sum(len({(f.cache.tp_size, f.cache.pp_size) for f in one.engines}) > 1 for one in worlds)
    assert unlike > len(worlds) / 2


def test_an_engine_of_the_mixed_world_has_room_for_all_ranks_of_another() -> None:
    """Otherwise a limit, and no fault, would keep two engines apart."""
    for one in drawn("mixed"):
        ranks = max(len(facts.cache.ranks) for facts in one.engines)
        assert all(facts.limits.links_max >= ranks for facts in one.engines)
        assert all(facts.limits.consumers_max >= ranks for facts in one.engines)


def test_engines_of_the_groups_world_have_windows_of_one_model() -> None:
    """Shorter than a block, longer than prompts, alone and beside layers that look at everything."""
    worlds = drawn("groups", 200)
    models = {tuple(group.window_tokens for group in one.engines[0].cache.groups) for one in worlds}
    assert {len(model) for model in models} == {1, 2, 3}
    assert {0 in model for model in models} == {True, False}
    windows = {window for model in models for window in model if window}
    assert min(windows) < min(shape.BLOCK_SIZES)
    assert max(windows) > worlds[0].tokens[1]
    unequal = sum(len({group.block_tokens for group in one.engines[0].cache.groups}) > 1 for one in worlds)
    assert unequal > len(worlds) / 5
    assert all(one.windows for one in worlds)
    assert {one.windows for one in drawn("mixed")} == {()}


def test_an_engine_that_fits_none_or_only_some_others_is_a_fault() -> None:
    def misfits(one: shape.Shape) -> int:
        caches = [facts.cache for facts in one.engines]
        ways = [
            (source.cache, target.cache)
            for source in one.engines
            for target in one.engines
            if source is not target and source.produces and target.consumes
        ]
        assert len(caches) > 1
        return sum(not source.fits(target) for source, target in ways)

    worlds = drawn("groups", 200)
    assert {bool(misfits(one)) for one in worlds if one.faults} == {True, False}
    assert {misfits(one) for one in worlds if not one.faults} == {0}
    assert {misfits(one) for one in drawn("mixed")} == {0}
    models = [{facts.cache.model for facts in one.engines} for one in worlds]
    assert {0, 1} in models
    assert [one.layers for one, model in zip(worlds, models, strict=True) if model == {0, 1}]


@pytest.mark.parametrize("world", ["small", "tall", "wide"])
def test_engines_of_other_worlds_are_alike(world: str) -> None:
    for one in drawn(world):
        assert len({(f.cache.tp_size, f.cache.pp_size, f.cache.block_tokens) for f in one.engines}) == 1
