"""Settings that cannot work are refused when they are made."""

from __future__ import annotations

import math

import pytest

from kvferry.errors import UsageError
from kvferry.protocol.limits import Limits


@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan])
@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_every_limit_is_positive(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name} must be greater than 0"):
        Limits(**{name: value})


def test_a_single_late_renewal_must_not_stop_the_producer() -> None:
    with pytest.raises(UsageError, match=r"renew_seconds \(6\) must be at most half of write_seconds \(10\)"):
        Limits(renew_seconds=6)
    Limits(renew_seconds=5)


@pytest.mark.parametrize("limits", [{"silence_seconds": 3.9}, {"lease_seconds": 3.9}])
def test_a_single_late_renewal_must_not_end_a_lease_or_look_like_silence(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be at most half of silence_seconds"):
        Limits(**limits)
