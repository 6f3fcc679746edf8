"""Scheduler side, receiving: what requests need, where it shall land, and what a failure leaves behind.

These are decode requests, which need their whole prompt, and prefill requests of which another engine keeps
the beginning, the conversation's history. A request is `waiting` until the engine has memory for it,
`receiving` from then on, and `settled` once its KV has arrived, has failed, or was not needed. A settled
request is local for good: after a failure or a preemption it is computed here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.host.events import Quarantined, RankIndex, RequestId, Safe
from kvferry.host.facts import EngineFacts
from kvferry.host.pins import Pins
from kvferry.host.requests import EngineRequest, wants_prompt_logprobs
from kvferry.host.wanted import Wanted
from kvferry.ids import BlockId, ConsumerId
from kvferry.layout.spans import to_spans
from kvferry.protocol import reasons
from kvferry.protocol.commands import AnnounceCommand, Command, Receive, Relinquish, Withdraw


class _State(enum.Enum):
    WAITING = "waiting"
    RECEIVING = "receiving"
    SETTLED = "settled"


@dataclass(slots=True)
class _Receiving:
    """One request. `blocks` are the destination while it is receiving, of all cache groups."""

    consumer: ConsumerId
    wanted: Wanted
    state: _State = _State.WAITING
    blocks: list[BlockId] = field(default_factory=list)
    finished: bool = False
    """The engine has ended the request; it keeps the blocks until the ranks have reported."""


class SchedulerConsumer:
    """All requests of one engine whose KV comes from elsewhere."""

    def __init__(
        self,
        facts: EngineFacts,
        pins: Pins,
        *,
        waiting_blocks_share: float,
        quarantine_share: float,
        recompute_tokens: int = 0,
    ) -> None:
        """A history of fewer than `recompute_tokens` is computed."""
        self._facts = facts
        self._pins = pins
        self._waiting_blocks_max = int(facts.block_count * waiting_blocks_share)
        self._quarantined_blocks_max = int(facts.block_count * quarantine_share)
        self._recompute_tokens = recompute_tokens
        self._requests: dict[RequestId, _Receiving] = {}
        self._receiving_blocks = 0
        self._receiving_count = 0
        self._commands: list[Command] = []
        self._quarantine: dict[ConsumerId, set[RankIndex]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def announce(self, request: EngineRequest, wanted: Wanted) -> bool:
        """A request has arrived; False when an earlier one of its name has not come to its end.

        The ranks know destinations by transfer and request, so that the earlier one's end would be taken for
        this one's.
        """
        if request.request_id in self._requests or ConsumerId(request.request_id) in self._quarantine:
            return False
        receiving = _Receiving(ConsumerId(request.request_id), wanted)
        if not wanted.stop:
            self._withdraw(receiving, "none of it is of use")
            return True
        self._requests[request.request_id] = receiving
        self._commands.append(AnnounceCommand(wanted.transfer, receiving.consumer, wanted.source))
        return True

    def wanted_tokens(self, request: EngineRequest, local_tokens: int) -> int | None:
        """Tokens beyond the local ones to come from the producer; None to be asked again. Changes nothing."""
        receiving = self._requests.get(request.request_id)
        if receiving is None or receiving.state is not _State.WAITING or wants_prompt_logprobs(request):
            return 0
        # The engine computes the last prompt token in any case, to sample from it.
        if local_tokens >= request.num_prompt_tokens - 1:
            return 0
        wanted = receiving.wanted
        if wanted.is_history and wanted.stop - local_tokens < max(self._recompute_tokens, 1):
            return 0
        blocks = sum(len(needed) for needed in self._facts.needed_blocks(local_tokens, wanted.stop))
        full = self._receiving_blocks and self._receiving_blocks + blocks > self._waiting_blocks_max
        if full or not self.ready:
            # A history is computed here rather than waited for.
            return 0 if wanted.is_history else None
        return wanted.stop - local_tokens

    def wanted_by(self, request: RequestId) -> Wanted | None:
        """What a request is to receive, or has received; None for one that is not ours."""
        receiving = self._requests.get(request)
        return None if receiving is None else receiving.wanted

    def is_waiting(self, request: RequestId) -> bool:
        """Whether `allocated` would change anything for a request."""
        receiving = self._requests.get(request)
        return receiving is not None and receiving.state is _State.WAITING

    def allocated(
        self, request: EngineRequest, blocks: Sequence[list[BlockId]], external_tokens: int
    ) -> bool:
        """The engine has given the request its blocks of each group; False when none is to be received."""
        receiving = self._requests.get(request.request_id)
        if receiving is None or receiving.state is not _State.WAITING:
            return True
        if external_tokens <= 0:
            receiving.state = _State.SETTLED
            self._withdraw(receiving, "the KV is here already")
            return False
        wanted = receiving.wanted
        stop = wanted.stop
        start = stop - external_tokens
        # Blocks behind the prompt are for tokens to come; they are nobody's target.
        target = [
            given[needed.start : needed.stop]
            for given, needed in zip(blocks, self._facts.needed_blocks(start, stop), strict=True)
        ]
        receiving.state = _State.RECEIVING
        receiving.blocks = [block for group in target for block in group]
        self._receiving_blocks += len(receiving.blocks)
        self._receiving_count += 1
        self._commands.append(
            Receive(
                wanted.transfer,
                receiving.consumer,
                wanted.source,
                start,
                stop,
                tuple(map(to_spans, target)),
                wanted.mode,
                wanted.patient,
                recent=wanted.is_history,
            )
        )
        return True

    def finish(self, request: EngineRequest) -> bool:
        """The engine ends a request, at whatever stage; False when it had asked for nothing yet.

        Blocks that are being written are kept by the engine itself until the ranks report the end.
        """
        receiving = self._requests.get(request.request_id)
        if receiving is None or receiving.finished:
            return True
        if receiving.state is _State.SETTLED:
            del self._requests[request.request_id]
            return True
        self._withdraw(receiving, request.status.name.removeprefix("FINISHED_").lower())
        if receiving.state is _State.RECEIVING:
            receiving.finished = True
            return True
        del self._requests[request.request_id]
        return False

    def received(self, requests: Iterable[RequestId]) -> None:
        """Every rank has reported the end of these, well or not."""
        for name in requests:
            receiving = self._requests.get(name)
            if receiving is None or receiving.state is not _State.RECEIVING:
                continue
            receiving.state = _State.SETTLED
            self._receiving_blocks -= len(receiving.blocks)
            self._receiving_count -= 1
            receiving.blocks = []
            if receiving.finished:
                del self._requests[name]

    def quarantined(self, event: Quarantined) -> None:
        """A rank cannot prove that nobody writes into the request's blocks: nobody else may have them."""
        consumer = ConsumerId(event.request)
        if consumer not in self._quarantine:
            receiving = self._requests.get(event.request)
            if receiving is None:
                return
            self._quarantine[consumer] = set()
            self._pins.add(("quarantine", consumer), receiving.blocks)
        self._quarantine[consumer].add(event.rank)

    def safe(self, event: Safe) -> None:
        """A rank now can."""
        consumer = ConsumerId(event.request)
        ranks = self._quarantine.get(consumer)
        if ranks is None:
            return
        ranks.discard(event.rank)
        if not ranks:
            del self._quarantine[consumer]
            self._pins.drop(("quarantine", consumer))

    @property
    def wants_to_run(self) -> bool:
        """Whether a request could run here if it had memory: one that waits for it, or is computed here."""
        return len(self._requests) > self._receiving_count

    def relinquish(self) -> bool:
        """Give up destinations whose prefill has not begun; False when there are none at all."""
        receiving = [one for one in self._requests.values() if one.state is _State.RECEIVING]
        self._commands += [Relinquish(one.wanted.transfer, one.consumer) for one in receiving]
        return bool(receiving)

    @property
    def has_commands(self) -> bool:
        """Whether `take_commands` would bring any."""
        return bool(self._commands)

    def take_commands(self) -> list[Command]:
        """The commands since the last call."""
        commands, self._commands = self._commands, []
        return commands

    @property
    def quarantined_blocks(self) -> int:
        """Blocks in quarantine."""
        return sum(self._pins.count(("quarantine", consumer)) for consumer in self._quarantine)

    @property
    def ready(self) -> bool:
        """Whether quarantine leaves enough of the cache to admit more remote KV."""
        return self.quarantined_blocks <= self._quarantined_blocks_max

    @property
    def needs_steps(self) -> bool:
        """Whether the workers must be heard or told something although the engine has no request to run."""
        return bool(self._commands or self._quarantine)

    @property
    def receiving_count(self) -> int:
        """Requests whose KV is on its way; asked for in every step, so it is kept and not counted."""
        return self._receiving_count

    def _withdraw(self, receiving: _Receiving, reason: str) -> None:
        cancelled = reasons.because(reasons.CANCELLED, reason)
        wanted = receiving.wanted
        self._commands.append(Withdraw(wanted.transfer, receiving.consumer, wanted.source, cancelled))
