"""Why transfers end: a bounded set of codes (they become metric labels), each followed by free detail."""

from __future__ import annotations

from typing import Final

WRITTEN: Final = "written"
FETCHED: Final = "fetched"
CANCELLED: Final = "cancelled"
ABANDONED: Final = "abandoned"
INCOMPLETE: Final = "incomplete"
LEASE_EXPIRED: Final = "lease_expired"
PEER_LOST: Final = "peer_lost"
PEER_SILENT: Final = "peer_silent"
POST_FAILED: Final = "post_failed"
HANDSHAKE: Final = "handshake"
GEOMETRY: Final = "geometry"
UNKNOWN: Final = "unknown_transfer"
MALFORMED: Final = "malformed"
TOO_SHORT: Final = "too_short"
TABLE_FULL: Final = "table_full"
CLOSED: Final = "closed"
STARVED: Final = "starved"
OTHER: Final = "other"

CODES: Final = frozenset(
    {
        WRITTEN,
        FETCHED,
        CANCELLED,
        ABANDONED,
        INCOMPLETE,
        LEASE_EXPIRED,
        PEER_LOST,
        PEER_SILENT,
        POST_FAILED,
        HANDSHAKE,
        GEOMETRY,
        UNKNOWN,
        MALFORMED,
        TOO_SHORT,
        TABLE_FULL,
        CLOSED,
        STARVED,
        OTHER,
    }
)

DETAIL_CHARACTERS_MAX = 300


def because(code: str, detail: object = "") -> str:
    """`code`, or `code: detail` with the detail shortened to `DETAIL_CHARACTERS_MAX` characters."""
    text = str(detail)[:DETAIL_CHARACTERS_MAX]
    return f"{code}: {text}" if text else code


def code_of(reason: str) -> str:
    """The code of a reason, `other` when it is none of ours (a newer peer's)."""
    code = reason.partition(":")[0]
    return code if code in CODES else OTHER


def coded(code: str, reason: str) -> str:
    """`reason` when it starts with a code of ours already, else with `code` in front."""
    return reason if reason.partition(":")[0] in CODES else because(code, reason)
