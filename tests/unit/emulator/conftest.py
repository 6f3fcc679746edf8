"""Emulated ranks for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.emulator.device import Device
from tests.support.emulated_rank import MakeRank, Rank


@pytest.fixture
def make_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRank]:
    """Makes ranks; the keyword `emulator` has the emulator's options, others are `Shape`'s."""
    monkeypatch.setenv("KVFERRY_TESTING", "1")
    monkeypatch.setattr("kvferry.emulator.session._sessions", {})
    monkeypatch.setattr("kvferry.host.devices._devices", [])
    made: list[Rank] = []

    def make(emulator: dict[str, Any] | None = None, *, device: Device | None = None, **shape: Any) -> Rank:
        made.append(Rank(tmp_path, len(made), emulator or {}, device, **shape))
        return made[-1]

    yield make
    for rank in made:
        rank.close()
