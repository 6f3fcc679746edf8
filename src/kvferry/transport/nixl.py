"""The transport that real engines use: NIXL, over UCX by default. The only module that imports nixl.

nixl is imported when a `NixlTransport` is made, not when this module is: the package works without it.

What NIXL leaves to its user, and what is done about it here (measured with 1.5.1 over UCX):

- An agent has no locks of its own, so one thread owns it; every method asserts so.
- Nothing makes progress by itself unless the progress thread is on, which spins a core: `poll` and
  `receive` do.
- The target hears of a WRITE only after its initiator has polled it: poll what you post at once.
- A post cannot be recalled. `release` in flight frees what the backend still uses, so it is refused. Removing
  the peer makes NIXL call the transfer failed while UCX goes on reading its source, so `disconnect` puts the
  removal off. Nor does removing a peer keep its writes out of our memory.
- A peer under a known name is refused until the old one is removed, so `connect` removes it first.
- A killed peer shows as an error within milliseconds of the next send, post or poll, never by `receive`
  alone. A peer that is stopped but alive keeps its transfers in flight for as long as it is stopped.
- UCX's shared memory transports cannot tell that a peer died and are therefore not used between processes:
  two engines on one host need `tcp` (or a NIC) in `UCX_TLS`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import PeerLostError, TransportError, UsageError
from kvferry.ids import PeerName
from kvferry.layout.runs import Region, Runs
from kvferry.transport.base import Handle, Notification, PostState
from kvferry.transport.checks import check_payload, check_runs
from kvferry.transport.nixl_versions import VERSION_ADVISED, check_version
from kvferry.transport.owner import ThreadOwner
from kvferry.transport.regions import Envelope, RegionIndex, decode_envelope, peer_regions

logger = logging.getLogger(__name__)

TRANSPORT_NAME = "nixl"

NOTIFICATION_BYTES_MAX = 64 << 10
"""UCX carries far more (4 MiB tried); other backends do not promise to, and short messages are fair."""

RETRY_BOUND_SECONDS = 30.0
"""UCX's own bounds, with room: an RDMA connection gives up after its retries, TCP after UCX_TCP_USER_TIMEOUT,
and the keep-alive finds a vanished host within two rounds. Raise it where these, UCX_RC_TIMEOUT or
UCX_RC_RETRY_COUNT are raised. A peer that is stopped but reachable is not covered by any bound."""

UCX_DEFAULTS = {"UCX_KEEPALIVE_INTERVAL": "5s", "UCX_TCP_USER_TIMEOUT": "20s"}
"""Set in the environment before UCX starts, where the operator has set nothing. UCX's own keep-alive is every
20 s; without a user timeout Linux retransmits to a vanished host for about 15 minutes."""

_RETRYABLE = ("nixlBackendError", "nixlNotFoundError", "nixlNotPostedError", "nixlUnknownError")
_THREADS_PARAM = {
    "UCX": "num_threads",
    "OBJ": "num_threads",
    "LIBFABRIC": "num_threads",
    "GDS_MT": "thread_count",
    "UCCL": "num_cpus",
}
"""How backends call the size of their pool; the others have none."""
_STATES = {"PROC": PostState.IN_FLIGHT, "DONE": PostState.DONE, "ERR": PostState.FAILED}


@dataclass(slots=True, eq=False)
class _Post:
    """One posted transfer; `native` is NIXL's handle."""

    native: Any
    peer: PeerName
    what: str
    state: PostState = PostState.IN_FLIGHT
    error: TransportError | None = None

    def moved(self, native_state: str) -> None:
        """Take over what NIXL says of it."""
        self.state = _STATES[native_state]
        if self.state is PostState.FAILED:
            self.error = TransportError(f"{self.what}: the backend says that it failed")


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer whose metadata is loaded."""

    metadata: bytes
    regions: RegionIndex
    broken: bool = False
    """Something has failed on the way to it; `connect` loads it anew."""
    missing: bool = False
    """NIXL does not find it any more; its next use loads it anew."""
    leaving: bool = False
    """Disconnected while transfers were in flight; NIXL forgets it when the last of them has ended."""


class _Peers:
    """The peers that an agent has loaded, and what its errors say of them."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._peers: dict[PeerName, _Peer] = {}

    def add(self, peer: PeerName, metadata: bytes, *, busy: bool) -> None:
        """Load `metadata`, unless just this is loaded and sound; what was loaded before is removed first.

        `busy` says that transfers to the peer are in flight, under which it cannot be removed.
        """
        known = self._peers.get(peer)
        if known is not None and known.metadata == metadata and not known.broken:
            known.leaving = False
            return
        envelope = decode_envelope(metadata, transport=TRANSPORT_NAME, peer=peer)
        regions = peer_regions(envelope)
        if busy:
            raise TransportError(f"transfers to {peer} as it was are still in flight", retryable=True)
        self.remove(peer)
        try:
            loaded = self._agent.add_remote_agent(envelope.blob)
        except Exception as error:
            raise mapped_error(error, f"loading the metadata of {peer}") from error
        loaded = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if loaded != peer:
            self._agent.remove_remote_agent(loaded)
            raise TransportError(f"NIXL's metadata of {peer} names another peer: {loaded!r}")
        self._peers[peer] = _Peer(metadata, regions)

    def leave(self, peer: PeerName, *, busy: bool) -> None:
        """Refuse what comes next for a peer, and forget it once it is not `busy`."""
        known = self._peers.get(peer)
        if known is not None:
            known.leaving = True
        self.settle(peer, busy=busy)

    def settle(self, peer: PeerName, *, busy: bool) -> None:
        """Forget a leaving peer that is not busy any more."""
        known = self._peers.get(peer)
        if known is not None and known.leaving and not busy:
            self.remove(peer)

    def remove(self, peer: PeerName) -> None:
        """Forget a peer; unknown ones are ignored, by NIXL's table too."""
        if self._peers.pop(peer, None) is None:
            return
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:  # noqa: BLE001 - NIXL's errors share no base of their own
            # NIXL may have lost the peer before we did; gone is what was asked for.
            logger.info("removing %s: %s", peer, mapped_error(error, "remove"))

    def clear(self) -> None:
        """Forget every peer."""
        for peer in list(self._peers):
            self.remove(peer)

    def known(self, peer: PeerName) -> _Peer:
        """The loaded peer of that name.

        Raises:
            TransportError: not connected.
        """
        known = self._peers.get(peer)
        if known is None or known.leaving:
            raise TransportError(f"not connected to {peer}; call connect with its metadata first")
        return known

    def usable(self, peer: PeerName, is_busy: Callable[[PeerName], bool]) -> _Peer:
        """As `known`; a peer that NIXL alone has lost is loaded anew first, for nobody else would mend it."""
        known = self.known(peer)
        if not known.missing or is_busy(peer):
            return known
        try:
            self.add(peer, known.metadata, busy=False)
        except TransportError as error:
            self._peers[peer] = known
            raise TransportError(str(error), retryable=True) from error
        return self._peers[peer]

    def failure(self, peer: PeerName, error: Exception, what: str) -> TransportError:
        """NIXL's error as ours; after one that broke the way to the peer, `add` loads the same bytes anew."""
        mapped = mapped_error(error, what)
        known = self._peers.get(peer)
        if known is not None and (mapped.retryable or isinstance(mapped, PeerLostError)):
            known.broken = True
            known.missing = type(error).__name__ == "nixlNotFoundError"
        return mapped


