"""The states of both sides and every transition between them, as tables.

Two rules: everything about state changes lives here, and nothing here knows what a change means. A pair
(state, event) is either in a table, or in its set of late events that change nothing, or a `PeerError`.

A *delivery* is the producer's record of one registration (transfer, consumer, peer); a *source* its
record of one transfer. A *part* is the consumer's record of one producer rank of one reception; a
*reception* its record of one transfer for one consumer request.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from typing import Generic, TypeVar

from kvferry.errors import PeerError


class SourceState(enum.Enum):
    """One transfer on a producer rank."""

    UNKNOWN = "unknown"
    """Only peers have spoken of it: the prefill leg is still on its way."""
    QUEUED = "queued"
    COMPUTING = "computing"
    HELD = "held"
    """Prefill ended; the blocks are leased until the consumers are served."""
    ABANDONED = "abandoned"
    """No more KV will come; posted slices drain."""
    ENDED = "ended"


class SourceEvent(enum.Enum):
    """What happens to a source."""

    EXPECT = "expect"
    ADVANCE = "advance"
    FINISH = "finish"
    ABANDON = "abandon"
    END = "end"
    """Every consumer is served, gone or expired, nothing is in flight, and the host has finished."""


class DeliveryState(enum.Enum):
    """One registration on a producer rank."""

    ANNOUNCED = "announced"
    REGISTERED = "registered"
    ASKED = "asked"
    """Pull: the consumer wants to read, and prefill has not ended."""
    LENT = "lent"
    """Pull: the consumer was offered the source blocks and may be reading them."""
    RECALLED = "recalled"
    """Pull: it was told to stop; the blocks are kept until it is silent, or the lease has ended."""
    STOPPING = "stopping"
    """Nothing more is posted; slices in flight drain before the peer is answered."""
    WRITTEN = "written"
    FAILED = "failed"
    CANCELLED = "cancelled"
    FETCHED = "fetched"


class DeliveryEvent(enum.Enum):
    """What happens to a delivery."""

    REGISTER = "register"
    COMPLETE = "complete"
    ASK = "ask"
    OFFER = "offer"
    FETCHED = "fetched"
    LAPSE = "lapse"
    """Pull: no promise to keep the source blocks runs any more."""
    CANCEL = "cancel"
    STOP = "stop"
    DRAINED_FAILED = "drained_failed"
    DRAINED_CANCELLED = "drained_cancelled"


class ReceptionState(enum.Enum):
    """One reception on a consumer rank."""

    ANNOUNCED = "announced"
    WAITING = "waiting"
    FAILING = "failing"
    """It will not be completed; fences are being collected."""
    QUARANTINED = "quarantined"
    """The host was told that it failed, and that its blocks may still be written."""
    ENDED = "ended"


class ReceptionEvent(enum.Enum):
    """What happens to a reception."""

    RECEIVE = "receive"
    COMPLETE = "complete"
    FAIL = "fail"
    FENCED = "fenced"
    GIVE_UP = "give_up"
    """Some producer rank stays silent: the host is told now, the blocks stay in quarantine."""
    END = "end"


class PartState(enum.Enum):
    """One producer rank of a reception."""

    UNTOLD = "untold"
    """It has not been told of our blocks."""
    TOLD = "told"
    ASKED = "asked"
    """Pull: it was asked for its blocks."""
    OFFERED = "offered"
    """Pull: its blocks are known and being read."""
    DRAINING = "draining"
    """Pull: nothing more is read from it; what is in flight has to end."""
    WRITTEN = "written"
    FETCHED = "fetched"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """Proven dead, or its connection torn down after its permission had run out."""


class PartEvent(enum.Enum):
    """What happens to a part."""

    TELL = "tell"
    ASK = "ask"
    OFFER = "offer"
    FETCHED = "fetched"
    STOP = "stop"
    DRAINED = "drained"
    WRITTEN = "written"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


class Table(Generic[State, Event]):
    """Transitions of one machine; `late` pairs are normal and change nothing."""

    def __init__(
        self, transitions: Mapping[tuple[State, Event], State], late: Set[tuple[State, Event]]
    ) -> None:
        self.transitions = dict(transitions)
        self.late = frozenset(late)

    def next(self, state: State, event: Event) -> State:
        """The state after `event`; the same one when the event is late.

        Raises:
            PeerError: the pair is not possible.
        """
        following = self.transitions.get((state, event))
        if following is not None:
            return following
        if (state, event) in self.late:
            return state
        raise PeerError(f"{event.value} is not possible in state {state.value}")


_S, _SE = SourceState, SourceEvent
SOURCE: Table[SourceState, SourceEvent] = Table(
    {
        (_S.UNKNOWN, _SE.EXPECT): _S.QUEUED,
        (_S.UNKNOWN, _SE.END): _S.ENDED,
        (_S.QUEUED, _SE.ADVANCE): _S.COMPUTING,
        (_S.QUEUED, _SE.FINISH): _S.HELD,
        (_S.QUEUED, _SE.ABANDON): _S.ABANDONED,
        (_S.COMPUTING, _SE.ADVANCE): _S.COMPUTING,
        (_S.COMPUTING, _SE.FINISH): _S.HELD,
        (_S.COMPUTING, _SE.ABANDON): _S.ABANDONED,
        (_S.HELD, _SE.ABANDON): _S.ABANDONED,
        (_S.HELD, _SE.END): _S.ENDED,
        (_S.ABANDONED, _SE.END): _S.ENDED,
    },
    late={
        (_S.HELD, _SE.ADVANCE),
        (_S.ABANDONED, _SE.ADVANCE),
    },
)

_D, _DE = DeliveryState, DeliveryEvent
DELIVERY_ENDED = frozenset({_D.WRITTEN, _D.FAILED, _D.CANCELLED, _D.FETCHED})
DELIVERY: Table[DeliveryState, DeliveryEvent] = Table(
    {
        (_D.ANNOUNCED, _DE.REGISTER): _D.REGISTERED,
        (_D.ANNOUNCED, _DE.ASK): _D.ASKED,
        (_D.ANNOUNCED, _DE.CANCEL): _D.STOPPING,
        (_D.ANNOUNCED, _DE.STOP): _D.STOPPING,
        (_D.REGISTERED, _DE.COMPLETE): _D.WRITTEN,
        (_D.REGISTERED, _DE.CANCEL): _D.STOPPING,
        (_D.REGISTERED, _DE.STOP): _D.STOPPING,
        (_D.ASKED, _DE.OFFER): _D.LENT,
        (_D.ASKED, _DE.CANCEL): _D.STOPPING,
        (_D.ASKED, _DE.STOP): _D.STOPPING,
        # A reader's `Cancel` says that it is silent: nothing is left to drain.
        (_D.LENT, _DE.FETCHED): _D.FETCHED,
        (_D.LENT, _DE.CANCEL): _D.CANCELLED,
        (_D.LENT, _DE.STOP): _D.RECALLED,
        # It had read everything before it heard that it should stop.
        (_D.RECALLED, _DE.FETCHED): _D.FETCHED,
        (_D.RECALLED, _DE.CANCEL): _D.FAILED,
        (_D.RECALLED, _DE.LAPSE): _D.FAILED,
        (_D.STOPPING, _DE.CANCEL): _D.STOPPING,
        # The last slice lands after its delivery was stopped: the peer hears that everything is in place.
        (_D.STOPPING, _DE.COMPLETE): _D.WRITTEN,
        (_D.STOPPING, _DE.DRAINED_FAILED): _D.FAILED,
        (_D.STOPPING, _DE.DRAINED_CANCELLED): _D.CANCELLED,
    },
    late={
        # A repeated registration changes nothing; what it says was said before.
        (_D.REGISTERED, _DE.REGISTER),
        (_D.STOPPING, _DE.REGISTER),
        (_D.STOPPING, _DE.STOP),
        # So does a repeated question; who was answered is answered again.
        (_D.ASKED, _DE.ASK),
        (_D.LENT, _DE.ASK),
        (_D.RECALLED, _DE.ASK),
        (_D.RECALLED, _DE.STOP),
        # Whoever has ended has an answer, gets it again and is not asked here.
    },
)

_R, _RE = ReceptionState, ReceptionEvent
RECEPTION: Table[ReceptionState, ReceptionEvent] = Table(
    {
        (_R.ANNOUNCED, _RE.RECEIVE): _R.WAITING,
        (_R.ANNOUNCED, _RE.END): _R.ENDED,
        (_R.WAITING, _RE.COMPLETE): _R.ENDED,
        (_R.WAITING, _RE.FAIL): _R.FAILING,
        (_R.FAILING, _RE.FENCED): _R.ENDED,
        (_R.FAILING, _RE.GIVE_UP): _R.QUARANTINED,
        (_R.QUARANTINED, _RE.FENCED): _R.ENDED,
    },
    late={
        (_R.FAILING, _RE.FAIL),
        (_R.QUARANTINED, _RE.FAIL),
    },
)

_P, _PE = PartState, PartEvent
PART_COMPLETE = frozenset({_P.WRITTEN, _P.FETCHED})
PART_READ = frozenset({_P.ASKED, _P.OFFERED, _P.DRAINING})
"""States of a part that is pulled and has not ended."""
PART_ENDED = frozenset({*PART_COMPLETE, _P.FAILED, _P.CANCELLED, _P.LOST})
PART: Table[PartState, PartEvent] = Table(
    {
        (_P.UNTOLD, _PE.TELL): _P.TOLD,
        (_P.UNTOLD, _PE.FAILED): _P.FAILED,
        (_P.UNTOLD, _PE.CANCELLED): _P.CANCELLED,
        (_P.TOLD, _PE.TELL): _P.TOLD,
        (_P.TOLD, _PE.WRITTEN): _P.WRITTEN,
        (_P.TOLD, _PE.FAILED): _P.FAILED,
        (_P.TOLD, _PE.CANCELLED): _P.CANCELLED,
        (_P.TOLD, _PE.LOST): _P.LOST,
        (_P.UNTOLD, _PE.ASK): _P.ASKED,
        (_P.ASKED, _PE.ASK): _P.ASKED,
        (_P.ASKED, _PE.OFFER): _P.OFFERED,
        (_P.ASKED, _PE.FAILED): _P.FAILED,
        (_P.ASKED, _PE.CANCELLED): _P.CANCELLED,
        (_P.ASKED, _PE.STOP): _P.CANCELLED,
        (_P.OFFERED, _PE.FETCHED): _P.FETCHED,
        # Whoever reads is its own fence, whatever the other side says.
        (_P.OFFERED, _PE.FAILED): _P.DRAINING,
        (_P.OFFERED, _PE.CANCELLED): _P.DRAINING,
        (_P.OFFERED, _PE.STOP): _P.DRAINING,
        (_P.DRAINING, _PE.DRAINED): _P.CANCELLED,
    },
    late={
        # Messages repeat, and a fence may follow any other end.
        *((state, event) for state in PART_ENDED for event in (_PE.FAILED, _PE.CANCELLED)),
        *((state, _PE.WRITTEN) for state in PART_ENDED - {_P.FETCHED}),
        *((state, _PE.OFFER) for state in (_P.OFFERED, _P.DRAINING, _P.FETCHED, _P.FAILED, _P.CANCELLED)),
        *((_P.DRAINING, event) for event in (_PE.STOP, _PE.FAILED, _PE.CANCELLED)),
    },
)
