"""The side channel: where an engine's ranks can be found. (Document types by the lead; server and client follow.)"""

from __future__ import annotations

import msgspec

from kvferry.ids import EngineId, Incarnation

DIRECTORY_VERSION = 1


class RankEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its transport's name and metadata, and its encoded `layout.spec.CacheSpec`."""

    pp: int
    tp: int
    peer: str
    metadata: bytes
    cache: bytes


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of one incarnation of one engine."""

    engine: EngineId
    incarnation: Incarnation
    tp_size: int
    pp_size: int
    ranks: tuple[RankEntry, ...]
    version: int = DIRECTORY_VERSION