class NixlTransport:
    """One rank's NIXL agent. It implements `transport.base.Transport`."""

    def __init__(
        self,
        name: PeerName,
        *,
        backends: Sequence[str] = ("UCX",),
        backend_params: Mapping[str, Mapping[str, str]] | None = None,
        progress_thread: bool = False,
        num_threads: int = 0,
        notification_bytes_max: int = NOTIFICATION_BYTES_MAX,
        retry_bound_seconds: float = RETRY_BOUND_SECONDS,
        allow_untested: bool = False,
    ) -> None:
        """Start an agent named `name`.

        Args:
            name: contains the incarnation, so that a restarted rank is a new peer.
            backends: NIXL plugins to use, in order of preference.
            backend_params: initialisation parameters of single backends.
            progress_thread: let NIXL spin a core; not needed, `poll` and `receive` make progress.
            num_threads: backends that have a pool of threads (`_THREADS_PARAM`) post from so many; 0 posts in
                the calling thread.
            notification_bytes_max: the longest message that `send` accepts.
            retry_bound_seconds: after so long the backend has given up; see `RETRY_BOUND_SECONDS`.
            allow_untested: accept a version of NIXL that kvferry was not tested with.

        Raises:
            UsageError: nixl is missing or of an untested version, a backend is unknown or does not start.
        """
        api = _load_nixl(allow_untested=allow_untested)
        self._name = name
        self._notification_bytes_max = notification_bytes_max
        self._retry_bound_seconds = retry_bound_seconds
        self._owner = ThreadOwner(f"transport {name}")
        config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=[])
        self._agent: Any = api.nixl_agent(name, config)
        self._closed = False
        params = {backend: dict((backend_params or {}).get(backend, {})) for backend in backends}
        for backend, own in params.items():
            if num_threads and backend in _THREADS_PARAM:
                own.setdefault(_THREADS_PARAM[backend], str(num_threads))
        _start_backends(self._agent, params)
        self._regions: RegionIndex | None = None
        self._registrations: list[Any] = []
        self._peers = _Peers(self._agent)
        self._posts: dict[Handle, _Post] = {}
        self._handles = 0

    @property
    def name(self) -> PeerName:
        """Our own name, as peers see it."""
        return self._name

    @property
    def notification_bytes_max(self) -> int:
        """The longest payload that `send`, and the notification of a post, accept."""
        return self._notification_bytes_max

    @property
    def retry_bound_seconds(self) -> float:
        """After so long the backend itself has given up on anything it had accepted."""
        return self._retry_bound_seconds

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable and writable by peers. Called once, before `local_metadata`.

        Raises:
            UsageError: called twice, or the regions are not sound.
            TransportError: no backend can register a region.
        """
        self._enter()
        if self._regions is not None:
            raise UsageError("register may be called once; pass all regions in that call")
        index = RegionIndex(regions)
        for kind in sorted({region.kind for region in index.regions}):
            rows = [(one.address, one.bytes, one.device, "") for one in index.regions if one.kind == kind]
            try:
                self._registrations.append(self._agent.register_memory(rows, kind))
            except Exception as error:
                raise mapped_error(error, f"registering {len(rows)} regions of {kind}") from error
        self._regions = index

    def local_metadata(self) -> bytes:
        """What a peer needs for `connect`: NIXL's own metadata, and each region's device and kind."""
        self._enter()
        regions = () if self._regions is None else tuple(self._regions.regions)
        blob = self._agent.get_agent_metadata()
        return Envelope(transport=TRANSPORT_NAME, name=self._name, regions=regions, blob=blob).encoded()

    def connect(self, peer: PeerName, metadata: bytes) -> None:
        """Load a peer's metadata; over that of an earlier life, or a broken connection, it starts anew.

        Raises:
            TransportError: the metadata is damaged, not of this transport or not of this peer.
        """
        self._enter()
        self._peers.add(peer, metadata, busy=self._is_busy(peer))

    def disconnect(self, peer: PeerName) -> None:
        """Forget a peer: nothing more is posted or sent to it. Unknown peers are ignored.

        It is no fence. Our transfers in flight go on reading their sources and can be polled to their end;
        only then does NIXL forget the peer. What the peer has posted, or posts later, still lands here.
        """
        self._enter()
        self._peers.leave(peer, busy=self._is_busy(peer))

    def send(self, peer: PeerName, payload: bytes) -> None:
        """Send a message. Reaches peers that have not loaded our metadata.

        Raises:
            PeerLostError: the peer is known to be gone.
            TransportError: not connected, empty or too long, or refused for now (`retryable`).
        """
        self._enter()
        check_payload(payload, self._notification_bytes_max)
        self._peers.usable(peer, self._is_busy)
        try:
            self._agent.send_notif(peer, payload)
        except Exception as error:
            raise self._peers.failure(peer, error, f"sending to {peer}") from error

    def receive(self) -> list[Notification]:
        """Messages that have arrived since the last call, those of finished posts included."""
        self._enter()
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as error:
            raise mapped_error(error, "receiving") from error
        return [
            Notification(PeerName(peer), payload)
            for peer, payloads in arrived.items()
            for payload in payloads
        ]

    def write(self, peer: PeerName, runs: Runs, notify: bytes | None = None) -> Handle:
        """Post a WRITE of local sources into the peer's targets; `notify` arrives after its last byte.

        Raises:
            PeerLostError: the peer is known to be gone.
            TransportError: a run leaves registered memory, or the post was refused; nothing was posted.
        """
        return self._post("WRITE", peer, runs, notify)

    def read(self, peer: PeerName, runs: Runs, notify: bytes | None = None) -> Handle:
        """Post a READ of the peer's sources into local targets. Errors as for `write`."""
        return self._post("READ", peer, runs, notify)

    def poll(self, handle: Handle) -> PostState:
        """Make progress and tell the state."""
        self._enter()
        post = self._known_post(handle)
        if post.state is PostState.IN_FLIGHT:
            try:
                post.moved(self._agent.check_xfer_state(post.native))
            except Exception as error:  # noqa: BLE001 - NIXL's errors share no base of their own
                post.error = self._peers.failure(post.peer, error, post.what)
                post.state = PostState.FAILED
            if post.state is not PostState.IN_FLIGHT:
                self._peers.settle(post.peer, busy=self._is_busy(post.peer))
        return post.state

    def failure(self, handle: Handle) -> TransportError | None:
        """Why a FAILED handle failed."""
        self._enter()
        return self._known_post(handle).error

    def release(self, handle: Handle) -> None:
        """Forget a handle in a terminal state.

        Raises:
            AssertionError: it is in flight: NIXL would free what the backend still uses.
        """
        self._enter()
        post = self._known_post(handle)
        if post.state is PostState.IN_FLIGHT:
            raise AssertionError(
                f"handle {handle} is released while it is in flight; poll it to its end first"
            )
        del self._posts[handle]
        post.native.release()

    def close(self) -> None:
        """Remove peers, deregister and stop. Idempotent.

        Raises:
            UsageError: handles are in flight; poll them to their end first.
        """
        self._owner.check()
        if self._closed:
            return
        in_flight = sum(post.state is PostState.IN_FLIGHT for post in self._posts.values())
        if in_flight:
            raise UsageError(f"{self._name} is closed with {in_flight} transfers in flight; drain first")
        for handle in list(self._posts):
            self.release(handle)
        self._peers.clear()
        for registration in self._registrations:
            self._agent.deregister_memory(registration)
        self._agent = None
        self._peers = _Peers(None)
        self._closed = True

    # --- inside --------------------------------------------------------------------------------------

    def _post(self, operation: str, peer: PeerName, runs: Runs, notify: bytes | None) -> Handle:
        self._enter()
        if notify is not None:
            check_payload(notify, self._notification_bytes_max)
        check_runs(runs)
        known = self._peers.usable(peer, self._is_busy)
        ours, theirs = (runs.source, runs.target) if operation == "WRITE" else (runs.target, runs.source)
        if self._regions is None:
            raise UsageError("register memory before posting")
        local = self._regions.descriptors(ours, runs.length, self._name)
        remote = known.regions.descriptors(theirs, runs.length, peer)
        what = f"{operation} of {runs.bytes} bytes in {len(runs)} runs, peer {peer}"
        native = None
        try:
            native = self._agent.initialize_xfer(
                operation,
                self._agent.get_xfer_descs(*local),
                self._agent.get_xfer_descs(*remote),
                peer,
                notify or b"",
            )
            state = self._agent.transfer(native)
        except Exception as error:
            if native is not None:
                native.release()
            raise self._peers.failure(peer, error, what) from error
        self._handles += 1
        post = self._posts[self._handles] = _Post(native, peer, what)
        post.moved(state)
        return self._handles

    def _enter(self) -> None:
        self._owner.check()
        if self._closed:
            raise UsageError(f"transport {self._name} is closed")

    def _is_busy(self, peer: PeerName) -> bool:
        return any(post.peer == peer and post.state is PostState.IN_FLIGHT for post in self._posts.values())

    def _known_post(self, handle: Handle) -> _Post:
        try:
            return self._posts[handle]
        except KeyError:
            raise AssertionError(f"handle {handle} is unknown or released") from None


