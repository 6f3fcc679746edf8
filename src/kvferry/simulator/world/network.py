"""The network of a world: the memory fabric, who can reach whom, and what observers see of both."""

from __future__ import annotations

from random import Random

from kvferry.ids import EngineId, PeerName
from kvferry.layout.runs import Runs
from kvferry.simulator.engine.rank import RankProcess
from kvferry.simulator.ground import arena
from kvferry.simulator.ground.events import FabricFault, Landed, MessageEnded, MessageSent, Posted, PostEnded
from kvferry.simulator.ground.ground import Ground
from kvferry.simulator.world.fleet import Fleet
from kvferry.transport import seen
from kvferry.transport.memory import FabricLimits, Link, MemoryFabric, PostFault


class Network:
    """Joins the ranks of all lives. Engines are cut from each other with all of their ranks."""

    def __init__(
        self, ground: Ground, fleet: Fleet, random: Random, limits: FabricLimits, link: Link
    ) -> None:
        self._ground = ground
        self._fleet = fleet
        self._random = random
        self._processes: dict[PeerName, RankProcess] = {}
        self._engines: dict[PeerName, EngineId] = {}
        self._by_slot: dict[int, RankProcess] = {}
        self._cuts: dict[tuple[EngineId, EngineId], int] = {}
        self._pair_cuts: dict[tuple[PeerName, PeerName], None] = {}
        self.fabric = MemoryFabric(random=random, clock=ground.clock, limits=limits, auto_advance=False)
        self.fabric.set_all_links(link)
        self.fabric.on_post(self._posted)
        self.fabric.on_land(self._landed)
        listeners = self.fabric.listeners
        listeners.ended.append(self._ended)
        listeners.carried.append(self._sent)
        listeners.delivered.append(self._delivered)
        listeners.progress.append(lambda name: self._processes[name].progressed())
        self.fabric.on_fault(self._faulted)

    def add(self, engine: EngineId, processes: list[RankProcess]) -> None:
        """The ranks of a new life; partitions of their engine hold for them too."""
        for process in processes:
            self._processes[process.name] = process
            self._engines[process.name] = engine
            self._by_slot[process.slot.number] = process
        for source, target in list(self._cuts):
            if engine in (source, target):
                self._cut_ranks(source, target)

    def kill(self, processes: list[RankProcess], noticed_after_seconds: float) -> None:
        """These ranks have died; peers can know after a while."""
        for process in processes:
            self.fabric.kill(process.name, noticed_after_seconds=noticed_after_seconds)
        # Whoever sleeps on a connection to them is woken by its end.
        self._ground.at(self._ground.now + noticed_after_seconds + 1e-6, self._notice)

    def _notice(self) -> None:
        for process in self._processes.values():
            process.progressed()

    def process(self, name: PeerName) -> RankProcess:
        """A rank, of whatever life."""
        return self._processes[name]

    def engine_of(self, name: PeerName) -> EngineId:
        """Whose rank it is."""
        return self._engines[name]

    # --- levers --------------------------------------------------------------------------------------

    def cut(self, source: EngineId, target: EngineId) -> None:
        """Nothing arrives at `target` that comes from `source`, nor their directories' answers."""
        key = source, target
        self._cuts[key] = self._cuts.get(key, 0) + 1
        if self._cuts[key] == 1:
            self._cut_ranks(source, target)

    def heal(self, source: EngineId, target: EngineId) -> None:
        """End one `cut`."""
        key = source, target
        left = self._cuts.get(key, 0) - 1
        if left > 0:
            self._cuts[key] = left
        elif self._cuts.pop(key, None) is not None:
            for pair in [pair for pair in self._pair_cuts if self._engines_of(pair) == key]:
                del self._pair_cuts[pair]
                self.fabric.heal(*pair)
            self._notice()

    def heal_all(self) -> None:
        """No partition is left, and no fault waits for a link."""
        for key in list(self._cuts):
            self._cuts[key] = 1
            self.heal(*key)
        for plan in self.fabric.exchange.plans.values():
            plan.posts.clear()
            plan.messages.clear()

    @property
    def is_troubled(self) -> bool:
        """Whether what is under way may fail without a sign."""
        return bool(self._cuts)

    def is_cut(self, one: EngineId, other: EngineId) -> bool:
        """Whether what needs an answer cannot get one."""
        return (one, other) in self._cuts or (other, one) in self._cuts

    def _cut_ranks(self, source: EngineId, target: EngineId) -> None:
        for one in self._fleet.living(source):
            for other in self._fleet.living(target):
                pair = one.name, other.name
                if pair not in self._pair_cuts:
                    self._pair_cuts[pair] = None
                    self.fabric.cut(*pair)

    def _engines_of(self, pair: tuple[PeerName, PeerName]) -> tuple[EngineId, EngineId]:
        return self._engines[pair[0]], self._engines[pair[1]]

    # --- what observers see --------------------------------------------------------------------------

    def _posted(self, posted: seen.Posted) -> None:
        sources, targets = self._blocks(posted.runs)
        ends = posted.initiator, posted.owner
        read_from = posted.source if posted.initiator == posted.owner else None
        self._ground.emit(Posted(posted.at_seconds, *ends, posted.handle, sources, targets, read_from))

    def _blocks(self, runs: Runs) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Blocks that a transfer reads and writes, each once."""
        sources: dict[int, None] = {}
        targets: dict[int, None] = {}
        for source, target, length in zip(
            runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True
        ):
            words = length // arena.CONTENT_BYTES
            for address, blocks in ((source, sources), (target, targets)):
                slot, word = arena.slot_at(address)
                table = self._by_slot[slot].slot.block_of
                blocks.update(dict.fromkeys(table[word : word + words]))
        return tuple(sources), tuple(targets)

    def _faulted(self, faulted: seen.Faulted) -> None:
        targets = () if faulted.runs is None else self._blocks(faulted.runs)[1]
        # A late post and a late message are called the same.
        late_post = faulted.fault is PostFault.DELAY
        fault = "delay_post" if late_post else faulted.fault.value
        ends = faulted.sender, faulted.target
        self._ground.emit(
            FabricFault(faulted.at_seconds, *ends, fault, targets, faulted.payload, faulted.read)
        )

    def _landed(self, landing: seen.Landing) -> None:
        self._ground.emit(Landed(landing.at_seconds, landing.initiator, landing.owner, landing.handle))

    def _ended(self, ended: seen.Ended) -> None:
        self._ground.emit(
            PostEnded(ended.at_seconds, ended.initiator, ended.owner, ended.handle, ended.state)
        )

    def _sent(self, carried: seen.Carried) -> None:
        self._ground.emit(
            MessageSent(carried.at_seconds, carried.sender, carried.target, carried.number, carried.payload)
        )

    def _delivered(self, delivered: seen.Delivered) -> None:
        self._ground.emit(
            MessageEnded(
                delivered.at_seconds,
                delivered.sender,
                delivered.target,
                delivered.number,
                delivered.arrived,
            )
        )
