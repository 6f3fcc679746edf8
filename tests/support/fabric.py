"""Two or more memory transports over real buffers, on a clock that only the test moves."""

from __future__ import annotations

from random import Random

import numpy as np

from kvferry.ids import PeerName
from kvferry.layout.runs import Region, Runs
from kvferry.transport.memory import FabricLimits, MemoryFabric, MemoryTransport

BUFFER_BYTES = 1 << 16


class FakeClock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class Member:
    """A transport with one registered buffer of `BUFFER_BYTES` bytes."""

    def __init__(self, fabric: MemoryFabric, name: str, fill: int = 0) -> None:
        self.name = PeerName(name)
        self.buffer = np.full(BUFFER_BYTES, fill, dtype=np.uint8)
        self.transport = MemoryTransport(fabric, self.name)
        self.transport.register([Region(self.address, BUFFER_BYTES)])

    @property
    def address(self) -> int:
        """Where the buffer starts."""
        return int(self.buffer.ctypes.data)

    def meet(self, *others: Member) -> None:
        """Connect both ways."""
        for other in others:
            self.transport.connect(other.name, other.transport.local_metadata())
            other.transport.connect(self.name, self.transport.local_metadata())

    def payloads(self) -> list[bytes]:
        """What has arrived since the last call."""
        return [notification.payload for notification in self.transport.receive()]


class Rig:
    """A fabric with members `a` and `b`, connected."""

    def __init__(
        self,
        seed: int = 1,
        *,
        limits: FabricLimits | None = None,
        auto_advance: bool = True,
        notify_on_poll: bool = True,
        disconnect_fences: bool = False,
    ) -> None:
        self.clock = FakeClock()
        self.fabric = MemoryFabric(
            random=Random(seed),
            clock=self.clock,
            limits=limits,
            auto_advance=auto_advance,
            notify_on_poll=notify_on_poll,
            disconnect_fences=disconnect_fences,
        )
        self.a = Member(self.fabric, "a", fill=1)
        self.b = Member(self.fabric, "b", fill=2)
        self.a.meet(self.b)


def runs_between(source: Member, target: Member, *pairs: tuple[int, int, int]) -> Runs:
    """Runs of `(source offset, target offset, bytes)` between two members' buffers."""
    columns = np.array(pairs, dtype=np.uint64).reshape(-1, 3)
    return Runs(
        columns[:, 0] + np.uint64(source.address), columns[:, 1] + np.uint64(target.address), columns[:, 2]
    )
