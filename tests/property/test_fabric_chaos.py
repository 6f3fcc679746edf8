"""Whatever a memory fabric does on purpose, its promises hold: seeds instead of scenarios."""

from __future__ import annotations

from random import Random

import pytest

from kvferry.errors import TransportError
from kvferry.layout.runs import Runs
from kvferry.transport.base import PostState
from kvferry.transport.memory import FabricLimits, Landing, Link
from tests.support.fabric import BUFFER_BYTES, Member, Rig, runs_between

SLOT_BYTES = 512
RETRY_BOUND_SECONDS = 5.0


class Chaos:
    """Posts, polls, holds, cuts and disconnects drawn from one seed; watches every landing."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        limits = FabricLimits(retry_bound_seconds=RETRY_BOUND_SECONDS)
        self.rig = Rig(seed, limits=limits, disconnect_fences=self.random.random() < 0.5)
        self.rig.fabric.set_all_links(
            Link(latency_seconds=0.01, jitter_seconds=0.5, refuse_rate=0.1, break_rate=0.1, lose_rate=0.1)
        )
        self.rig.fabric.on_land(self.landed)
        self.open: dict[int, tuple[Member, Runs]] = {}
        self.bytes_landed: dict[int, int] = {}
        self.ended: dict[int, PostState] = {}
        self.trace: list[object] = []

    def landed(self, landing: Landing) -> None:
        assert self.ended.get(landing.handle) is None, "a transfer landed after its end"
        self.bytes_landed[landing.handle] = self.bytes_landed.get(landing.handle, 0) + landing.runs.bytes
        self.trace.append((landing.at_seconds, landing.handle, landing.runs.bytes))

    def pair(self) -> tuple[Member, Member]:
        members = [self.rig.a, self.rig.b]
        self.random.shuffle(members)
        return members[0], members[1]

    def step(self) -> None:
        action = self.random.choice([self.post, self.post, self.poll, self.poll, self.toggle, self.meet])
        action()
        self.rig.clock.advance(self.random.random() * 0.3)

    def post(self) -> None:
        ours, theirs = self.pair()
        slots = self.random.sample(range(BUFFER_BYTES // SLOT_BYTES), 3)
        read = self.random.random() < 0.3
        source, target = (theirs, ours) if read else (ours, theirs)
        runs = runs_between(source, target, *((at * SLOT_BYTES, at * SLOT_BYTES, SLOT_BYTES) for at in slots))
        operation = ours.transport.read if read else ours.transport.write
        try:
            self.open[operation(theirs.name, runs, b"done")] = (ours, runs)
        except TransportError as error:
            self.trace.append(str(error))

    def poll(self) -> None:
        for handle, (member, runs) in list(self.open.items()):
            state = member.transport.poll(handle)
            if state is PostState.IN_FLIGHT:
                continue
            self.ended[handle] = state
            if state is PostState.DONE:
                assert self.bytes_landed[handle] == runs.bytes, "done means every byte, once"
            assert (member.transport.failure(handle) is None) is (state is PostState.DONE)
            member.transport.release(handle)
            del self.open[handle]
            self.trace.append((handle, state))

    def toggle(self) -> None:
        source, target = (member.name for member in self.pair())
        fabric = self.rig.fabric
        self.random.choice([fabric.hold, fabric.release, fabric.cut, fabric.heal])(source, target)

    def meet(self) -> None:
        ours, theirs = self.pair()
        if self.random.random() < 0.3:
            ours.transport.disconnect(theirs.name)
        ours.transport.connect(theirs.name, theirs.transport.local_metadata())

    def calm(self) -> None:
        """Faults stop; within the retry bound everything must end."""
        fabric, names = self.rig.fabric, (self.rig.a.name, self.rig.b.name)
        fabric.set_all_links(Link())
        for source, target in (names, names[::-1]):
            fabric.release(source, target)
            fabric.heal(source, target)
        self.rig.clock.advance(RETRY_BOUND_SECONDS)
        self.poll()


def run(seed: int) -> Chaos:
    chaos = Chaos(seed)
    for _ in range(120):
        chaos.step()
    chaos.calm()
    return chaos


@pytest.mark.parametrize("seed", range(40))
def test_transfers_end_once_and_land_whole_or_not_after_their_end(seed):
    chaos = run(seed)
    assert chaos.open == {}
    for member in (chaos.rig.a, chaos.rig.b):
        assert set(member.payloads()) <= {b"done"}
    assert chaos.rig.fabric.under_way() == 0
    for member in (chaos.rig.a, chaos.rig.b):
        member.transport.close()


def test_one_seed_is_one_run():
    assert run(7).trace == run(7).trace
    assert run(7).trace != run(8).trace


def test_the_seeds_reach_every_outcome():
    states = {state for seed in range(10) for state in run(seed).ended.values()}
    assert states == {PostState.DONE, PostState.FAILED}
