"""Scenarios as text: commands to a pair of cores, and what the cores do about them.

A file starts with a paragraph on what it shows. A line that starts with `> ` is a command, a line that
starts with `#` a remark; the lines below a command are its output. The runner writes the file anew, and a
difference is either a bug or, after a review, a new expectation.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.handoff import TransferMode
from kvferry.ids import PeerName
from kvferry.protocol.commands import BlocksSafe, Drained, Received, ReceiveFailed, Released
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import (
    Cancel,
    Failed,
    Fetch,
    Landed,
    Message,
    Offer,
    Register,
    Renew,
    Status,
    TransferStatus,
    Written,
)
from kvferry.protocol.outputs import PostSlice
from tests.support.pair import Pair

_LIMITS = set(Limits.__struct_fields__)


def rewrite(text: str) -> str:
    """Run a transcript; returns it with the output that the cores give now."""
    stage = _Stage()
    lines: list[str] = []
    in_output = False
    for line in text.splitlines():
        if line.startswith("> "):
            lines += [line, *stage.run(line[2:])]
            in_output = True
        elif not line or line.startswith("#") or not in_output:
            lines.append(line)
            in_output = in_output and bool(line)
    return "\n".join(lines) + "\n"


class _Stage:
    """The pair of one transcript. `world`, the first command, makes it."""

    def __init__(self) -> None:
        self._pair: Pair | None = None
        self._lines: list[str] = []

    def run(self, line: str) -> list[str]:
        """Carry out a command; returns what happened."""
        self._lines = []
        verb, *words = shlex.split(line)
        options: dict[str, Any] = {}
        plain: list[str | int] = []
        for word in words:
            name, is_option, value = word.partition("=")
            if is_option:
                options[name] = float(value) if "." in value else int(value) if value.isdigit() else value
            else:
                plain.append(int(word) if word.isdigit() else word)
        getattr(self, f"_do_{verb}")(*plain, **options)
        return self._lines

    @property
    def _world(self) -> Pair:
        assert self._pair is not None, "a transcript starts with `world`"
        return self._pair

    def _do_world(self, **options: Any) -> None:
        limits = Limits(**{name: value for name, value in options.items() if name in _LIMITS})
        rest = {name: value for name, value in options.items() if name not in _LIMITS}
        self._pair = Pair(limits=limits, **rest)
        self._pair.describe = described
        self._pair.trace = self._lines_append

    def _lines_append(self, line: str) -> None:
        self._lines.append(f"  {line}")

    def _do_expect(self, transfer: str, tokens: int, consumers: int = 1) -> None:
        self._world.expect(transfer, tokens, consumers)

    def _do_compute(self, transfer: str, frontier: int) -> None:
        self._world.compute(transfer, frontier)

    def _do_finish(self, transfer: str, keep: float | None = None) -> None:
        self._world.finish(transfer, keep)

    def _do_abandon(self, transfer: str, reason: str) -> None:
        self._world.abandon(transfer, reason)

    def _do_reclaim(self, transfer: str) -> None:
        self._world.reclaim(transfer)

    def _do_preempt(self, *transfers: str) -> None:
        self._world.preempt(*transfers)

    def _do_announce(self, transfer: str, consumer: str = "c0", at: str = "d0") -> None:
        self._world.announce(transfer, consumer, at)

    def _do_receive(
        self,
        transfer: str,
        stop: int,
        start: int = 0,
        consumer: str = "c0",
        at: str = "d0",
        mode: TransferMode = "push",
        patient: int = 1,
        recent: int = 0,
    ) -> None:
        pair = self._world
        blocks = pair.receive(
            transfer, stop, start, consumer, at, mode, patient=bool(patient), recent=bool(recent)
        ).blocks
        self._lines.insert(0, f"  {at} allocates {blocks}")

    def _do_withdraw(
        self, transfer: str, consumer: str = "c0", at: str = "d0", reason: str = "client left"
    ) -> None:
        self._world.withdraw(transfer, consumer, at, reason)

    def _do_relinquish(self, transfer: str, consumer: str = "c0", at: str = "d0") -> None:
        self._world.relinquish(transfer, consumer, at)

    def _do_complete(self, *numbers: int, producer: str = "p0") -> None:
        self._world.complete(*numbers, producer=producer)

    def _do_fail(
        self, number: int, producer: str = "p0", reason: str = "post refused", retry: int = 0
    ) -> None:
        self._world.fail(number, producer, reason=reason, retry=bool(retry))

    def _do_read(self, *numbers: int, at: str = "d0") -> None:
        """READs end well, all in flight unless told which."""
        pair = self._world
        pair.complete(*(numbers or [number for who, number in pair.flights if who == at]), producer=at)

    def _do_read_fail(
        self, number: int, at: str = "d0", reason: str = "remote disconnect", retry: int = 0
    ) -> None:
        self._world.fail(number, at, reason=reason, retry=bool(retry))

    def _do_advance(self, seconds: str | int) -> None:
        """Time passes; each moment at which something happened is named."""
        until = self._world.now + float(seconds)
        started, lines = self._world.now, self._lines
        collected: list[str] = []
        while self._world.now < until:
            due = [when for when in self._world.due() if when < until]
            self._lines = []
            self._world.advance_to(min(due, default=until))
            if self._lines:
                collected.append(f"  after {round(self._world.now - started, 3):g} s")
                collected += self._lines
        self._lines = lines + collected

    def _do_hold(self, sender: str, receiver: str) -> None:
        self._world.held.add((PeerName(sender), PeerName(receiver)))

    def _do_release(self, sender: str, receiver: str) -> None:
        self._world.held.discard((PeerName(sender), PeerName(receiver)))
        self._world.run()

    def _do_deliver(self, sender: str, receiver: str, at: int = 0) -> None:
        wire = (PeerName(sender), PeerName(receiver))
        self._lines_append(f"{receiver} reads {described(self._world.wires[wire][at])}")
        self._world.deliver(wire, at)

    def _do_double(self, sender: str, receiver: str, at: int = 0) -> None:
        self._world.double((PeerName(sender), PeerName(receiver)), at)

    def _do_cut(self, sender: str, receiver: str) -> None:
        self._world.cut.add((PeerName(sender), PeerName(receiver)))

    def _do_mend(self, sender: str, receiver: str) -> None:
        self._world.cut.discard((PeerName(sender), PeerName(receiver)))

    def _do_hold_handshake(self) -> None:
        self._world.resolve_held = True

    def _do_handshake(self, failure: str = "") -> None:
        if failure:
            self._world.unresolve(failure)
        else:
            self._world.resolve()

    def _do_lose(self, producer: str, consumer: str) -> None:
        self._world.lose(producer, consumer)

    def _do_break_link(self, producer: str, consumer: str) -> None:
        self._world.break_link(producer, consumer)

    def _do_kill(self) -> None:
        self._world.kill()

    def _do_hold_inquiry(self) -> None:
        self._world.inquire_held = True

    def _do_inquire(self, evidence: int = 1) -> None:
        self._world.inquire(bool(evidence))

    def _do_show(self) -> None:
        """Free blocks, and what stands in which table."""
        world = self._world
        self._lines_append(f"prefill: {world.pool.free_count} blocks free")
        for name, pool in world.pools.items():
            self._lines_append(f"{name}: {pool.free_count} blocks free")
        states = {name: core.states() for name, core in world.producers.items()}
        states |= {name: core.states() for name, core in world.consumers.items()}
        for name, counts in states.items():
            text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
            self._lines_append(f"{name}: {text or 'nothing'}")

    def _do_clean(self) -> None:
        self._world.assert_clean()
        self._lines_append("everything has ended, every block is free")


def described(thing: object) -> str:
    """One line on a message, a post or a result."""
    text = _DESCRIBE.get(type(thing), _plain)(thing)
    return text if not isinstance(thing, Message) else f"{type(thing).__name__} {text}"


def _plain(thing: Any) -> str:
    if isinstance(thing, Message):
        return _name(thing)
    values = msgspec.structs.asdict(thing)
    texts = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in values.items()}
    return f"{type(thing).__name__} " + " ".join(f"{name}={value}" for name, value in texts.items())


def _name(message: Any) -> str:
    """Transfer and consumer, and which attempt it is about after the first."""
    return _numbered(message.transfer, message.consumer, message.attempt)


def _numbered(transfer: str, consumer: str, attempt: int) -> str:
    return f"{transfer}/{consumer}" if attempt == 1 else f"{transfer}/{consumer}#{attempt}"


def _range(message: Any) -> str:
    return f"{_name(message)} [{message.start}, {message.stop})"


def _register(message: Register) -> str:
    blocks = [first + at for first, count in message.groups[0] for at in range(count)]
    return f"{_range(message)} into {blocks} {_permission(message)}"


def _renew(message: Renew) -> str:
    names = " ".join(_numbered(*key) for key in message.transfers)
    return f"{names} {_permission(message)}" if message.asked is None else names


def _permission(message: Register | Renew) -> str:
    return "without permission" if message.mark is None else f"for {message.write_seconds:g} s"


def _status(message: Status) -> str:
    return ", ".join(f"{_name(s)} {s.state} {s.frontier}{_kept(s)}" for s in message.transfers)


def _kept(status: TransferStatus) -> str:
    return f" kept for {status.keep_seconds:g} s" if status.keep_seconds else ""


def _failed(message: Failed) -> str:
    return f"{_name(message)} valid until {message.valid_until}: {message.reason}"


def _offer(message: Offer) -> str:
    blocks = [first + at for first, count in message.groups[0] for at in range(count)]
    return f"{_range(message)} in {blocks}, kept for {message.keep_seconds:g} s"


def _post(piece: PostSlice) -> str:
    pairs = " ".join(f"{a}>{b}" for a, b in zip(piece.source_blocks[0], piece.target_blocks[0], strict=True))
    if piece.notify is None:
        what = f"{piece.transfer}/{piece.consumer} [{piece.start}, {piece.stop})"
        return f"read {piece.slice} from {piece.peer}: {what} blocks {pairs}"
    notify = type(piece.notify).__name__
    what = f"{_name(piece.notify)} [{piece.start}, {piece.stop})"
    return f"slice {piece.slice} to {piece.peer}: {what} blocks {pairs} with {notify}"


def _receive_failed(result: ReceiveFailed) -> str:
    fence = "fenced" if result.fenced else "NOT fenced"
    by_us = ", withdrawn" if result.cancelled else ""
    return (
        f"ReceiveFailed {result.transfer}/{result.consumer} valid until {result.valid_until}, "
        f"{fence}{by_us}: {result.reason}"
    )


_DESCRIBE: dict[type, Callable[[Any], str]] = {
    Register: _register,
    Fetch: _range,
    Offer: _offer,
    Renew: _renew,
    Cancel: lambda m: f"{_name(m)}: {m.reason}",
    Landed: _range,
    Written: _range,
    Status: _status,
    Failed: _failed,
    PostSlice: _post,
    Released: lambda r: f"Released {r.transfer}: {r.outcome}",
    Drained: lambda r: f"Drained {r.ticket}",
    Received: lambda r: f"Received {r.transfer}/{r.consumer}",
    BlocksSafe: lambda r: f"BlocksSafe {r.transfer}/{r.consumer}",
    ReceiveFailed: _receive_failed,
}
