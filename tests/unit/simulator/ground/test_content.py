from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from kvferry.ids import Rank
from kvferry.layout.descriptors import expand
from kvferry.layout.plan import plan
from kvferry.simulator.ground import arena
from kvferry.simulator.ground.content import Contents


def test_content_differs_by_prompt_token_layer_and_head():
    contents = Contents(layers=2, tokens_max=64)
    prompts = [contents.add(40), contents.add(40)]
    values = [contents.of(prompt.number, head) for prompt in prompts for head in range(2)]
    words = np.concatenate([one.ravel() for one in values])
    assert len(np.unique(words)) == len(words) == 2 * 2 * 2 * 64


def test_prompts_of_a_family_agree_as_far_as_they_share_tokens():
    contents = Contents(layers=2, tokens_max=32)
    one, other = contents.add(30, family=1, shared_tokens=10), contents.add(20, family=1, shared_tokens=7)
    stranger = contents.add(20, family=2, shared_tokens=10)
    ours, theirs = contents.of(one.number, 0), contents.of(other.number, 0)
    assert (ours[:7] == theirs[:7]).all()
    assert not (ours[7:] == theirs[7:]).any()
    assert not (ours == contents.of(stranger.number, 0)).any()


def test_blocks_have_one_key_exactly_when_all_before_them_is_the_same():
    contents = Contents(layers=1, tokens_max=32)
    one, other = contents.add(30, family=1, shared_tokens=10), contents.add(30, family=1, shared_tokens=8)
    assert [one.block_key(i, 4) == other.block_key(i, 4) for i in range(4)] == [True, True, False, False]
    assert one.block_key(0, 4) != one.block_key(1, 4)


def test_a_shared_part_is_no_longer_than_the_prompt():
    prompt = Contents(layers=1, tokens_max=32).add(3, shared_tokens=10)
    assert prompt.shared_tokens == 3


def test_memory_is_seen_alike_in_every_stride_order():
    """What a plan of the layout copies from block to block is what the view by block and token shows."""
    shapes = [arena.CacheShape(order, 2, 6, 4, 2) for order in ("LBHNC", "BHLNC", "LBNHC")]
    for source_shape, target_shape in itertools.product(shapes, shapes):
        source, target = arena.slot(0, source_shape, Rank(0, 1)), arena.slot(1, target_shape, Rank(0, 1))
        (read,), (filled,) = ([part.values for part in slot.parts] for slot in (source, target))
        filled[:] = 0
        read[:] = np.arange(read.size, dtype=np.uint32).reshape(read.shape)
        runs = expand(plan(source.cache, target.cache), 0, np.array([4, 1]), np.array([2, 5]))
        for start, to, size in zip(
            runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True
        ):
            words = size // arena.CONTENT_BYTES
            (slot, first), (other, second) = arena.slot_at(start), arena.slot_at(to)
            assert (slot, other) == (0, 1)
            assert set(source.block_of[first : first + words]) <= {4, 1}
            assert set(target.block_of[second : second + words]) <= {2, 5}
            _copy(start, to, size)
        assert (filled[[2, 5]] == read[[4, 1]]).all()
        assert not filled[[0, 1, 3, 4]].any()


def _copy(source: int, target: int, size: int) -> None:
    import ctypes

    ctypes.memmove(target, source, size)


def test_addresses_are_the_same_in_every_process():
    """They travel in handshakes, and every byte that travels is part of a history's hash."""
    program = (
        "from kvferry.ids import Rank\n"
        "from kvferry.simulator.ground import arena\n"
        "slot = arena.slot(3, arena.CacheShape('LBHNC', 2, 8, 4, 1), Rank(0, 0))\n"
        "print(slot.cache.regions[0].address, slot.parts[0].values.__array_interface__['data'][0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(arena.address_of(3))] * 2


def test_a_stage_holds_its_layers_and_a_rank_its_heads():
    """Engines of one model, however they split it, hold parts of one content."""
    contents = Contents(layers=2, tokens_max=16)
    prompt = contents.add(8)
    shape = arena.CacheShape("BLHNC", 2, 6, 4, tp_size=2, pp_size=2, heads=4)
    assert [(rank.pp, rank.tp) for rank in shape.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    slot = arena.slot(5, shape, Rank(1, 1))
    (held,) = slot.parts
    assert (held.layers, slot.heads) == (range(1, 2), range(2, 4))
    assert held.values.shape == (6, 4, 1, 2)
    assert slot.cache.groups[0].stages == (
        ("model.layers.0.self_attn.attn",),
        ("model.layers.1.self_attn.attn",),
    )
    part = contents.part(prompt.number, held.layers, slot.heads)
    assert (part[:, 0, 1] == contents.of(prompt.number, 3)[:, 1, 0]).all()
    assert contents.part(prompt.number, held.layers, slot.heads) is part


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "BHLNC", "LBNHC"])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 8), (4, 4)])
def test_groups_lie_over_each_other_block_by_block(order, sizes):
    """What a block of one group loses by being another's is that block and no other one."""
    groups = arena.GroupShape(sizes[0]), arena.GroupShape(sizes[1], window_tokens=5)
    shape = arena.CacheShape(order, 2, 6, sizes[0], tp_size=1, heads=2, groups=groups)
    slot = arena.slot(7, shape, Rank(0, 0))
    assert [part.layers for part in slot.parts] == [range(2), range(2, 4)]
    for part in slot.parts:
        assert part.values.shape == (6, part.shape.block_tokens, 2, 2)
        part.values[:] = 1
    whole, window = (part.values for part in slot.parts)
    whole[3] = 2
    assert (window[[0, 1, 2, 4, 5]] == 1).all()
    assert (window[3] == 2).any()
    window[3] = 1
    assert (whole[[0, 1, 2, 4, 5]] == 1).all()
    assert sorted(set(slot.block_of)) == [*range(6)]
    names = [plane.name for group in slot.cache.groups for plane in group.planes]
    assert names == [arena.LAYER_NAME.format(layer) for layer in range(4)]
    assert slot.cache.windows == (0, 5)


@pytest.mark.parametrize(
    ("computed", "first", "skipped"), [(0, 0, 0), (4, 0, 0), (5, 1, 0), (8, 4, 1), (9, 5, 1), (12, 8, 2)]
)
def test_a_window_looks_at_its_newest_tokens(computed, first, skipped):
    """Five tokens with the one that is computed next, in blocks of four."""
    group = arena.GroupShape(4, window_tokens=5)
    assert (group.first_token(computed), group.skipped(computed)) == (first, skipped)
    assert (arena.GroupShape(4).first_token(computed), arena.GroupShape(4).skipped(computed)) == (0, 0)
