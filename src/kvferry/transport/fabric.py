"""Joins memory transports within one process, moves their bytes, and fails on purpose.

A transfer is cut into pieces. Each piece reads its source bytes at the moment it lands, pieces land in any
order, and nothing but a dead node stops one that is under way: not a time-out, not a `disconnect` by either
side, not the fact that the target's engine has given its blocks to somebody else. A transport that copied at
the post would hide what leases and fences are for.

Everything is decided by the clock and the random source that were passed in. Transports of several threads
may share a fabric: one lock guards it, and callbacks run under that lock. With `auto_advance` each `poll` and
`receive` of any transport lands what is due; without it a simulator calls `land_due` at the times that
`next_due` tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

from kvferry.ids import PeerName
from kvferry.transport.exchange import Exchange, Rules, break_connection, give_up
from kvferry.transport.faults import Link, MessageFault, PostFault
from kvferry.transport.nodes import FabricLimits
from kvferry.transport.seen import Faulted, Landing, Listeners, Posted
from kvferry.transport.wire import Traffic


class MemoryFabric:
    """The network between memory transports, and the levers that a test or simulator pulls."""

    def __init__(
        self,
        *,
        random: Random,
        clock: Callable[[], float],
        limits: FabricLimits | None = None,
        auto_advance: bool = True,
        notify_on_poll: bool = True,
        disconnect_fences: bool = False,
    ) -> None:
        """Make an empty fabric.

        Args:
            random: decides order, jitter and faults; the same seed gives the same run.
            clock: seconds, never going back.
            limits: sizes and times of every node.
            auto_advance: land what is due in each `poll` and `receive`.
            notify_on_poll: as NIXL does, send a transfer's notification only when the initiator polls it.
            disconnect_fences: forgetting a peer stops what is under way between the two. NIXL over UCX does
                not: what either side has posted goes on to land, as it does here by default.
        """
        self.lock = threading.RLock()
        self._auto_advance = auto_advance
        rules = Rules(limits or FabricLimits(), notify_on_poll, disconnect_fences)
        self.exchange = Exchange(random, clock, rules)

    def set_link(self, source: PeerName, target: PeerName, link: Link) -> None:
        """Set how one direction behaves."""
        with self.lock:
            self.exchange.plan((source, target)).link = link

    def set_all_links(self, link: Link) -> None:
        """Set how every direction behaves, those between nodes to come included."""
        with self.lock:
            self.exchange.default_link = link
            for plan in self.exchange.plans.values():
                plan.link = link

    def inject(self, source: PeerName, target: PeerName, *faults: PostFault | MessageFault) -> None:
        """Let the next posts or messages of `source` to `target` suffer `faults`, one each, in order."""
        with self.lock:
            plan = self.exchange.plan((source, target))
            plan.posts.extend(fault for fault in faults if isinstance(fault, PostFault))
            plan.messages.extend(fault for fault in faults if isinstance(fault, MessageFault))

    def hold(self, source: PeerName, target: PeerName, *traffic: Traffic) -> None:
        """Let nothing land that moves from `source` to `target` (posts and messages, unless told which)."""
        with self.lock:
            for kind in traffic or tuple(Traffic):
                self.exchange.wire.block((source, target), kind, "hold")

    def release(self, source: PeerName, target: PeerName, *traffic: Traffic) -> None:
        """End `hold`; what waited is due now."""
        with self.lock:
            for kind in traffic or tuple(Traffic):
                self.exchange.wire.unblock((source, target), kind, "hold", self.exchange.clock())

    def cut(self, source: PeerName, target: PeerName) -> None:
        """Partition one direction: messages are lost, transfers stand still and fail at the retry bound.

        A transfer whose bytes arrive but whose acknowledgement cannot stays in flight just so.
        """
        with self.lock:
            self.exchange.cuts.add((source, target))
            self.exchange.wire.block((source, target), Traffic.POSTS, "cut")

    def heal(self, source: PeerName, target: PeerName) -> None:
        """End `cut`; transfers that have not failed yet go on, those past the retry bound do not."""
        with self.lock:
            give_up(self.exchange, (source, target))
            self.exchange.cuts.discard((source, target))
            self.exchange.wire.unblock((source, target), Traffic.POSTS, "cut", self.exchange.clock())

    def break_connection(self, source: PeerName, target: PeerName) -> bool:
        """Let the connection of `source` to `target` die although both live; False when there is none.

        `source` gets a PeerLostError at its next use and has to connect anew, and nothing more that it had
        posted lands. The other end notices nothing: what it has posted still lands at `source`.
        """
        with self.lock:
            return break_connection(self.exchange, source, target)

    def kill(self, name: PeerName, *, noticed_after_seconds: float = 0.0) -> None:
        """End a node as SIGKILL does; its memory must live on until nothing is under way any more.

        What it had posted may still land, until the peer that it lands at is told of the death by a
        PeerLostError or disconnects, or as `afterlife_seconds` says. `noticed_after_seconds` is how long
        peers cannot know of the death.
        """
        with self.lock:
            node = self.exchange.nodes[name]
            node.ended = True
            node.ended_at = self.exchange.clock()
            node.noticed_at = node.ended_at + noticed_after_seconds

    def on_land(self, callback: Callable[[Landing], None]) -> None:
        """Tell `callback` of each piece just after its bytes were written."""
        self.exchange.listeners.landed.append(callback)

    def on_post(self, callback: Callable[[Posted], None]) -> None:
        """Tell `callback` of each post that was accepted."""
        self.exchange.listeners.posted.append(callback)

    def on_fault(self, callback: Callable[[Faulted], None]) -> None:
        """Tell `callback` of each fault that a post or a message is about to suffer, by chance or request."""
        self.exchange.listeners.faulted.append(callback)

    @property
    def listeners(self) -> Listeners:
        """Who is told of what; append to any of its lists. `on_land` and its like are for the usual ones."""
        return self.exchange.listeners

    def next_due(self) -> float | None:
        """When the next thing lands that nothing holds back, in clock seconds; None when there is none."""
        with self.lock:
            return self.exchange.wire.next_due()

    def under_way(self) -> int:
        """How many pieces and messages have neither landed nor been dropped, held ones included."""
        with self.lock:
            return len(self.exchange.wire)

    def progress(self) -> None:
        """What each `poll` and `receive` does: land what is due, where `auto_advance` says so."""
        if self._auto_advance:
            self.land_due()

    def land_due(self, most: int | None = None) -> int:
        """Land what is due by the clock, at most `most` things; returns how many."""
        landed = 0
        with self.lock:
            now = self.exchange.clock()
            while most is None or landed < most:
                event = self.exchange.wire.pop_due(now)
                if event is None:
                    break
                event.action()
                landed += 1
        return landed
