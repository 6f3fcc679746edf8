"""Which mode a request takes, and what it hears when that is not allowed."""

from __future__ import annotations

import pytest

from kvferry.errors import HandoffError
from kvferry.host.modes import Modes


@pytest.mark.parametrize("default", ["push", "pull"])
@pytest.mark.parametrize("asked", [None, "push", "pull"])
def test_a_request_decides_and_the_default_stands_in(default, asked):
    assert Modes(default).of(asked) == (asked or default)


def test_a_mode_that_is_not_allowed_is_named_with_what_is():
    with pytest.raises(HandoffError, match="allowed_modes; use 'push'") as caught:
        Modes("push", ("push",)).of("pull")
    assert caught.value.field == "transfer_mode"
    assert "'pull'" in str(caught.value)
