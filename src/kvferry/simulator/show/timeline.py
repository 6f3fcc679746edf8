"""One transfer's life, taken out of a whole history. `picture` draws it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from kvferry.errors import UsageError
from kvferry.ids import PeerName, TransferId, redacted
from kvferry.protocol import commands as cmd
from kvferry.protocol import messages as msg
from kvferry.simulator.ground import events as ev
from kvferry.simulator.ground.outcome import Violation, broken_words, findings, plain
from kvferry.simulator.show.fold import fold
from kvferry.simulator.show.story import (
    NETWORK,
    ROUTER,
    Arrow,
    Cast,
    Kind,
    Mark,
    Story,
    Stretch,
    speaks_of,
    transfers_of,
)
from kvferry.simulator.watch.trace import MessageReader, block_words, described, fault_word, whole
from kvferry.transport.base import PostState


class Recorder:
    """An observer that keeps everything: for one history that somebody wants to look at."""

    def __init__(self) -> None:
        self.events: list[ev.Observed] = []

    def observe(self, event: ev.Observed) -> None:
        """Keep one event."""
        self.events.append(event)


def choose(
    events: Sequence[ev.Observed], violations: Sequence[Violation], wanted: str | None = None
) -> TransferId:
    """The transfer to draw: the one wanted, else the one that was violated, else the most troubled one.

    Raises:
        UsageError: the wanted one is not in the history, or the history has none.
    """
    named = Counter(transfer for event in events for transfer in transfers_of(event))
    if not named:
        raise UsageError("this history has no transfer to draw; choose another seed or drop less")
    if wanted is not None:
        return _meant(wanted, sorted(named))
    for violation in violations:
        spoken_of = next((one for one in named if _names(violation, one)), None)
        if spoken_of is not None:
            return spoken_of
        earlier = [event for event in events if event.at_seconds <= violation.at_seconds]
        last = next((transfers_of(event)[-1] for event in reversed(earlier) if transfers_of(event)), None)
        if last is not None:
            return last
    faults = Counter(
        transfer
        for event in events
        if isinstance(event, ev.FaultInjected)
        for transfer in transfers_of(event)
    )
    return max(sorted(named), key=lambda transfer: (faults[transfer], named[transfer]))


def _meant(wanted: str, known: Sequence[TransferId]) -> TransferId:
    """The transfer with that id, or the only one whose id begins so."""
    if TransferId(wanted) in known:
        return TransferId(wanted)
    meant = [one for one in known if one.startswith(wanted)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise UsageError(f"--transfer {wanted} may be any of {', '.join(meant)}; name more of it")
    raise UsageError(f"--transfer {wanted} is not in this history; it has {', '.join(known)}")


def story(events: Sequence[ev.Observed], transfer: TransferId, violations: Iterable[Violation] = ()) -> Story:
    """What happened to one transfer."""
    cast = Cast(events, transfer)
    told = Story(transfer, cast.lanes)
    takes = {**_Engines(told, cast).takes, **_Network(told, cast).takes}
    zones = _LandingZones()
    takes[ev.Posted] = partial(takes[ev.Posted], zones)
    takes[ev.FabricFault] = partial(takes[ev.FabricFault], zones)
    for event in events:
        zones.take(event)
        take = takes.get(type(event))
        if take is not None:
            take(event)
    told.marks += _violation_marks(events, transfer, violations)
    fold(told)
    return told


def _violation_marks(
    events: Sequence[ev.Observed], transfer: TransferId, violations: Iterable[Violation]
) -> Iterator[Mark]:
    """Of the findings that name the transfer, or none; what follows from one is one mark, at the end."""
    others = {one for event in events for one in transfers_of(event)} - {transfer}
    end = events[-1].at_seconds
    for finding in findings(tuple(violations)):
        every = (finding.violation, *finding.consequences)
        ours = [one for one in every if _names(one, transfer)]
        nobodys = not any(_names(finding.violation, other) for other in others)
        if not ours and not nobodys:
            continue
        shown = finding.violation if nobodys else ours[0]
        what = f"{broken_words(shown.promise)}: {plain(shown.what)}"
        yield Mark(None, min(shown.at_seconds, end), Kind.VIOLATION, "", what, bool(ours))
        if finding.consequences:
            count = len(finding.consequences)
            more = f"unfinished as well at the end: {count} more"
            yield Mark(None, end, Kind.VIOLATION, "", more, bool(ours))
        if shown.unfinished:
            yield from _deadline_marks(events)


def _deadline_marks(events: Sequence[ev.Observed]) -> Iterator[Mark]:
    for event in events:
        if isinstance(event, ev.Healed) and event.deadline_seconds <= events[-1].at_seconds:
            note = "everything should have ended by now"
            yield Mark(None, event.deadline_seconds, Kind.DEADLINE, "", note)


def _names(violation: Violation, transfer: TransferId) -> bool:
    whole_id = re.compile(rf"(?<!\w){re.escape(transfer)}(?!\w)")
    return redacted(transfer) in violation.what or whole_id.search(violation.what) is not None


Take = Callable[..., None]
_ASKING = msg.Announce | msg.Register | msg.Fetch | msg.Renew | msg.Cancel | msg.Fetched
LIVES = frozenset({Kind.LEASE, Kind.REGISTRATION, Kind.QUARANTINE})
"""As long as one of these is open, the ranks still have to do with the transfer."""


class _LandingZones:
    """Whose registration each block of a rank last was."""

    def __init__(self) -> None:
        self._owner: dict[tuple[PeerName, int], TransferId] = {}

    def take(self, event: ev.Observed) -> None:
        """Learn from registrations."""
        if isinstance(event, ev.Commanded) and isinstance(event.command, cmd.Receive):
            for first, count in (span for group in event.command.groups for span in group):
                for block in range(first, first + count):
                    self._owner[event.rank, block] = event.command.transfer

    def owners(self, rank: PeerName, blocks: Iterable[int]) -> set[TransferId | None]:
        """Whose they are."""
        return {self._owner.get((rank, block)) for block in blocks}


class _Engines:
    """What happens on the router and on the engines that take part."""

    def __init__(self, story: Story, cast: Cast) -> None:
        self._story, self._cast = story, cast
        self._open: dict[tuple[str, str], Stretch] = {}
        self.takes: dict[type[ev.Observed], Take] = {
            ev.LegSent: self._leg,
            ev.Commanded: self._commanded,
            ev.Reported: self._reported,
            ev.DecodeStarted: self._decoding,
            ev.DecodeEnded: self._decoded,
            ev.RequestEnded: self._ended,
            ev.EngineCrashed: self._crashed,
            ev.EngineStarted: self._started,
            ev.FaultInjected: self._fault,
            ev.Healed: self._healed,
        }

    # --- requests --------------------------------------------------------------------------------

    def _leg(self, event: ev.LegSent) -> None:
        if event.transfer != self._story.transfer:
            return
        leg = "prefill leg" if event.consumer is None else "decode leg"
        at = event.at_seconds
        arrow = Arrow(ROUTER, event.engine, at, Kind.REQUEST, leg, f"{leg}: {event.request}", stop_seconds=at)
        self._story.arrows.append(arrow)
        self._begin(event.engine, event.request, at, Kind.REQUEST, event.request, f"request {event.request}")

    def _decoding(self, event: ev.DecodeStarted) -> None:
        if (event.engine, event.request) in self._open:
            note = f"request {event.request} decodes from {event.tokens} tokens"
            self._mark(event.engine, event.at_seconds, Kind.RESULT, "decodes", note)

    def _decoded(self, event: ev.DecodeEnded) -> None:
        if (event.engine, event.request) not in self._open:
            return
        word = "preempted" if event.preempted else "ends"
        self._mark(event.engine, event.at_seconds, Kind.RESULT, word, f"request {event.request} {word}")
        if not event.preempted:
            self._finish(event.engine, event.request, event.at_seconds)

    def _ended(self, event: ev.RequestEnded) -> None:
        if event.transfer == self._story.transfer:
            note = f"the part of request {event.request} ends: {event.outcome}"
            self._mark(event.engine, event.at_seconds, Kind.RESULT, event.outcome, note)
            if event.consumer is None:
                self._finish(event.engine, event.request, event.at_seconds)

    # --- commands and results --------------------------------------------------------------------

    def _commanded(self, event: ev.Commanded) -> None:
        command = event.command
        if self._story.transfer not in transfers_of(event):
            return
        lane, at = self._cast.lane_of[event.rank], event.at_seconds
        self._mark(lane, at, Kind.COMMAND, _short(command), described(command))
        match command:
            case cmd.Expect() | cmd.Advance():
                self._begin(lane, "lease", at, Kind.LEASE, "held", "source blocks are the rank's")
            case cmd.Receive():
                label = f"{command.consumer} [{command.start}, {command.stop})"
                self._begin(lane, command.consumer, at, Kind.REGISTRATION, label, described(command))
            case _:
                pass

    def _reported(self, event: ev.Reported) -> None:
        result = event.result
        if self._story.transfer not in transfers_of(event):
            return
        lane, at = self._cast.lane_of[event.rank], event.at_seconds
        self._mark(lane, at, Kind.RESULT, _short(result), described(result))
        match result:
            case cmd.Released():
                self._finish(lane, "lease", at)
            case cmd.ReceiveFailed(fenced=False):
                self._finish(lane, result.consumer, at)
                self._begin(lane, result.consumer, at, Kind.QUARANTINE, "quarantine", result.reason)
            case cmd.Received() | cmd.ReceiveFailed() | cmd.BlocksSafe():
                self._finish(lane, result.consumer, at)
            case _:
                pass

    # --- what hits everybody ---------------------------------------------------------------------

    def _crashed(self, event: ev.EngineCrashed) -> None:
        if event.engine not in self._cast.engines:
            return
        ours = [key for key in self._open if key[0].partition("/")[0] == event.engine]
        note = f"{event.engine} crashes"
        self._story.marks.append(
            Mark(event.engine, event.at_seconds, Kind.FAULT, "crash", note, ours=bool(ours))
        )
        for lane, key in ours:
            self._finish(lane, key, event.at_seconds)

    def _started(self, event: ev.EngineStarted) -> None:
        if event.engine in self._cast.engines:
            note = f"{event.engine} starts"
            mark = Mark(event.engine, event.at_seconds, Kind.RESULT, "starts", note, ours=False)
            self._story.marks.append(mark)

    def _fault(self, event: ev.FaultInjected) -> None:
        ours = self._story.transfer in event.transfers
        if ours or not event.transfers:
            note = f"{event.kind}: {plain(event.what)}"
            self._story.marks.append(Mark(None, event.at_seconds, Kind.FAULT, "", note, ours))

    def _healed(self, event: ev.Healed) -> None:
        note = f"faults stop here; everything must end by {event.deadline_seconds:.3f} s of the history"
        self._story.marks.append(Mark(None, event.at_seconds, Kind.RESULT, "", note, ours=False))

    # --- marks and stretches ---------------------------------------------------------------------

    def _mark(self, lane: str, at: float, kind: Kind, label: str, note: str) -> None:
        self._story.marks.append(Mark(lane, at, kind, label, note))

    def _begin(self, lane: str, key: str, at: float, kind: Kind, label: str, note: str) -> None:
        if (lane, key) not in self._open:
            bar = Stretch(lane, at, None, kind, label, note)
            self._open[lane, key] = bar
            self._story.stretches.append(bar)

    def _finish(self, lane: str, key: str, at: float) -> None:
        bar = self._open.pop((lane, key), None)
        if bar is not None:
            bar.stop_seconds = at


class _Network:
    """What moves between the ranks that take part: slices, messages and the permissions that they bring."""

    def __init__(self, story: Story, cast: Cast) -> None:
        self._story, self._cast = story, cast
        self._reader = MessageReader()
        self._posts: dict[tuple[PeerName, int], Stretch] = {}
        self._travelling: dict[int, Arrow] = {}
        self._permits: dict[int, float] = {}
        """When the permission ends that a message gives."""
        self._marked: dict[tuple[PeerName, float], float] = {}
        """When a producer rank made a mark, in the history's time; the mark itself is in the rank's own."""
        self._permissions: dict[str, Stretch] = {}
        self.takes: dict[type[ev.Observed], Take] = {
            ev.Posted: self._posted,
            ev.Landed: self._landed,
            ev.PostEnded: self._post_ended,
            ev.MessageSent: self._sent,
            ev.MessageEnded: self._message_ended,
            ev.FabricFault: self._fault,
        }

    # --- slices ----------------------------------------------------------------------------------

    def _posted(self, zones: _LandingZones, event: ev.Posted) -> None:
        ours = self._story.transfer in zones.owners(event.target, event.target_blocks)
        if not ours or event.rank not in self._cast.lane_of:
            return
        source, target = block_words(event.source_blocks), block_words(event.target_blocks)
        note = f"post {event.handle}, {self._ends(event)}: blocks [{source}] into [{target}]"
        bar = Stretch(NETWORK, event.at_seconds, None, Kind.POST, f"{event.handle}", note)
        self._posts[event.rank, event.handle] = bar
        self._story.stretches.append(bar)

    def _landed(self, event: ev.Landed) -> None:
        bar = self._posts.get((event.rank, event.handle))
        if bar is not None:
            bar.ticks.append(event.at_seconds)

    def _post_ended(self, event: ev.PostEnded) -> None:
        bar = self._posts.get((event.rank, event.handle))
        if bar is not None:
            bar.stop_seconds = event.at_seconds
            if event.state is PostState.FAILED:
                bar.kind = Kind.BROKEN_POST

    # --- messages --------------------------------------------------------------------------------

    def _sent(self, event: ev.MessageSent) -> None:
        message = self._reader.read(event.rank, event.target, event.payload)
        if isinstance(message, msg.Status) and message.mark is not None:
            self._marked[event.rank, message.mark] = event.at_seconds
        if message is None or not self._concerns(event, message):
            return
        lanes = self._cast.lane_of
        asks = isinstance(message, _ASKING)
        kind = Kind.ASKS if asks else Kind.ANSWERS
        label, note = type(message).__name__, described(message)
        arrow = Arrow(lanes[event.rank], lanes[event.target], event.at_seconds, kind, label, note)
        self._travelling[event.number] = arrow
        self._story.arrows.append(arrow)
        if isinstance(message, msg.Register | msg.Renew) and message.mark is not None:
            made = self._marked.get((event.target, message.mark), event.at_seconds)
            self._permits[event.number] = made + message.write_seconds

    def _concerns(self, event: ev.MessageSent, message: msg.AnyMessage) -> bool:
        if isinstance(message, msg.Hello | msg.HelloRefused):
            # Of a link's life, what falls into the transfer's.
            lives = any(bar.stop_seconds is None and bar.kind in LIVES for bar in self._story.stretches)
            return lives and self._cast.plays(event.rank, event.target)
        return self._cast.plays(event.rank, event.target) and speaks_of(message, self._story.transfer)

    def _message_ended(self, event: ev.MessageEnded) -> None:
        arrow = self._travelling.get(event.number)
        if arrow is None:
            return
        if not event.arrived:
            arrow.lost_seconds = event.at_seconds
            return
        if arrow.stop_seconds is not None:
            # A doubled message: its second copy is an arrow of its own.
            arrow = Arrow(arrow.source, arrow.target, arrow.start_seconds, arrow.kind, "", arrow.note)
            self._story.arrows.append(arrow)
        arrow.stop_seconds = event.at_seconds
        if event.number in self._permits:
            self._permit(arrow.target, event.at_seconds, self._permits[event.number])

    def _permit(self, lane: str, at: float, end: float) -> None:
        """A registration or renewal that reached the producer lets it write until `end`."""
        if end <= at:
            return
        running = self._permissions.get(lane)
        if running is not None and running.stop_seconds is not None and running.stop_seconds >= at:
            running.stop_seconds = max(running.stop_seconds, end)
            running.ticks.append(at)
            return
        note = "writes allowed so long after the producer's mark; a line is a renewal"
        bar = Stretch(lane, at, end, Kind.PERMISSION, "permission", note)
        self._permissions[lane] = bar
        self._story.stretches.append(bar)

    # --- faults ----------------------------------------------------------------------------------

    def _fault(self, zones: _LandingZones, event: ev.FabricFault) -> None:
        if not self._cast.plays(event.rank, event.target):
            return
        what = "a post"
        ours = self._story.transfer in zones.owners(event.owner, event.target_blocks)
        if event.payload:
            message = whole(event.payload)
            what = type(message).__name__ if message is not None else "a part of a message"
            ours = message is not None and speaks_of(message, self._story.transfer)
        if ours:
            note = f"{fault_word(event.fault)}: {what}, {self._ends(event)}"
            self._story.marks.append(Mark(None, event.at_seconds, Kind.FAULT, "", note))

    def _ends(self, event: ev.Posted | ev.FabricFault) -> str:
        lanes = self._cast.lane_of
        if event.read:
            source = event.source if isinstance(event, ev.Posted) else event.target
            return f"{lanes[event.rank]} reads from {lanes.get(source, source)}"
        return f"{lanes[event.rank]} to {lanes.get(event.target, event.target)}"


def _short(value: cmd.Command | cmd.Result) -> str:
    match value:
        case cmd.AnnounceCommand():
            return "Announce"
        case cmd.Advance():
            return f"Advance {value.frontier}"
        case cmd.ReceiveFailed():
            return f"ReceiveFailed at {value.valid_until}"
        case _:
            return type(value).__name__
