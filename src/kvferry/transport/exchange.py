"""The inside of a memory fabric: nodes, their connections, and transfers that land piece by piece.

Not thread-safe; the fabric and its transports hold the fabric's lock around every call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from kvferry.errors import PeerLostError, TransportError, UsageError
from kvferry.ids import PeerName
from kvferry.layout.runs import Runs
from kvferry.transport.base import Notification, PostState
from kvferry.transport.faults import FaultPlan, Link, MessageFault, PostFault
from kvferry.transport.nodes import Connection, FabricLimits, Node, Post
from kvferry.transport.regions import RegionIndex
from kvferry.transport.seen import Carried, Delivered, Ended, Faulted, Landing, Listeners, Posted
from kvferry.transport.wire import Event, LinkKey, Traffic, Wire


@dataclass(frozen=True, slots=True)
class Rules:
    """How a fabric behaves, for its whole life. The fields are explained at `MemoryFabric`."""

    limits: FabricLimits
    notify_on_poll: bool
    disconnect_fences: bool


class Exchange:
    """Moves messages and transfers between nodes, by clock, chance and plan."""

    def __init__(self, random: Random, clock: Callable[[], float], rules: Rules) -> None:
        self.random = random
        self.clock = clock
        self.rules = rules
        self.limits = rules.limits
        self.wire = Wire(random)
        self.nodes: dict[PeerName, Node] = {}
        self.cuts: set[LinkKey] = set()
        self.plans: dict[LinkKey, FaultPlan] = {}
        self.default_link = Link()
        self.listeners = Listeners()
        self._handles = 0
        self._messages = 0
        self._generations = 0

    def plan(self, key: LinkKey) -> FaultPlan:
        """The behaviour of one direction."""
        return self.plans.setdefault(key, FaultPlan(self.default_link))

    def join(self, name: PeerName) -> Node:
        """Add a node. A name is free again when the node that had it has ended.

        Raises:
            UsageError: a living node has this name.
        """
        before = self.nodes.get(name)
        if before is not None and not before.ended:
            raise UsageError(f"a node named {name} lives on this fabric; give each its own name")
        self._generations += 1
        node = Node(name, self._generations, RegionIndex(()))
        self.nodes[name] = node
        return node

    # --- connections -------------------------------------------------------------------------------

    def connect(self, node: Node, peer: PeerName, generation: int, regions: RegionIndex, raw: bytes) -> None:
        """Open a way to that life of `peer` which its metadata `raw` names; an older way is torn down."""
        before = node.connections.get(peer)
        if before is not None and before.metadata == raw and before.alive:
            return
        self.disconnect(node, peer)
        target = self.nodes.get(peer)
        if target is not None and target.generation != generation:
            target = None
        node.connections[peer] = Connection((node.name, peer), target, regions, raw)

    def disconnect(self, node: Node, peer: PeerName) -> None:
        """Forget a peer; where `disconnect_fences`, what is under way between the two stops, both ways."""
        connection = node.connections.pop(peer, None)
        if connection is None or not self.rules.disconnect_fences:
            return
        connection.alive = False
        if connection.target is not None:
            _tear(connection.target, node)

    def connection(self, node: Node, peer: PeerName) -> Connection:
        """The live way to a peer.

        Raises:
            PeerLostError: the peer has ended, or has torn the connection down.
            TransportError: not connected.
        """
        connection = node.connections.get(peer)
        if connection is None:
            raise TransportError(f"not connected to {peer}; call connect with its metadata first")
        error = self.lost(node, connection)
        if error is not None:
            raise error
        return connection

    def lost(self, node: Node, connection: Connection) -> PeerLostError | None:
        """Why the peer is known to be gone. Who is told so is safe from whatever that peer had posted."""
        peer = connection.key[1]
        target = connection.target
        if target is not None and connection.alive and not self._death_is_known(target, connection):
            return None
        connection.alive = False
        if target is None:
            return PeerLostError(f"{peer} is gone")
        if target.ended and self.limits.afterlife_seconds is None:
            _tear(target, node)
            for post in target.posts_in_flight():
                # The dead may have left and found the peer again: earlier connections have died too.
                if post.peer is node:
                    post.connection.alive = False
        if target.ended:
            return PeerLostError(f"{peer} is gone")
        return PeerLostError(f"the connection to {peer} is torn down")

    def _death_is_known(self, target: Node, connection: Connection) -> bool:
        return target.ended and not self._is_cut(connection.key) and self.clock() >= target.noticed_at

    def _is_cut(self, key: LinkKey) -> bool:
        """Whether either direction is cut: what needs an answer needs both."""
        return key in self.cuts or key[::-1] in self.cuts

    # --- transfers and messages --------------------------------------------------------------------

    def post(self, connection: Connection, node: Node, runs: Runs, notify: bytes | None, read: bool) -> Post:
        """Accept a transfer of `node` whose runs are checked.

        Raises:
            TransportError: refused; nothing moves.
        """
        peer = connection.target
        assert peer is not None, "a connection without a target is lost, which was asked before"
        fault = self.plan(connection.key).post_fault(self.random)
        if fault is not None:
            for listener in self.listeners.faulted:
                listener(Faulted(self.clock(), *connection.key, fault, runs, read=read))
        if fault is PostFault.FAIL:
            way = "read from" if read else "write to"
            raise TransportError(f"a {way} {peer.name} cannot be posted")
        if fault is PostFault.REFUSE or len(node.posts_in_flight()) >= self.limits.posts_in_flight_max:
            raise TransportError(f"{peer.name} is busy, the post was refused", retryable=True)
        pieces = _pieces(runs, self.random, self.limits.pieces_max)
        self._handles += 1
        post = Post(self._handles, node, peer, connection, read, notify, self.clock(), len(pieces))
        node.posts[post.handle] = post
        for told in self.listeners.posted:
            told(Posted(post.posted_at, node.name, post.source.name, post.owner.name, post.handle, runs))
        if fault is PostFault.STALL:
            post.stalled = True
            return post
        breaks_at = self.random.randrange(len(pieces)) if fault is PostFault.BREAK else None
        link = self.plan(post.link).link
        late = link.delay_seconds if fault is PostFault.DELAY else 0.0
        for index, piece in enumerate(pieces):
            landing = partial(self._land, post, piece, breaks=index == breaks_at)
            due = min(self._due(link) + late, post.posted_at + self.limits.retry_bound_seconds)
            self.wire.push(Event(due, post.link, Traffic.POSTS, landing))
        return post

    def poll(self, post: Post) -> PostState:
        """The state of a transfer; its notification is sent the first time that it is seen done."""
        state = self._polled(post)
        if state is not PostState.IN_FLIGHT and not post.end_seen:
            post.end_seen = True
            for listener in self.listeners.ended:
                listener(Ended(self.clock(), post.initiator.name, post.owner.name, post.handle, state))
        return state

    def _polled(self, post: Post) -> PostState:
        if post.state is not PostState.IN_FLIGHT:
            return post.state
        error = self.lost(post.initiator, post.connection)
        if error is not None:
            post.fail(error)
        elif post.stalled and post.initiator.connections.get(post.peer.name) is not post.connection:
            post.fail(TransportError(f"the transfer to {post.peer.name} stood still to its end"))
        elif self._given_up(post):
            post.fail(TransportError(f"{post.peer.name} did not answer within the retry bound"))
        elif not post.pieces_left and not self._is_cut(post.link):
            post.state = PostState.DONE
            if post.notify is not None and self.rules.notify_on_poll:
                self._carry(post.connection, post.peer, post.notify)
        return post.state

    def send(self, connection: Connection, payload: bytes) -> None:
        """Send a message over a live connection; faults may lose, double or delay it.

        Raises:
            TransportError: too many messages wait for that peer to take them (`retryable`).
        """
        target = connection.target
        assert target is not None, "a connection without a target is lost, which was asked before"
        if target.messages_pending >= self.limits.messages_pending_max:
            raise TransportError(f"{target.name} does not take its messages", retryable=True)
        self._carry(connection, target, payload)

    def _carry(self, connection: Connection, target: Node, payload: bytes) -> None:
        plan = self.plan(connection.key)
        fault = plan.message_fault(self.random)
        self._messages += 1
        number = self._messages
        for listener in self.listeners.carried:
            listener(Carried(self.clock(), *connection.key, number, payload))
        if fault is not None:
            for on_fault in self.listeners.faulted:
                on_fault(Faulted(self.clock(), *connection.key, fault, payload=payload))
        if fault is MessageFault.LOSE:
            self._tell_delivered(connection.key, number, arrived=False)
            return
        extra = plan.link.delay_seconds if fault is MessageFault.DELAY else 0.0
        for _ in range(2 if fault is MessageFault.DOUBLE else 1):
            target.messages_pending += 1
            delivery = partial(self._deliver, connection.key, target, number, payload)
            due = self._due(plan.link) + extra
            overtakes = plan.link.overtaking
            self.wire.push(Event(due, connection.key, Traffic.MESSAGES, delivery, overtakes))

    # --- landing -----------------------------------------------------------------------------------

    def _land(self, post: Post, piece: Runs, *, breaks: bool) -> None:
        # A node that was killed as initiator of a write is no hindrance: its bytes are under way.
        gone = post.owner.ended or (post.read and post.source.ended)
        if gone or not post.connection.alive or post.state is not PostState.IN_FLIGHT:
            return
        if _is_too_late(post.initiator, self.limits, self.clock()):
            return
        if breaks:
            post.fail(TransportError("the transfer broke after a part of it had landed", retryable=True))
            self._progress(post.initiator)
            return
        runs = zip(piece.source.tolist(), piece.target.tolist(), piece.length.tolist(), strict=True)
        for source, target, size in runs:
            ctypes.memmove(target, source, size)
        post.pieces_left -= 1
        for listener in self.listeners.landed:
            listener(Landing(self.clock(), post.initiator.name, post.owner.name, post.handle, piece))
        if not post.pieces_left and post.notify is not None and not self.rules.notify_on_poll:
            self._carry(post.connection, post.peer, post.notify)
        if not post.pieces_left:
            self._progress(post.initiator)

    def _deliver(self, key: LinkKey, target: Node, number: int, payload: bytes) -> None:
        arrived = key not in self.cuts and not target.ended
        self._tell_delivered(key, number, arrived=arrived)
        if not arrived:
            target.messages_pending -= 1
            return
        target.inbox.append(Notification(key[0], payload))
        self._progress(target)

    def _tell_delivered(self, key: LinkKey, number: int, *, arrived: bool) -> None:
        for listener in self.listeners.delivered:
            listener(Delivered(self.clock(), *key, number, arrived))

    def _progress(self, node: Node) -> None:
        for listener in self.listeners.progress:
            listener(node.name)

    def _given_up(self, post: Post) -> bool:
        unreachable = post.peer.ended or self._is_cut(post.link)
        return unreachable and self.clock() - post.posted_at >= self.limits.retry_bound_seconds

    def _due(self, link: Link) -> float:
        return self.clock() + link.latency_seconds + link.jitter_seconds * self.random.random()


def break_connection(exchange: Exchange, source: PeerName, target: PeerName) -> bool:
    """Kill one node's way to another; False when it has none. See `MemoryFabric.break_connection`."""
    node = exchange.nodes.get(source)
    connection = None if node is None else node.connections.get(target)
    if connection is None or not connection.alive:
        return False
    connection.alive = False
    for listener in exchange.listeners.progress:
        listener(source)
    return True


