"""The pages' content: it depends on all that real KV depends on, and every kind of wrong page is found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvferry.emulator.pattern import Grid, Pages, TokenChain, Wrong
from kvferry.errors import UsageError

SIZE = 4
LAYERS = 3
BLOCKS = 8
HEADS = 2
RUN = 2
PAGE = HEADS * SIZE * RUN

GRIDS = {
    "LBHNC": Grid(np.arange(LAYERS) * BLOCKS * PAGE, PAGE, SIZE * RUN, RUN, HEADS, SIZE, RUN),
    "LBNHC": Grid(np.arange(LAYERS) * BLOCKS * PAGE, PAGE, RUN, HEADS * RUN, HEADS, SIZE, RUN),
    "BLHNC": Grid(np.arange(LAYERS) * PAGE, LAYERS * PAGE, SIZE * RUN, RUN, HEADS, SIZE, RUN),
    "BHLNC": Grid(np.arange(LAYERS) * SIZE * RUN, LAYERS * PAGE, LAYERS * SIZE * RUN, RUN, HEADS, SIZE, RUN),
}
TOKENS = [5, 1, 4, 1, 5, 9, 2, 6, 5, 3]
"""Two whole blocks and a half."""


def memory() -> np.ndarray:
    return np.zeros(LAYERS * BLOCKS * PAGE, dtype=np.uint64)


def values(tokens: Sequence[int]) -> list[int]:
    return TokenChain(tokens, SIZE).values.tolist()


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int64)


class TestTokenChain:
    def test_there_is_a_value_per_block_the_last_one_included(self) -> None:
        assert [len(values(TOKENS[:count])) for count in (0, 1, 4, 5, 8, 10)] == [0, 1, 1, 2, 2, 3]

    @pytest.mark.parametrize("position", range(len(TOKENS)))
    def test_a_token_counts_from_its_block_on(self, position: int) -> None:
        changed = [*TOKENS]
        changed[position] += 1
        same = [one == other for one, other in zip(values(TOKENS), values(changed), strict=True)]
        assert same == [block < position // SIZE for block in range(3)]

    def test_order_counts_within_a_block_and_between_blocks(self) -> None:
        assert values([1, 2, 3, 4]) != values([2, 1, 3, 4])
        swapped = TOKENS[SIZE : 2 * SIZE] + TOKENS[:SIZE]
        assert not set(values(TOKENS[: 2 * SIZE])) & set(values(swapped))

    def test_a_token_of_zero_is_not_no_token(self) -> None:
        assert values([1, 0]) != values([1])
        assert TokenChain([1, 0], SIZE).seed != TokenChain([1], SIZE).seed

    @pytest.mark.parametrize("cut", range(len(TOKENS) + 1))
    def test_a_chain_that_grows_equals_one_made_at_once(self, cut: int) -> None:
        chain = TokenChain(TOKENS[:cut], SIZE)
        chain.extend(TOKENS[cut:])
        assert chain.values.tolist() == values(TOKENS)
        assert len(chain) == len(TOKENS)
        assert chain.seed == TokenChain(TOKENS, SIZE).seed

    def test_equal_blocks_at_different_places_have_different_values(self) -> None:
        assert len(set(values([7] * 40))) == 10


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("order", GRIDS)
class TestPages:
    def test_what_was_written_is_right(self, order: str, whole: bool) -> None:
        pages = Pages(memory(), GRIDS[order], whole=whole)
        chain = TokenChain(TOKENS, SIZE)
        pages.write(ids(6, 2, 3), chain.values)
        assert pages.wrong(ids(6, 2, 3), chain.values) is None

    def test_blocks_that_were_not_written_are_untouched(self, order: str, whole: bool) -> None:
        words, grid = memory(), GRIDS[order]
        Pages(words, grid, whole=whole).write(ids(1, 4), TokenChain(TOKENS[:8], SIZE).values)
        others = grid.first_words(ids(0, 2, 3, 5, 6, 7))[..., None] + grid.page_words()
        assert not words[others].any()

    def test_every_damage_to_an_end_of_a_page_is_found_and_named(self, order: str, whole: bool) -> None:
        grid = GRIDS[order]
        chain = TokenChain(TOKENS, SIZE)
        for layer in range(LAYERS):
            for offset in (0, grid.last_word):
                words = memory()
                pages = Pages(words, grid, whole=whole)
                pages.write(ids(6, 2, 3), chain.values)
                words[grid.first_words(ids(2))[layer, 0] + offset] ^= np.uint64(1)
                wrong = pages.wrong(ids(6, 2, 3), chain.values)
                assert wrong == Wrong(pages=1, layers=(layer,), positions=(1,))

    def test_pages_of_other_places_layers_and_requests_are_wrong(self, order: str, whole: bool) -> None:
        words, grid = memory(), GRIDS[order]
        pages = Pages(words, grid, whole=whole)
        chain = TokenChain(TOKENS, SIZE)
        pages.write(ids(0, 1, 2), chain.values)
        everything = Wrong(pages=2 * LAYERS, layers=(0, 1, 2), positions=(0, 1))
        assert pages.wrong(ids(1, 0, 2), chain.values) == everything
        assert pages.wrong(ids(0, 1), TokenChain([9, *TOKENS], SIZE).values[:2]) == everything
        assert pages.wrong(ids(6, 7), chain.values[:2]) == everything
        first = grid.first_words(ids(0))[:, 0]
        page = grid.page_words()
        words[first[1] + page] = words[first[0] + page]
        assert pages.wrong(ids(0), chain.values[:1]) == Wrong(pages=1, layers=(1,), positions=(0,))


def test_only_the_full_check_sees_the_inside_of_a_page() -> None:
    grid = GRIDS["LBHNC"]
    chain = TokenChain(TOKENS[:SIZE], SIZE)
    found = []
    for whole in (False, True):
        words = memory()
        pages = Pages(words, grid, whole=whole)
        pages.write(ids(5), chain.values)
        words[grid.first_words(ids(5))[2, 0] + 3] ^= np.uint64(1)
        found.append(pages.wrong(ids(5), chain.values))
    assert found == [None, Wrong(pages=1, layers=(2,), positions=(0,))]


def test_many_wrong_pages_are_counted_and_some_are_named() -> None:
    pages = Pages(memory(), GRIDS["LBHNC"])
    chain = TokenChain([1] * 4 * BLOCKS, SIZE)
    wrong = pages.wrong(ids(*range(BLOCKS)), chain.values, named_max=2)
    assert wrong == Wrong(pages=LAYERS * BLOCKS, layers=(0, 1), positions=(0, 1))


def test_a_page_of_one_word_is_refused() -> None:
    with pytest.raises(UsageError, match="16 bytes"):
        Pages(memory(), Grid(np.arange(1), 1, 1, 1, 1, 1, 1))
