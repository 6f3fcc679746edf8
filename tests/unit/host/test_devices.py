"""The registry of devices that torch does not know."""

from __future__ import annotations

import pytest

from kvferry.host import devices


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_devices", [])


def test_a_tensor_of_no_registered_device_has_no_recorder() -> None:
    devices.register(lambda tensor: tensor == "other", lambda: lambda: True)
    assert devices.recorder_of("ours") is None


def test_a_tensors_recorder_is_that_of_its_device() -> None:
    ready = [False]
    devices.register(lambda tensor: tensor == "first", lambda: lambda: True)
    devices.register(lambda tensor: tensor == "second", lambda: lambda: ready[0])
    record = devices.recorder_of("second")
    assert record is not None
    mark = record()
    assert not mark()
    ready[0] = True
    assert mark()


def test_the_latest_owner_counts() -> None:
    """An engine that was started again in the same process has new memory at an old address."""
    devices.register(lambda _: True, lambda: lambda: False)
    devices.register(lambda _: True, lambda: lambda: True)
    record = devices.recorder_of("any")
    assert record is not None
    assert record()()