def give_up(exchange: Exchange, link: LinkKey) -> None:
    """End what a partition of this direction has held up for longer than the retry bound."""
    for node in exchange.nodes.values():
        for post in node.posts_in_flight():
            overdue = exchange.clock() - post.posted_at >= exchange.limits.retry_bound_seconds
            if post.link == link and overdue:
                post.fail(TransportError(f"{post.peer.name} did not answer within the retry bound"))


def _is_too_late(initiator: Node, limits: FabricLimits, now: float) -> bool:
    """Whether what a dead node had posted does not land any more."""
    afterlife = limits.afterlife_seconds
    return initiator.ended and afterlife is not None and now > initiator.ended_at + afterlife


def _tear(initiator: Node, target: Node) -> None:
    """Stop what `initiator` has under way to `target`; it notices by itself."""
    connection = initiator.connections.get(target.name)
    if connection is not None and connection.target is target:
        connection.alive = False
    for post in initiator.posts_in_flight():
        # It may have connected anew since.
        if post.connection.target is target:
            post.connection.alive = False


def _pieces(runs: Runs, random: Random, pieces_max: int) -> list[Runs]:
    """Deal the runs, in random order, to at most `pieces_max` pieces; few long runs are cut first."""
    if len(runs) < pieces_max:
        runs = _cut(runs, -(-pieces_max // len(runs)))
    order = list(range(len(runs)))
    random.shuffle(order)
    hands = (np.array(order[start::pieces_max], dtype=np.int64) for start in range(pieces_max))
    return [Runs(runs.source[hand], runs.target[hand], runs.length[hand]) for hand in hands if len(hand)]


def _cut(runs: Runs, parts: int) -> Runs:
    """Cut every run into up to `parts` runs of about the same length."""
    cut: list[tuple[int, int, int]] = []
    for source, target, size in zip(
        runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True
    ):
        step = -(-size // parts)
        cut += [(source + at, target + at, min(step, size - at)) for at in range(0, size, step)]
    columns = np.array(cut, dtype=np.uint64)
    return Runs(columns[:, 0], columns[:, 1], columns[:, 2])