def mapped_error(error: Exception, what: str) -> TransportError:
    """NIXL's exception as one of ours; `what` says what was being done.

    Only a disconnect is proof that the peer's connection is gone. That NIXL does not find the peer says
    something of our own tables alone: the peer may be alive and writing, so it is retryable after `connect`.
    """
    kind = type(error).__name__
    text = f"{what}: {kind}: {error}"
    if kind == "nixlRemoteDisconnectError":
        return PeerLostError(text)
    return TransportError(text, retryable=kind in _RETRYABLE)


def _load_nixl(*, allow_untested: bool) -> Any:
    try:
        version = importlib.metadata.version("nixl")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"nixl is not installed; install nixl=={VERSION_ADVISED}") from None
    check_version(version, allow_untested=allow_untested)
    for variable, value in UCX_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    try:
        # Late, so that importing kvferry needs no nixl, and takes no second.
        import nixl._api as api  # noqa: PLC0415
    except ImportError as problem:
        raise UsageError(f"nixl {version} is installed but cannot be imported: {problem}") from problem
    return api


def _start_backends(agent: Any, params: Mapping[str, Mapping[str, str]]) -> None:
    available = sorted(agent.get_plugin_list())
    if not params:
        raise UsageError(f"name at least one NIXL backend; available are {', '.join(available)}")
    for backend, own in params.items():
        if backend not in available:
            raise UsageError(f"NIXL backend {backend!r} is unknown; available are {', '.join(available)}")
        try:
            agent.create_backend(backend, dict(own))
        except Exception as error:
            raise UsageError(
                f"NIXL backend {backend} does not start ({type(error).__name__}: {error}); "
                "check its parameters, and UCX_TLS and UCX_NET_DEVICES"
            ) from error
        logger.info("NIXL backend %s started with %s", backend, dict(own))
