"""Marks on devices that torch does not know: whoever emulates one says here how its work is marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.host.worker import Record

_devices: list[tuple[Callable[[Any], bool], Record]] = []


def register(owns: Callable[[Any], bool], record: Record) -> None:
    """Make a device known: `owns` says whether a tensor is its, `record` marks its work so far."""
    _devices.append((owns, record))


def recorder_of(tensor: Any) -> Record | None:
    """How to mark the work of the device that the tensor is on; None when none was registered for it."""
    return next((record for owns, record in reversed(_devices) if owns(tensor)), None)
