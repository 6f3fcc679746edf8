"""NIXL by hand: what a transfer costs when nothing stands around it. The measure of kvferry's own overhead.

An agent as `transport.nixl` makes one, a list of descriptors, one post, polled to its end by the thread that
posted it; the other side polls for the notification. No protocol, no checks, no bookkeeping.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransportError
from kvferry.layout.runs import Region, Runs

Rows = npt.NDArray[np.uint64]
"""NIXL's descriptors: address, bytes, device."""
KIND = "DRAM"


@dataclass(frozen=True, slots=True)
class RawTransfer:
    """Descriptors on both sides, made before the clock runs, and what the other side shall hear."""

    local: Rows
    remote: Rows
    notify: bytes


def raw_transfer(runs: Runs, notify: bytes) -> RawTransfer:
    """The descriptors that kvferry too would post, in the order in which it would."""
    device = np.zeros(len(runs), np.uint64)
    return RawTransfer(
        np.stack([runs.source, runs.length, device], axis=1),
        np.stack([runs.target, runs.length, device], axis=1),
        notify,
    )


class RawAgent:
    """One agent, one region, one peer. Belongs to the thread that made it."""

    def __init__(self, name: str, region: Region) -> None:
        # Late, as in `transport.nixl`: NIXL reads its environment when it is imported.
        import nixl._api as nixl  # noqa: PLC0415

        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = nixl.nixl_agent(name, config)
        self._agent.create_backend("UCX", {})
        row = (region.address, region.bytes, region.device, "")
        self._registration: Any = self._agent.register_memory([row], KIND)
        self._peer = ""

    def metadata(self) -> bytes:
        """What the peer needs for `connect`."""
        blob: bytes = self._agent.get_agent_metadata()
        return blob

    def connect(self, metadata: bytes) -> None:
        """Load the peer's metadata."""
        name = self._agent.add_remote_agent(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else str(name)

    def write(self, transfers: Sequence[RawTransfer], seconds_max: float) -> None:
        """Post all, and poll what is posted after each post, until all have ended.

        Raises:
            TransportError: NIXL calls one failed, or it has not ended in time.
        """
        flights: list[Any] = []
        for transfer in transfers:
            flight = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(transfer.local, KIND),
                self._agent.get_xfer_descs(transfer.remote, KIND),
                self._peer,
                transfer.notify,
            )
            flights.append(flight)
            if self._agent.transfer(flight) == "ERR":
                raise TransportError("raw NIXL: a transfer could not be posted")
            flights = self._in_flight(flights)
        deadline = time.monotonic() + seconds_max
        while flights:
            flights = self._in_flight(flights)
            if time.monotonic() > deadline:
                raise TransportError(f"raw NIXL: a transfer has not ended within {seconds_max:g} s")

    def _in_flight(self, flights: list[Any]) -> list[Any]:
        left = []
        for flight in flights:
            state = self._agent.check_xfer_state(flight)
            if state == "ERR":
                raise TransportError("raw NIXL: a transfer has failed")
            if state == "DONE":
                flight.release()
            else:
                left.append(flight)
        return left

    def heard(self) -> list[bytes]:
        """Notifications since the last call; lets NIXL make progress."""
        return [text for texts in self._agent.get_new_notifs().values() for text in texts]

    def close(self) -> None:
        """Forget the peer and stop."""
        if self._peer:
            self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registration)
        self._agent = None
