"""Both cores together, where a scenario is better counted than read; see also the transcripts."""

from __future__ import annotations

import pytest

from kvferry.ids import PeerName
from kvferry.protocol.commands import BlocksSafe, Received, ReceiveFailed
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import Register, Renew, Status, Written
from tests.support.pair import Decode, Pair

P0, D0 = PeerName("p0"), PeerName("d0")


def ended_well(decode: Decode) -> bool:
    return isinstance(decode.result, Received)


@pytest.mark.parametrize("start", [0, 4, 20, 28])
@pytest.mark.parametrize("chunk", [3, 8, 32])
@pytest.mark.parametrize("order", ["registration first", "in the middle", "last"])
def test_every_order_of_registration_and_chunks(start: int, chunk: int, order: str) -> None:
    """P01: whatever arrives first, the tokens that are asked for arrive, each in its place."""
    pair = Pair(producers=2)
    pair.expect("t", 31)
    frontiers = [*range(chunk, 31, chunk), 31]
    at = {"registration first": 0, "in the middle": len(frontiers) // 2, "last": len(frontiers)}[order]
    for number, frontier in enumerate(frontiers):
        if number == at:
            pair.receive("t", 31, start)
        pair.compute("t", frontier)
        pair.complete()
    if at == len(frontiers):
        pair.receive("t", 31, start)
    pair.finish("t")
    pair.complete_all()
    assert all(map(ended_well, pair.decodes.values()))
    pair.assert_clean()
    for producer in pair.producers:
        posted = [piece for piece in pair.posts if piece.peer == D0]
        assert sum(piece.stop - piece.start for piece in posted) == 2 * (31 - start), producer


def test_a_transfer_ends_without_any_new_request() -> None:
    """P59: the source is released by the completion itself; no engine step, no timer."""
    pair = Pair()
    pair.expect("t", 8)
    pair.receive("t", 8)
    pair.compute("t", 8)
    pair.finish("t")
    pair.complete()
    pair.assert_clean()


def test_new_requests_never_get_the_blocks_of_one_that_is_being_sent() -> None:
    """P44, P46: source blocks stay from the end of prefill to the end of the last write that reads them."""
    pair = Pair(blocks=8, limits=Limits(lease_seconds=6, slice_seconds=100))
    pair.expect("t", 16)
    pair.compute("t", 16)
    pair.finish("t")
    decode = pair.receive("t", 16)
    pair.cut = {(D0, P0), (P0, D0)}
    pair.advance(9.0)
    assert pair.pool.free_count == 4, "the lease is over, the write is not"
    pair.expect("u", 16)
    pair.compute("u", 16)
    assert decode.result is None
    pair.cut = set()
    pair.complete_all()
    assert isinstance(decode.result, ReceiveFailed)
    pair.abandon("u")
    pair.assert_clean()


def test_fifty_aborts_end_by_answer_none_by_time() -> None:
    """P33: nothing is in flight, so each fence comes with the answer."""
    pair = Pair(blocks=200)
    for number in range(50):
        pair.receive(f"t{number}", 8)
    assert pair.pools[D0].free_count == 100
    for number in range(50):
        pair.withdraw(f"t{number}")
    assert pair.pools[D0].free_count == 200
    assert pair.now == 100.0
    assert not any(isinstance(result, BlocksSafe) for _, result in pair.results)


def test_a_doubled_and_late_written_is_counted_and_nothing_else() -> None:
    """P19, P64: notifications that arrive twice, and after the end."""
    pair = Pair()
    pair.expect("t", 4)
    decode = pair.receive("t", 4)
    pair.held = {(P0, D0)}
    pair.compute("t", 4)
    pair.complete()
    pair.double((P0, D0))
    pair.deliver((P0, D0))
    pair.deliver((P0, D0))
    assert ended_well(decode)
    assert len(pair.messages("p0", Written)) == 1
    assert pair.consumers[D0].state.counts == {"late_message": 1}


def test_an_idle_pair_says_nothing() -> None:
    """Nothing waits, so nothing is renewed and no timer is armed once tombstones are gone."""
    pair = Pair()
    pair.expect("t", 4)
    pair.receive("t", 4)
    pair.compute("t", 4)
    pair.finish("t")
    pair.complete_all()
    sent = len(pair.sent)
    pair.advance(1000.0)
    assert len(pair.sent) == sent
    assert list(pair.due()) == []


def test_renewals_are_one_message_per_peer_and_interval() -> None:
    """The first registration of a link permits nothing yet and is answered; the others repeat its mark."""
    pair = Pair(blocks=400)
    for number in range(100):
        pair.receive(f"t{number}", 4)
        pair.expect(f"t{number}", 4)
    assert len(pair.messages("p0", Status)) == 1
    assert len(pair.messages("d0", Register)) == 101
    pair.advance(10.0)
    assert len(pair.messages("d0", Renew)) == 5
    assert len(pair.messages("p0", Status)) == 1 + 5


def test_the_model_sees_what_it_is_there_to_see() -> None:
    """A pair that never objects proves nothing: break each promise by hand and see it object."""
    pair = Pair()
    pair.expect("t", 8)
    pair.compute("t", 8)
    pair.pool.give_back(pair.prefills["t"].blocks, "t")
    pair.prefills["t"].running = False
    with pytest.raises(AssertionError, match="promise 1"):
        pair.receive("t", 8)

    pair = Pair()
    pair.expect("t", 8)
    decode = pair.receive("t", 8)
    pair.compute("t", 8)
    pair.pools[D0].give_back(decode.blocks, next(iter(pair.decodes)))
    with pytest.raises(AssertionError, match="promise 2"):
        pair.complete()

    pair = Pair()
    pair.expect("t", 8)
    pair.receive("t", 8)
    pair.compute("t", 8)
    pair.source_memory[P0].spoil([1])
    with pytest.raises(AssertionError, match="promise 5"):
        pair.complete()
