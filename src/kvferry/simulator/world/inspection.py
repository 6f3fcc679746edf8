"""What may be looked up in a world: by checkers, by directed faults, by tests. Looking changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.agent.loop import Loop
from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.limits import Limits
from kvferry.simulator.engine.rank import RankProcess
from kvferry.simulator.engine.requests import Request
from kvferry.simulator.ground.arena import GroupShape
from kvferry.simulator.world.world import World


@dataclass(frozen=True, slots=True)
class Inspection:
    """Facts of one world. It is the checkers' oracle."""

    world: World

    # --- content and leftovers -----------------------------------------------------------------------

    def mismatch(
        self, rank: PeerName, prompt: int, group: int, start: int, stop: int, blocks: Sequence[int]
    ) -> str | None:
        """How tokens `[start, stop)` in `blocks` of a living rank differ from `prompt`'s content.

        `blocks[0]` is the block of a cache group that has token `start`. None when they are equal.
        """
        if stop <= start:
            return None
        slot = self.world.network.process(rank).slot
        part = slot.parts[group]
        size = part.shape.block_tokens
        within = start % size
        places = np.arange(within, within + stop - start)
        table = np.array(blocks, dtype=np.intp)
        if len(table) < part.shape.blocks(within + stop - start):
            return f"token {stop - 1} has no block in group {group} of {rank}"
        found = part.values[table[places // size], places % size]
        expected = self.world.contents.part(prompt, part.layers, slot.heads)[start:stop]
        if np.array_equal(found, expected):
            return None
        token, layer, _ = np.argwhere(found != expected)[0].tolist()
        block, layer = table[(within + token) // size], part.layers[layer]
        return f"token {start + token}, layer {layer}, block {block} of {rank} is not that of prompt {prompt}"

    def prompt_of(self, transfer: TransferId, consumer: ConsumerId) -> int | None:
        """The content that a decode request expects; None for a request that the world does not know."""
        request = self.request(consumer)
        if request is None:
            return None
        of_history = request.history is not None and request.history.transfer == transfer
        return request.prompt.number if of_history or request.transfer == transfer else None

    def remains(self) -> list[str]:
        """One text for each thing that living engines and the network still hold."""
        left: list[str] = []
        for name, engine in self.world.engines.items():
            if engine is None:
                left.append(f"{name} is down")
                continue
            left += engine.remains()
            for process in engine.ranks:
                left += _remains_of(process)
        if self.world.network.fabric.under_way():
            left.append(f"{self.world.network.fabric.under_way()} messages or pieces are under way")
        return left

    def fits(self, source: PeerName, target: PeerName) -> bool:
        """Whether the caches of two ranks' engines can be joined, for KV to go from the one to the other."""
        ours, theirs = (
            self.world.fleet.facts(self.world.network.engine_of(rank)).cache for rank in (source, target)
        )
        return ours.fits(theirs)

    @property
    def is_calm(self) -> bool:
        """Whether no fault of any kind may happen in this history."""
        return not self.world.faults

    @property
    def delay_seconds(self) -> float:
        """The most that one hop takes where nothing goes wrong: the network's way and a thread's lag."""
        link = self.world.shape.link
        lag = max(
            facts.agent_lag_seconds + facts.pace.device_lag_seconds for facts in self.world.shape.engines
        )
        return link.latency_seconds + link.jitter_seconds + lag

    @property
    def retry_bound_seconds(self) -> float:
        """Nothing lands later than so long after it was posted."""
        return self.world.shape.fabric.retry_bound_seconds

    def groups_of(self, rank: PeerName) -> tuple[GroupShape, ...]:
        """The cache groups of a rank, in any life."""
        return tuple(part.shape for part in self.world.network.process(rank).slot.parts)

    def content(self, rank: PeerName, group: int, blocks: Sequence[int]) -> npt.NDArray[np.uint32]:
        """What lies in blocks of a cache group of a rank now, token by token."""
        values = self.world.network.process(rank).slot.parts[group].values[list(blocks)]
        return values.reshape(-1, *values.shape[2:])

    def limits_of(self, rank: PeerName) -> Limits:
        """The limits that a rank was started with, of any life."""
        return self.world.network.process(rank).loop.consumer.state.limits

    def clock_rate_of(self, rank: PeerName) -> float:
        """Seconds on a rank's clock per true second."""
        return self.world.network.process(rank).clock.rate

    # --- who is who ----------------------------------------------------------------------------------

    def producer_engine(self, transfer: TransferId) -> EngineId | None:
        """Where a transfer's prefill leg goes."""
        dispatch = self.world.router.dispatches.get(transfer)
        return None if dispatch is None else dispatch.item.producer

    def consumer_engine(self, transfer: TransferId) -> EngineId | None:
        """Where a transfer's decode legs go."""
        dispatch = self.world.router.dispatches.get(transfer)
        return None if dispatch is None else dispatch.item.consumer

    def consumers_of(self, transfer: TransferId) -> tuple[ConsumerId, ...]:
        """The decode requests of a transfer that have been sent."""
        dispatch = self.world.router.dispatches.get(transfer)
        legs = () if dispatch is None else dispatch.decodes
        return tuple(dict.fromkeys(ConsumerId(leg.request) for leg in legs))

    def prefills_of(self, transfer: TransferId) -> tuple[str, ...]:
        """The prefill requests of a transfer that have been sent: more than one only when it was replayed."""
        dispatch = self.world.router.dispatches.get(transfer)
        return () if dispatch is None else tuple(dict.fromkeys(leg.request for leg in dispatch.prefills))

    def ranks(self, engine: EngineId) -> tuple[PeerName, ...]:
        """The ranks of an engine's life now; none while it is down."""
        return tuple(process.name for process in self.world.fleet.living(engine))

    def loop_of(self, rank: PeerName) -> Loop | None:
        """A rank's agent; None when it is dead."""
        process = self.world.network.process(rank)
        return process.loop if process.alive else None

    def request(self, name: str) -> Request | None:
        """A request at the life of the engine that it was sent to."""
        leg = self.world.router.leg(name)
        return None if leg is None else leg.engine.request(name)


def _remains_of(process: RankProcess) -> list[str]:
    loop = process.loop
    left = [f"{count} sources {state}" for state, count in loop.producer.states().items()]
    left += [f"{count} receptions {state}" for state, count in loop.consumer.states().items()]
    counts = (
        (loop.producer.in_flight(), "slices in flight"),
        (len(loop.producer.state.tickets), "preemptions that wait"),
        (len(loop.producer.state.hindered), "slices that others wait for"),
        (
            sum(len(lane.turns.ready) for lane in loop.producer.state.lanes.values()),
            "deliveries whose turn it is",
        ),
        (len(loop.producer.state.registered), "peers with registered blocks"),
        (len(loop.consumer.state.peers), "watched peers"),
        (len(process.desk.inbox), "commands in the mailbox"),
        (process.desk.results_waiting, "results in the mailbox"),
        (process.desk.drains_waiting, "drains that wait"),
        (int(not loop.quiet), "posts or messages unsent"),
    )
    left += [f"{count} {what}" for count, what in counts if count]
    return [f"{process.name}: {what}" for what in left]
