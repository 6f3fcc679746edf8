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
    FETCHED = "fetched"
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
    WRITTEN = "written"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """Proven dead, or its connection torn down after its permission had run out."""


class PartEvent(enum.Enum):
    """What happens to a part."""

    TELL = "tell"
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
        (_D.ANNOUNCED, _DE.FETCHED): _D.FETCHED,
        (_D.ANNOUNCED, _DE.CANCEL): _D.STOPPING,
        (_D.ANNOUNCED, _DE.STOP): _D.STOPPING,
        (_D.REGISTERED, _DE.COMPLETE): _D.WRITTEN,
        (_D.REGISTERED, _DE.CANCEL): _D.STOPPING,
        (_D.REGISTERED, _DE.STOP): _D.STOPPING,
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
        # Whoever has an answer gets it again and is not asked here; a fetched one has none.
        *((_D.FETCHED, event) for event in (_DE.REGISTER, _DE.CANCEL, _DE.STOP)),
        *((state, _DE.FETCHED) for state in (*DELIVERY_ENDED, _D.STOPPING)),
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
PART_ENDED = frozenset({_P.WRITTEN, _P.FAILED, _P.CANCELLED, _P.LOST})
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
    },
    # Messages repeat, and a fence may follow any other end.
    late={(state, event) for state in PART_ENDED for event in (_PE.WRITTEN, _PE.FAILED, _PE.CANCELLED)},
)
