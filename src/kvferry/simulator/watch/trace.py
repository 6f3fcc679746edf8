"""What a history was, twice: a hash over every event, and lines for people.

The hash is cheap and taken of every history: two runs that differ anywhere have different hashes.
The lines are made only when somebody wants to read them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import chain

import msgspec

from kvferry.errors import PeerError
from kvferry.ids import PeerName
from kvferry.protocol.codec import Decoder, is_part
from kvferry.protocol.commands import Command, Result, Source
from kvferry.protocol.messages import AnyMessage, Hello
from kvferry.simulator.ground import events as ev
from kvferry.simulator.ground.outcome import plain
from kvferry.transport.faults import MessageFault, PostFault

DIGEST_BYTES = 16
MESSAGE_BYTES_MAX = 1 << 24


class TraceHash:
    """An observer that hashes every event in order; the hash is the same in every process."""

    def __init__(self) -> None:
        self.events = 0
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._encode = msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic").encode

    def observe(self, event: ev.Observed) -> None:
        """Add one event.

        Raises:
            TypeError: it holds something that has no stable bytes.
        """
        self.events += 1
        inner = ""
        # A struct is encoded by its fields alone, and two commands may have the same ones.
        if type(event) is ev.Commanded:
            inner = type(event.command).__name__
        elif type(event) is ev.Reported:
            inner = type(event.result).__name__
        self._hash.update(self._encode((type(event).__name__, inner, event)))

    def hexdigest(self) -> str:
        """Of everything so far."""
        return self._hash.hexdigest()


class TraceLines:
    """An observer that turns every event into one line: virtual seconds, who, what."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._messages = MessageReader()
        self._kinds: dict[int, str] = {}
        """What each message that was sent is."""

    def observe(self, event: ev.Observed) -> None:
        """Add one line."""
        where, what = self._words(event)
        self.lines.append(line(event.at_seconds, where, what))

    def _words(self, event: ev.Observed) -> tuple[str, str]:
        if isinstance(event, ev.MessageSent):
            message = self._messages.read(event.rank, event.target, event.payload)
            # Which of its parts makes a message whole is seen where they arrive.
            is_whole = message is not None and not is_part(event.payload)
            self._kinds[event.number] = type(message).__name__ if is_whole else "part"
            text = described(message)
            return rank_words(event.rank), f"sends {event.number} to {rank_words(event.target)}: {text}"
        if isinstance(event, ev.MessageEnded):
            what = "arrives" if event.arrived else "is lost"
            kind = self._kinds.get(event.number, "message")
            return rank_words(event.target), f"{kind} {event.number} of {rank_words(event.rank)} {what}"
        make = _WORDS.get(type(event))
        return make(event) if make is not None else ("", repr(event))


def line(at_seconds: float, where: str, what: str) -> str:
    """One line of a trace."""
    return f"{at_seconds:11.6f}  {where:<20}  {what}".rstrip()


class MessageReader:
    """Decodes what travels; a message in parts is told with its last one."""

    def __init__(self) -> None:
        self._decoders: dict[tuple[PeerName, PeerName], Decoder] = {}

    def read(self, rank: PeerName, target: PeerName, payload: bytes) -> AnyMessage | None:
        """The message, or None where it is not whole or not readable."""
        decoder = self._decoders.setdefault((rank, target), Decoder(MESSAGE_BYTES_MAX))
        try:
            return decoder.decode(rank, payload)
        except PeerError:
            return None


def whole(payload: bytes) -> AnyMessage | None:
    """The message of a payload, or None where that is only a part of one, or not readable."""
    nobody = PeerName("")
    return MessageReader().read(nobody, nobody, payload)


def rank_words(name: PeerName) -> str:
    """A rank's name without what is the same for every rank."""
    head, _, rest = name.partition("/")
    return rest.replace("/pp0/", "/") if head == "kvferry" and rest else name


def fault_word(fault: str) -> str:
    """The name by which a fault of the network can be chosen; what has none keeps its own."""
    return _FABRIC_FAULTS.get(fault, fault)


def described(value: Command | Result | AnyMessage | None) -> str:
    """A command, result or message in one line."""
    if value is None:
        return "something unreadable, or a part of a long message"
    if isinstance(value, Hello):
        return f"Hello engine={value.engine} incarnation={value.incarnation} pp={value.pp} tp={value.tp}"
    shown = [
        f"{name}={_value(name, getattr(value, name))}"
        for name in value.__struct_fields__
        if getattr(value, name) not in (None, ())
    ]
    return " ".join([type(value).__name__, *shown])


