"""A network between emulated engines, and a witness of transfers, under every NIXL agent of this process.

The bytes move as fast as the host moves them. A transfer *counts* as done, and its notification goes out,
only when it also would be done on the emulated link: transfers of one engine take their turns on it, in the
order in which they were posted, and each takes its latency and its bytes over the bandwidth. As with NIXL
itself, the initiator has to ask for a transfer's state before the notification leaves. Messages that travel
alone are not delayed.

NIXL's progress thread spins on a core, idle or not. Two engines of which each spins a core leave nothing of a
machine with two, so what is then measured is the spinning; `patience` lets that thread sleep between its
rounds, by NIXL's own setting, which its Python interface holds at 0.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.emulator.presets import Link
from kvferry.errors import UsageError

LOCAL_AGENT = "NIXL_INIT_AGENT"
DONE, IN_PROGRESS = "DONE", "PROC"
DESCRIPTOR_LISTS_MAX = 64
"""Lists of descriptors that were made and not used yet; an older one is taken for 0 bytes."""
TRANSFERS_MAX = 1024
"""Above so many, those that are done are forgotten: not everybody releases a transfer by its agent."""
_LINKED = (
    "get_xfer_descs",
    "prep_xfer_dlist",
    "make_prepped_xfer",
    "initialize_xfer",
    "transfer",
    "check_xfer_state",
    "release_xfer_handle",
)

Lengths = npt.NDArray[np.int64]


class Wire:
    """One engine's end of the link: transfers go one after the other. Any thread may send."""

    def __init__(self, link: Link, scale: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """`scale`: bytes on the emulated link per byte that really moves."""
        self._link = link
        self._scale = scale
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def send(self, moved: int, posted: float) -> float:
        """Put so many real bytes on the wire from `posted` on; when they have arrived."""
        with self._lock:
            start = max(posted, self._free_at)
            self._free_at = start + moved * self._scale / self._link.bytes_per_second
            return self._free_at + self._link.latency_seconds

    def has_passed(self, due: float) -> bool:
        """Whether that moment is here."""
        return self._clock() >= due


@dataclass(slots=True)
class Transfer:
    """One posted transfer; times are monotonic seconds."""

    operation: str
    peer: str
    notification: bytes
    descriptors: int
    moved: int
    """Bytes."""
    address: int = 0
    """Of the first byte on our side; 0 where it is not known."""
    posted: float = 0.0
    post_seconds: float = 0.0
    """How long posting held its thread."""
    due: float | None = None
    """When it is done on the wire; None before it is posted."""
    landed: bool = False
    told: bool = False
    """It has been seen done, and whoever wants to know was told."""


Witness = Callable[[Transfer], None]


@dataclass(frozen=True, slots=True)
class _Listed:
    """A list of descriptors: the first one's address, and the bytes of each."""

    first: int
    lengths: Lengths


_UNKNOWN = _Listed(0, np.zeros(0, dtype=np.int64))


class LinkedAgent:
    """Stands before one NIXL agent's methods; `inner` has them as they are."""

    def __init__(
        self,
        inner: Any,
        wire: Wire | None,
        witness: Witness | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a `wire` transfers count as they are; the `witness` is shown each that was seen done."""
        self._inner = inner
        self._wire = wire
        self._witness = witness
        self._clock = clock
        self._lists: dict[int, _Listed] = {}
        """By the list's identity, in the order of making."""
        self._sides: dict[int, tuple[str, Lengths]] = {}
        self._transfers: dict[int, Transfer] = {}

    def get_xfer_descs(self, descs: Any, *args: Any, **kwargs: Any) -> Any:
        """Remember how long each descriptor is, and where the first one is."""
        made = self._inner.get_xfer_descs(descs, *args, **kwargs)
        listed = _listed(descs)
        if listed is not None:
            self._lists[id(made)] = listed
            while len(self._lists) > DESCRIPTOR_LISTS_MAX:
                del self._lists[next(iter(self._lists))]
        return made

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, *args: Any, **kwargs: Any) -> Any:
        """Remember whose the list is, and how long each of its descriptors is."""
        listed = self._lists.pop(id(xfer_list), None) or _listed(xfer_list)
        handle = self._inner.prep_xfer_dlist(agent_name, xfer_list, *args, **kwargs)
        if listed is not None:
            self._sides[_key(handle)] = agent_name, listed.lengths
        return handle

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Any,
        local_indices: Any,
        remote_xfer_side: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Make the transfer; on a wire without its notification, which is then ours to send."""
        peer, lengths = self._sides.get(_key(remote_xfer_side), ("", None))
        moved = 0
        if lengths is not None:
            moved = int(lengths[np.asarray(remote_indices, dtype=np.int64)].sum())
        ours = bool(self._wire and peer)
        handle = self._inner.make_prepped_xfer(
            operation,
            local_xfer_side,
            local_indices,
            remote_xfer_side,
            remote_indices,
            b"" if ours else notif_msg,
            *args,
            **kwargs,
        )
        self._remember(handle, Transfer(operation, peer, notif_msg, len(remote_indices), moved))
        return handle

    def initialize_xfer(
        self,
        operation: str,
        local_descs: Any,
        remote_descs: Any,
        remote_agent: str,
        notif_msg: bytes = b"",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Make the transfer; on a wire without its notification, which is then ours to send."""
        ours, theirs = (self._lists.pop(id(descs), _UNKNOWN) for descs in (local_descs, remote_descs))
        native = b"" if self._wire else notif_msg
        handle = self._inner.initialize_xfer(
            operation, local_descs, remote_descs, remote_agent, native, *args, **kwargs
        )
        count, moved = len(theirs.lengths), int(theirs.lengths.sum())
        self._remember(handle, Transfer(operation, remote_agent, notif_msg, count, moved, ours.first))
        return handle

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        """Post; on a wire it is in progress at least until it is through."""
        transfer = self._transfers[_key(handle)]
        transfer.notification = notif_msg or transfer.notification
        native = () if self._wire or not notif_msg else (notif_msg,)
        transfer.posted = self._clock()
        state = str(self._inner.transfer(handle, *native))
        transfer.post_seconds = self._clock() - transfer.posted
        transfer.landed, transfer.told = state == DONE, False
        if self._wire is not None:
            # A network sends while the rest is still being posted.
            transfer.due = self._wire.send(transfer.moved, transfer.posted)
            return IN_PROGRESS if state == DONE else state
        if state == DONE:
            self._tell(transfer)
        return state

    def check_xfer_state(self, handle: Any) -> str:
        """Done when the bytes have landed and would have passed the wire; then the notification leaves."""
        transfer = self._transfers.get(_key(handle))
        if transfer is None:
            return str(self._inner.check_xfer_state(handle))
        if not transfer.landed:
            state = str(self._inner.check_xfer_state(handle))
            if state not in {DONE, IN_PROGRESS}:
                del self._transfers[_key(handle)]
            if state != DONE:
                return state
            transfer.landed = True
        if self._wire is not None:
            if transfer.due is None or not self._wire.has_passed(transfer.due):
                return IN_PROGRESS
            if transfer.notification and transfer.peer and not transfer.told:
                self._inner.send_notif(transfer.peer, transfer.notification)
        self._tell(transfer)
        return DONE

    def release_xfer_handle(self, handle: Any) -> Any:
        """Forget the transfer."""
        self._transfers.pop(_key(handle), None)
        return self._inner.release_xfer_handle(handle)

    def _remember(self, handle: Any, transfer: Transfer) -> None:
        if len(self._transfers) >= TRANSFERS_MAX:
            for key, old in list(self._transfers.items()):
                if old.told:
                    del self._transfers[key]
        self._transfers[_key(handle)] = transfer

    def _tell(self, transfer: Transfer) -> None:
        if self._witness is not None and not transfer.told:
            self._witness(transfer)
        transfer.told = True


def install(
    link: Link | None, *, scale: int, patience_microseconds: int | None, witness: Witness | None
) -> None:
    """Put the link under all NIXL agents that this process makes from now on.

    Classes that others have imported already are changed in place. Installing twice changes nothing more.

    Raises:
        UsageError: there is a link, but no NIXL to put it under.
    """
    if link is None and patience_microseconds is None and witness is None:
        return
    try:
        # Late: an engine whose connector needs no NIXL may not have it.
        import nixl._api as api  # noqa: PLC0415
    except ImportError as error:
        if link is None:
            return
        raise UsageError(f"an emulated link stands under NIXL, which cannot be imported: {error}") from error
    if patience_microseconds is not None:
        _make_patient(api.nixlBind, patience_microseconds)
    if link is not None or witness is not None:
        _link(api.nixl_agent, None if link is None else Wire(link, scale), witness)


def _link(agent_class: Any, wire: Wire | None, witness: Witness | None = None) -> None:
    if hasattr(agent_class, "kvferry_linked"):
        return
    methods = {name: getattr(agent_class, name) for name in (*_LINKED, "send_notif")}
    for name in _LINKED:
        setattr(agent_class, name, _through(name, methods, wire, witness))
    agent_class.kvferry_linked = True


def _through(
    name: str, methods: Mapping[str, Callable[..., Any]], wire: Wire | None, witness: Witness | None
) -> Callable[..., Any]:
    def method(agent: Any, *args: Any, **kwargs: Any) -> Any:
        linked = agent.__dict__.get("kvferry_link")
        if linked is None:
            inner = {name: functools.partial(method, agent) for name, method in methods.items()}
            made = LinkedAgent(SimpleNamespace(**inner), wire, witness)
            linked = agent.__dict__.setdefault("kvferry_link", made)
        return getattr(linked, name)(*args, **kwargs)

    return method


def _make_patient(bindings: Any, microseconds: int) -> None:
    original: Any = bindings.nixlAgentConfig
    if hasattr(original, "kvferry_patience"):
        return

    def set_patiently(config: Any, name: str, value: Any) -> None:
        original.__setattr__(config, name, microseconds if name == "pthrDelay" else value)

    attributes = {"__setattr__": set_patiently, "kvferry_patience": microseconds}
    bindings.nixlAgentConfig = type("PatientConfig", (original,), attributes)


def _key(handle: Any) -> int:
    """NIXL's number of a transfer or of a prepared list."""
    return int(handle._handle)


def _listed(descs: Any) -> _Listed | None:
    """None for what is no list of (address, bytes, device) rows."""
    if isinstance(descs, np.ndarray) and descs.ndim == 2 and len(descs) and descs.shape[1] >= 3:
        return _Listed(int(descs[0, 0]), descs[:, 1].astype(np.int64))
    if isinstance(descs, list) and descs and isinstance(descs[0], tuple):
        lengths = np.fromiter((row[1] for row in descs), dtype=np.int64, count=len(descs))
        return _Listed(int(descs[0][0]), lengths)
    return None
