"""What both legs of one dispatch carry, and the commands that an engine makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

Kind = TypeVar("Kind")

PREFILL: dict[str, Any] = {"do_remote_decode": True, "transfer_id": "transfer-one"}
DECODE: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_engine_id": "prefill-engine",
    "remote_host": "127.0.0.1",
    "remote_port": 5601,
    "transfer_id": "transfer-one",
}


def of(kind: type[Kind], commands: Iterable[object]) -> list[Kind]:
    """The commands of one kind, in order."""
    return [command for command in commands if isinstance(command, kind)]
