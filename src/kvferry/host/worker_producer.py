"""Worker side, prefill requests: whose blocks a rank still needs, and when it says that it does not.

The engine frees a request's blocks when every rank has reported it once, so the report must come exactly
once, only for requests whose blocks the scheduler side has kept (those that were published), and only after
the engine has named the request as finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.handoff import TransferMode
from kvferry.host.events import Ended, RankIndex, RequestId
from kvferry.host.orders import Sender
from kvferry.ids import TransferId
from kvferry.protocol import reasons
from kvferry.protocol.commands import Released

_MODES: dict[str, TransferMode] = {reasons.WRITTEN: "push", reasons.FETCHED: "pull"}
"""Good ends, and how the KV was moved by each."""


@dataclass(slots=True)
class _Source:
    """One prefill request on this rank."""

    request: RequestId
    mode: TransferMode
    held: bool = False
    """Kept after a turn: the engine has ended the request and waits for no report."""
    refused: bool = False
    """The agent had no room for it; it knows nothing of the transfer."""
    published: bool = False
    finished: bool = False
    """The engine has named the request as finished."""
    released: bool = False
    ended_at_seconds: float | None = None
    """When prefill ended normally."""


class WorkerProducer:
    """The prefill requests of one rank."""

    def __init__(self, rank: RankIndex) -> None:
        self._rank = rank
        self._sources: dict[TransferId, _Source] = {}
        self._transfers: dict[RequestId, TransferId] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def start(self, sender: Sender) -> None:
        """A new prefill request, or what is kept of a turn."""
        source = _Source(sender.request, sender.mode, sender.held, finished=sender.held)
        self._sources[sender.transfer] = source
        self._transfers[sender.request] = sender.transfer

    def refuse(self, transfer: TransferId) -> None:
        """The agent has not taken the request's `Expect`."""
        source = self._sources.get(transfer)
        if source is not None:
            source.refused = True

    def is_refused(self, transfer: TransferId) -> bool:
        """Whether the agent knows nothing of this transfer."""
        source = self._sources.get(transfer)
        return source is None or source.refused

    def publish(self, transfers: Iterable[TransferId]) -> None:
        """The scheduler side has published KV of these."""
        for transfer in transfers:
            source = self._sources.get(transfer)
            if source is not None:
                source.published = True

    def prefill_ended(self, transfer: TransferId, now: float) -> None:
        """Prefill has ended normally."""
        source = self._sources.get(transfer)
        if source is not None and not source.held:
            source.ended_at_seconds = now

    def release(self, result: Released, now: float) -> Ended | None:
        """The agent has let go; None for a transfer that is not ours (any more)."""
        source = self._sources.get(result.transfer)
        if source is None or source.released:
            return None
        source.released = True
        code = reasons.code_of(result.outcome)
        ended_at = source.ended_at_seconds
        return Ended(
            rank=self._rank,
            request=source.request,
            reason=result.outcome,
            handover_seconds=None if ended_at is None or code not in _MODES else now - ended_at,
            failed=code not in _MODES,
            cancelled=code == reasons.CANCELLED,
            mode=_MODES.get(code, source.mode),
            sending=True,
            held=source.held,
        )

    def finish(self, requests: Iterable[RequestId]) -> None:
        """The engine has finished these requests; most are not ours."""
        for request in requests:
            transfer = self._transfers.get(request)
            if transfer is not None:
                self._sources[transfer].finished = True

    def take_released(self, candidates: Iterable[TransferId]) -> set[RequestId]:
        """Those of the candidates whose blocks the engine may free now. Each is returned at most once."""
        ready: set[RequestId] = set()
        for transfer in candidates:
            source = self._sources.get(transfer)
            if source is None or not (source.released and source.finished):
                continue
            del self._sources[transfer]
            del self._transfers[source.request]
            if source.published:
                ready.add(source.request)
        return ready

    def transfer_of(self, request: RequestId) -> TransferId | None:
        """The transfer of a request that is ours."""
        return self._transfers.get(request)
