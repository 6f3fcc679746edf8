"""Which engines have computed which beginnings of prompts lately, as far as this router sent them there.

A bounded table, by the hashes of `conversation.Fingerprint`: what is not in it costs a detour, never a wrong
answer. An engine may have evicted what stands here, so an entry also ends by time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.router.engines.worker import Worker

ENTRIES_MAX = 1 << 16
"""Hashes, each of 512 bytes of a prompt: 32 MiB of text."""
WORKERS_MAX = 8
"""Of one hash; the oldest is given up."""
KEPT_SECONDS = 600.0


@dataclass(slots=True)
class Prefixes:
    """What was computed where."""

    entries_max: int = ENTRIES_MAX
    seconds: float = KEPT_SECONDS
    _by_hash: OrderedDict[bytes, dict[Worker, tuple[float, int]]] = field(default_factory=OrderedDict)
    """Per hash and engine: until when, and how often the engine had been lost by then."""

    def __len__(self) -> int:
        return len(self._by_hash)

    def note(self, chain: Sequence[bytes], worker: Worker, now: float) -> None:
        """An engine has computed the prompt whose pieces these are."""
        for piece in chain:
            workers = self._by_hash.setdefault(piece, {})
            self._by_hash.move_to_end(piece)
            workers.pop(worker, None)
            workers[worker] = (now + self.seconds, worker.losses)
            if len(workers) > WORKERS_MAX:
                del workers[next(iter(workers))]
        while len(self._by_hash) > self.entries_max:
            self._by_hash.popitem(last=False)

    def matched(self, chain: Sequence[bytes], workers: Sequence[Worker], now: float) -> list[float]:
        """The share of the prompt's pieces, 0 to 1, that each engine has from the beginning on."""
        pieces = [0] * len(workers)
        left = set(range(len(workers)))
        for piece in chain:
            known = self._by_hash.get(piece)
            if not known:
                break
            left = {index for index in left if self._stands(known.get(workers[index]), workers[index], now)}
            if not left:
                break
            for index in left:
                pieces[index] += 1
        return [count / len(chain) if chain else 0.0 for count in pieces]

    @staticmethod
    def _stands(entry: tuple[float, int] | None, worker: Worker, now: float) -> bool:
        return entry is not None and now < entry[0] and entry[1] == worker.losses