def block_words(blocks: Iterable[int]) -> str:
    """Block ids as runs: `3-5 9`."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return " ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs) or "none"


def _value(name: str, value: object) -> str:
    match value:
        case Source():
            return f"{value.engine}/{value.incarnation or 'any'}"
        case tuple() if name in {"groups", "blocks"}:
            runs = [range(first, first + count) for group in value for first, count in group]
            return f"[{block_words(block for run in runs for block in run)}]"
        case float():
            return f"{value:.6g}"
        case tuple():
            return f"({', '.join(_value('', item) for item in value)})"
        case msgspec.Struct():
            return "/".join(_value("", getattr(value, field)) for field in value.__struct_fields__)
        case bytes():
            return f"<{len(value)} bytes>"
        case _:
            return str(value)


def _plain(value: object) -> object:
    """Numbers of numpy as our own."""
    item: Callable[[], object] | None = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", None) == 0:
        return item()
    raise TypeError(f"an event holds a {type(value).__name__}, which has no stable bytes; use a tuple")


Words = tuple[str, str]
_FABRIC_FAULTS = {
    MessageFault.LOSE.value: "message_lost",
    MessageFault.DOUBLE.value: "message_doubled",
    MessageFault.DELAY.value: "message_late",
    PostFault.REFUSE.value: "post_refused",
    PostFault.FAIL.value: "post_failed",
    PostFault.BREAK.value: "post_broken",
    PostFault.STALL.value: "post_stalled",
    "delay_post": "post_late",
}


def _started(event: ev.EngineStarted) -> Words:
    return event.engine, f"starts: {event.block_count} blocks, {', '.join(map(rank_words, event.ranks))}"


def _crashed(event: ev.EngineCrashed) -> Words:
    return event.engine, f"crashes: {', '.join(map(rank_words, event.ranks))}"


def _commanded(event: ev.Commanded) -> Words:
    return rank_words(event.rank), f"<- {described(event.command)}"


def _reported(event: ev.Reported) -> Words:
    return rank_words(event.rank), f"-> {described(event.result)}"


def _posted(event: ev.Posted) -> Words:
    source, target = block_words(event.source_blocks), block_words(event.target_blocks)
    way = f"to {rank_words(event.target)}" if not event.read else f"to read from {rank_words(event.source)}"
    what = f"posts {event.handle} {way}: blocks [{source}] into [{target}]"
    return rank_words(event.rank), what


def _landed(event: ev.Landed) -> Words:
    return rank_words(event.target), f"a piece of post {event.handle} of {rank_words(event.rank)} lands"


def _post_ended(event: ev.PostEnded) -> Words:
    what = f"sees post {event.handle} to {rank_words(event.target)} {event.state.value}"
    return rank_words(event.rank), what


def _leg(event: ev.LegSent) -> Words:
    leg = "the prefill leg" if event.consumer is None else f"the decode leg {event.consumer}"
    return "router", f"sends {leg} of {event.transfer} to {event.engine} as {event.request}"


def _taken(event: ev.BlocksTaken) -> Words:
    return event.engine, f"blocks [{block_words(sorted(event.blocks))}] taken by {event.owner}"


def _returned(event: ev.BlocksReturned) -> Words:
    return event.engine, f"blocks [{block_words(sorted(event.blocks))}] free"


def _decoding(event: ev.DecodeStarted) -> Words:
    used = f"{event.tokens} tokens of prompt {event.prompt} in [{block_words(chain(*event.blocks))}]"
    return event.engine, f"request {event.request} decodes: {used}"


def _decoded(event: ev.DecodeEnded) -> Words:
    return event.engine, f"request {event.request} {'is preempted' if event.preempted else 'leaves'}"


def _ended(event: ev.RequestEnded) -> Words:
    side = "producer" if event.consumer is None else f"consumer {event.consumer}"
    return event.engine, f"request {event.request} of {event.transfer} ends ({side}): {event.outcome}"


def _item(event: ev.ItemBegan) -> Words:
    return f"ITEM {event.number}", event.what


def _fault(event: ev.FaultInjected) -> Words:
    hits = f" (hits {', '.join(event.transfers)})" if event.transfers else ""
    return "FAULT", f"{event.kind}: {plain(event.what)}{hits}"


def _fabric(event: ev.FabricFault) -> Words:
    what = f"a post into [{block_words(event.target_blocks)}]"
    if event.payload:
        what = described(whole(event.payload))
    ends = f"{rank_words(event.rank)} to {rank_words(event.target)}"
    return "FAULT", f"{fault_word(event.fault)}, {ends}: {what}"


def _healed(event: ev.Healed) -> Words:
    return "HEALED", f"faults stop; everything must end by {event.deadline_seconds:.6f}"


# Each function takes the one class that it stands for.
_WORDS: dict[type[ev.Observed], Callable[..., Words]] = {
    ev.EngineStarted: _started,
    ev.EngineCrashed: _crashed,
    ev.Commanded: _commanded,
    ev.Reported: _reported,
    ev.Posted: _posted,
    ev.Landed: _landed,
    ev.PostEnded: _post_ended,
    ev.ItemBegan: _item,
    ev.LegSent: _leg,
    ev.BlocksTaken: _taken,
    ev.BlocksReturned: _returned,
    ev.DecodeStarted: _decoding,
    ev.DecodeEnded: _decoded,
    ev.RequestEnded: _ended,
    ev.FaultInjected: _fault,
    ev.FabricFault: _fabric,
    ev.Healed: _healed,
}
