"""How a consumer rank that reads asks for blocks, stops, and says that it is silent.

Whoever reads is its own fence: a destination is safe when none of our READs into it is in flight. The
producer hears `Fetched` or `Cancel` then, and again until it answers or its lease must have ended.
"""

from __future__ import annotations

from kvferry.ids import PeerName
from kvferry.protocol.messages import Cancel, Fetch, Fetched
from kvferry.protocol.outputs import Send
from kvferry.protocol.reasons import CANCELLED
from kvferry.protocol.receptions import ConsumerState, Farewell, FarewellKey, Part, Reception
from kvferry.protocol.states import PART, PART_READ, PartEvent, PartState

FAREWELLS_MAX = 4096
"""Farewells that wait for their answer; beyond it the oldest is not repeated any more."""


def ask(state: ConsumerState, row: Reception, part: Part, now: float) -> None:
    """Ask one producer rank for its blocks, again if need be."""
    part.state = PART.next(part.state, PartEvent.ASK)
    fetch = Fetch(
        transfer=row.transfer,
        consumer=row.consumer,
        attempt=row.attempt,
        start=row.start,
        stop=row.asked_of(part)[0],
        asked=now,
        sharers=part.link.sharers,
    )
    state.outputs.append(Send(part.link.peer, fetch))


def cancel_of(row: Reception, part: Part) -> Cancel:
    """That we want nothing more of a rank; of one that we read, that we are silent."""
    return Cancel(
        transfer=row.transfer,
        consumer=row.consumer,
        attempt=row.attempt,
        reason=row.reason or CANCELLED,
        sharers=part.link.sharers,
    )


def stop(state: ConsumerState, row: Reception, part: Part, now: float) -> None:
    """Read nothing more; the producer hears so when nothing is in flight."""
    assert part.state in PART_READ, "only what is read is stopped"
    turns = state.turns.get(part.link.peer)
    if turns is not None:
        turns.ready.pop(row.key, None)
        tidy(state, part.link.peer)
    state.retry_timers.cancel((row.key, part.link.peer))
    part.state = PART.next(part.state, PartEvent.STOP)
    if part.reading is not None:
        part.reading.retries.clear()
    if part.state is PartState.CANCELLED:
        # Its offer may be under way.
        say(state, part.link.peer, cancel_of(row, part), now)
    elif part.reading is not None and not part.reading.in_flight:
        part.state = PART.next(part.state, PartEvent.DRAINED)
        say(state, part.link.peer, cancel_of(row, part), now)


def say(state: ConsumerState, peer: PeerName, message: Cancel | Fetched, now: float) -> None:
    """Tell a producer rank that we are silent, until it answers."""
    key = (peer, message.transfer, message.consumer, message.attempt)
    state.farewells[key] = Farewell(message, now + state.limits.lease_seconds)
    state.farewell_timers.set(key, now + state.limits.renew_seconds)
    state.outputs.append(Send(peer, message))
    while len(state.farewells) > FAREWELLS_MAX:
        oldest, _ = state.farewells.popitem(last=False)
        state.farewell_timers.cancel(oldest)
        state.count("farewell_dropped")


def repeat(state: ConsumerState, key: FarewellKey, now: float) -> None:
    """It has not been answered; after the lease nobody waits for it any more."""
    farewell = state.farewells[key]
    if now >= farewell.until:
        del state.farewells[key]
        return
    state.farewell_timers.set(key, min(now + state.limits.renew_seconds, farewell.until))
    state.outputs.append(Send(key[0], farewell.message))


def answered(state: ConsumerState, key: FarewellKey) -> bool:
    """Whether a fence answers a farewell of ours, which is not repeated then."""
    state.farewell_timers.cancel(key)
    return state.farewells.pop(key, None) is not None


def tidy(state: ConsumerState, peer: PeerName) -> None:
    """Nobody takes turns for nothing."""
    turns = state.turns.get(peer)
    if turns is not None and not turns.ready and not turns.in_flight:
        del state.turns[peer]
