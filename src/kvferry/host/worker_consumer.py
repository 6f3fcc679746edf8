"""Worker side, decode requests: which destinations are open on a rank, and how their end is reported.

The engine hears of each destination once, through `finished_recving`. How depends on whether the
destination is behind the fence. Behind it, a failure names the blocks from the first bad one on, and the
engine recomputes them in place; where a cache has several groups or windows, no good prefix can be named, and
the request starts over. If a silent producer may still write, the blocks go into quarantine and the
engine throws the whole prefix away, to start over in others; where it cannot do that, or nobody waits for
the request any more, the report itself waits for the fence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.handoff import TransferMode
from kvferry.host.events import Ended, Quarantined, RankIndex, RequestId, Safe
from kvferry.host.reports import Reported
from kvferry.ids import BlockId, ConsumerId, TransferId
from kvferry.layout.spans import from_spans
from kvferry.protocol import reasons
from kvferry.protocol.commands import BlocksSafe, Receive, Received, ReceiveFailed

_Key = tuple[TransferId, ConsumerId]
_GOOD_ENDS: dict[TransferMode, str] = {"push": reasons.WRITTEN, "pull": reasons.FETCHED}


@dataclass(slots=True)
class _Destination:
    """An open destination. `failed_at` is where its good prefix ends, once it has failed."""

    receive: Receive
    opened_at_seconds: float
    withdrawn: bool = False
    failed_at: int | None = None
    quarantined: bool = False

    @property
    def request(self) -> RequestId:
        return RequestId(self.receive.consumer)


class WorkerConsumer:
    """The destinations of one rank."""

    def __init__(
        self, rank: RankIndex, block_tokens: int, *, can_start_over: bool, keeps_good_prefixes: bool = True
    ) -> None:
        self._rank = rank
        self._block_tokens = block_tokens
        self._can_start_over = can_start_over
        self._keeps_good_prefixes = keeps_good_prefixes
        self._destinations: dict[_Key, _Destination] = {}
        self._keys: dict[RequestId, _Key] = {}

    def __len__(self) -> int:
        return len(self._destinations)

    def open(self, receive: Receive, now: float) -> None:
        """A destination's blocks are allocated."""
        key = receive.transfer, receive.consumer
        destination = _Destination(receive, now)
        self._destinations[key] = destination
        self._keys[destination.request] = key

    def withdraw(self, requests: Iterable[RequestId]) -> None:
        """Nobody waits for these any more; most are not ours."""
        for request in requests:
            key = self._keys.get(request)
            if key is not None:
                self._destinations[key].withdrawn = True

    def received(self, result: Received, now: float, out: Reported) -> None:
        """Every byte is in place."""
        destination = self._close(result.transfer, result.consumer)
        if destination is None:
            return
        out.finished.receiving.add(destination.request)
        out.events.append(
            Ended(
                rank=self._rank,
                request=destination.request,
                reason=_GOOD_ENDS[destination.receive.mode],
                bytes=result.bytes,
                write_seconds=now - destination.opened_at_seconds,
                mode=destination.receive.mode,
            )
        )

    def failed(self, result: ReceiveFailed, out: Reported) -> None:
        """The rest will not come."""
        destination = self._destinations.get((result.transfer, result.consumer))
        if destination is None or destination.failed_at is not None:
            return
        destination.failed_at = result.valid_until
        cancelled = result.cancelled or destination.withdrawn
        starts_over = not self._keeps_good_prefixes or (not result.fenced and self._can_start_over)
        good_until = destination.receive.start if starts_over else result.valid_until
        out.events.append(
            Ended(
                rank=self._rank,
                request=destination.request,
                reason=result.reason,
                lost_tokens=0 if cancelled else destination.receive.stop - good_until,
                failed=True,
                cancelled=cancelled,
                mode=destination.receive.mode,
            )
        )
        if result.fenced:
            self._end(destination, out)
        elif self._can_start_over and not destination.withdrawn:
            destination.quarantined = True
            out.events.append(Quarantined(self._rank, destination.request))
            out.finished.failed.add(destination.request)
            out.finished.receiving.add(destination.request)

    def safe(self, result: BlocksSafe, out: Reported) -> None:
        """An unfenced failure has come behind the fence."""
        destination = self._destinations.get((result.transfer, result.consumer))
        if destination is None or destination.failed_at is None:
            return
        if destination.quarantined:
            self._close(result.transfer, result.consumer)
            out.events.append(Safe(self._rank, destination.request))
        else:
            self._end(destination, out)

    def _end(self, destination: _Destination, out: Reported) -> None:
        self._close(destination.receive.transfer, destination.receive.consumer)
        out.finished.receiving.add(destination.request)
        if destination.withdrawn:
            return
        if self._keeps_good_prefixes:
            out.bad_blocks.update(self._bad_blocks(destination))
        else:
            out.finished.failed.add(destination.request)

    def _bad_blocks(self, destination: _Destination) -> list[BlockId]:
        receive = destination.receive
        # At least the last token is bad, or it would not have failed; a block that is good in part is bad.
        valid_until = min(max(destination.failed_at or 0, receive.start), receive.stop - 1)
        first = valid_until // self._block_tokens - receive.start // self._block_tokens
        return [int(block) for block in from_spans(receive.groups[0])[first:]]

    def _close(self, transfer: TransferId, consumer: ConsumerId) -> _Destination | None:
        destination = self._destinations.pop((transfer, consumer), None)
        if destination is not None:
            self._keys.pop(destination.request, None)
        return destination
