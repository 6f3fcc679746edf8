"""What a turn costs the main thread of engines with KV both ways, for `kvferry bench hooks`.

When a turn ends, D makes digests of its beginnings and pins its blocks. When the next one arrives, P makes
the same digests of its prompt and compares. Each is one pass over the turn's tokens, beside what a request
costs anyway. The host's own functions run on vLLM's own request and block pool, without an agent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random

from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

from kvferry.connector.hook_engine import BLOCK_TOKENS, FORWARD_SECONDS, Cost, Meter
from kvferry.handoff import DecodeParams, HeldParams, SourceParams
from kvferry.host.events import Ended
from kvferry.host.facts import EngineFacts
from kvferry.host.histories import wanted_history
from kvferry.host.holding import Holding, HoldLimits
from kvferry.host.orders import StepOrders
from kvferry.host.pins import Pins
from kvferry.host.prefixes import salt_of, told_prefixes
from kvferry.ids import BlockId, EngineId, TransferId
from kvferry.protocol import reasons

KEPT, DIGESTS, CONTINUED = "turn kept", "of it digests", "turn gone on with"
ANSWER_TOKENS = 15
"""Of a turn; what is kept ends with a block."""
NEW_TOKENS = 100
"""Of the next turn's prompt, which the digests do not cover."""
_SEED, _VOCABULARY = 0, 150_000


class _Uncounted:
    """Counters that nobody reads."""

    def count(self, name: str, amount: int = 1, labels: tuple[str, ...] = ()) -> None:
        """Count nothing."""

    def observe(self, name: str, value: float) -> None:
        """Observe nothing."""


def turn_costs(sizes: Sequence[int], repeats: int) -> dict[tuple[str, str], list[Cost]]:
    """Costs by engine and name, of turns of so many blocks; each repeat follows a pause, as steps do."""
    meter = Meter()
    for blocks in sizes:
        turns = _Turns(blocks)
        # The first one warms up.
        for own in (Meter(), *[meter] * repeats):
            turns.once(own)
    sides = {CONTINUED: "prefill", KEPT: "decode", DIGESTS: "decode"}
    return {(sides[name.rpartition(",")[0]], name): costs for name, costs in meter.hooks.items()}


class _Turns:
    """A turn of so many blocks, which is kept and gone on with as often as one likes."""

    def __init__(self, blocks: int) -> None:
        self._size = f"{blocks} blocks"
        pool = BlockPool(2 * blocks + 1, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        # Id 0 is the pool's null block.
        self._blocks = [BlockId(block) for block in Random(_SEED).sample(range(1, 2 * blocks + 1), blocks)]
        pool.touch([pool.blocks[block] for block in self._blocks])
        pins = Pins()
        pins.bind(pool)
        self._facts = EngineFacts(
            EngineId("turns"),
            1,
            1,
            produces=True,
            consumes=True,
            block_tokens=BLOCK_TOKENS,
            block_count=2 * blocks,
        )
        limits = HoldLimits(seconds=60.0, blocks_max=blocks, tokens_min=0)
        self._holding = Holding(self._facts, pins, _Uncounted(), limits, time.monotonic, lambda: "turn" * 8)
        self._source = SourceParams(engine=self._facts.engine, host="127.0.0.1", port=1)
        chance = Random(_SEED)
        tokens = [chance.randrange(_VOCABULARY) for _ in range(blocks * BLOCK_TOKENS + 1)]
        self._turn = _request("turn", tokens[:-ANSWER_TOKENS])
        self._turn.append_output_token_ids(tokens[-ANSWER_TOKENS:])
        # The newest token has been sampled and not been computed.
        self._turn.num_computed_tokens = len(tokens) - 1
        self._turn.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self._next = _request("next", [*tokens, *range(NEW_TOKENS)])

    def once(self, meter: Meter) -> None:
        """The turn ends, and the next one arrives."""
        time.sleep(FORWARD_SECONDS)
        self._holding.note(self._turn, DecodeParams(source=self._source, transfer=TransferId("origin")))
        held = meter.call(
            self._holding.finish, self._turn, self._blocks, self._source, name=f"{KEPT}, {self._size}"
        )
        assert isinstance(held, HeldParams), "there is room for it"
        time.sleep(FORWARD_SECONDS)
        told = meter.call(self._digests, name=f"{DIGESTS}, {self._size}")
        assert told == held.prefixes, "the same digests"
        time.sleep(FORWARD_SECONDS)
        wanted = meter.call(
            wanted_history, self._next, held, "push", self._facts, name=f"{CONTINUED}, {self._size}"
        )
        assert wanted.stop == held.tokens, "all of the turn is the next one's"
        self._holding.plan(StepOrders())
        self._holding.rank_ended(Ended(0, self._holding.newest, reasons.FETCHED, sending=True, held=True))

    def _digests(self) -> object:
        tokens = self._turn.all_token_ids[: self._turn.num_computed_tokens]
        salt = salt_of(self._turn)
        assert salt is not None, "its KV depends on nothing but its tokens"
        return told_prefixes(tokens, self._turn.num_prompt_tokens, BLOCK_TOKENS, salt)


def _request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=ANSWER_TOKENS),
        pooling_params=None,
    )
