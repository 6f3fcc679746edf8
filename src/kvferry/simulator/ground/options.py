"""What may be chosen of a history besides its seed."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import UsageError

_BOTH_ROLES = "in some seeds of both roles"
_RANKS = "one or two ranks each"
WORLDS: dict[str, str] = {
    "small": f"one prefill engine and one or two decode engines, {_BOTH_ROLES}; {_RANKS}",
    "both": "two or three engines that all prefill and decode; one or two ranks each",
    "wide": f"up to eight prefill engines and up to eight decode engines, {_BOTH_ROLES}; {_RANKS}",
    "tall": f"one or two prefill engines and one or two decode engines, {_BOTH_ROLES}; four ranks each",
    "mixed": f"one or two engines of each kind, {_BOTH_ROLES}; "
    "one to eight ranks each, unequal in parallel sizes, block sizes and stride orders",
    "groups": f"one or two engines of each kind, {_BOTH_ROLES}; unequal as in `mixed`; "
    "a model with sliding windows and one to three cache groups",
    "turns": "two or three engines that all prefill and decode, and keep what they have decoded; "
    "one or two ranks each; prompts that go on, with KV that flows back",
    "long": f"up to three prefill engines and up to three decode engines, {_BOTH_ROLES}; {_RANKS}; "
    "many more requests, for longer",
    "calm": f"one or two engines of each kind, {_BOTH_ROLES}; {_RANKS}; "
    "no faults but clock and parts: all must succeed soon",
}
"""The worlds, each in words; `world.shape` makes them."""

FAULTS: dict[str, str] = {
    "abort": "a client leaves; one engine or both hear of it",
    "agent_breaks": "a rank's agent stops for good; its engine lives on, and is started anew later",
    "clock": "clocks of processes differ, and run at different speeds",
    "close": "an engine is stopped in good order, and comes back or stays away",
    "connection": "a connection between two ranks breaks though both live",
    "crash": "an engine dies with all its processes, and starts again",
    "directory": "finding an engine's ranks takes seconds, or fails for a while, or another engine answers",
    "forward_fails": "a forward pass raises on one rank of a prefill engine, which ends of it",
    "hello_refused": "for a while a prefill rank refuses whoever introduces itself",
    "late_read": "a read ends when its source may have been given away, in several ways",
    "late_write": "a write lands when its request has long been given up, in several ways",
    "leg_late": "one of a request's two legs reaches its engine seconds later",
    "leg_missing": "one of a request's two legs never reaches its engine",
    "limits": "engines are set up differently: other time limits, other slices",
    "longer_prompt": "the decode leg asks for more tokens than were prefilled",
    "mailbox": "a rank's agent thread does not run while its mailbox fills",
    "message_doubled": "a message arrives twice",
    "message_late": "a message arrives late, also behind younger ones",
    "message_lost": "a message never arrives",
    "partition": "nothing gets from one engine to another for a while, one way or both",
    "misfit": "in the world `groups` an engine has another model, or cache sizes that do not fit",
    "parts": "all but the shortest messages travel in several parts",
    "post_broken": "a write or read fails after a part of it has landed",
    "post_failed": "a write or read is refused for good",
    "post_late": "a write or read lands late, but within the transport's bound",
    "post_refused": "a write or read is refused for the moment",
    "post_stalled": "a write or read does not move as long as its peer lives",
    "preempt": "an engine takes a running request's blocks away, and computes it again",
    "replay": "the router sends both legs again under the same id",
    "stale_incarnation": "a decode leg names a start of the prefill engine that is gone",
    "stall_agent": "a rank's agent thread does not run for a while",
    "stall_engine": "an engine's core, or a rank's main thread, does not run for a while",
    "table": "tables and queues have room for a few entries only",
}
"""Kinds of faults, each in words; each can be switched off."""

HARMLESS = frozenset({"clock", "parts"})
"""Kinds that no transfer suffers from; the calm world has no others."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one history.

    Raises:
        UsageError: an unknown world or fault.
    """

    world: str = "small"
    faults: frozenset[str] = frozenset(FAULTS)
    drop: frozenset[int] = frozenset()
    """Numbers of workload items and random faults that are left out; `Outcome.items` names them."""

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        if self.world not in WORLDS:
            raise UsageError(f"world {self.world!r} is unknown; use one of {', '.join(WORLDS)}")
        unknown = sorted(self.faults - set(FAULTS))
        if unknown:
            raise UsageError(f"faults {', '.join(unknown)} are unknown; use some of {', '.join(FAULTS)}")
