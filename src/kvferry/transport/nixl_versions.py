"""Which versions of NIXL kvferry works with."""

from __future__ import annotations

import logging
import re

from kvferry.errors import UsageError

logger = logging.getLogger(__name__)

VERSION_MIN = (1, 4, 0)
VERSION_BELOW = (1, 6, 0)
"""kvferry is tested with 1.5.1. Known bad: 0.10 (hangs when two agents of a host start at once), 1.3.0 and
1.3.1 (crash when a restarted peer is added)."""
VERSION_ADVISED = "1.5.1"


def check_version(version: str, *, allow_untested: bool) -> None:
    """Refuse a version of NIXL that kvferry was not tested with.

    Raises:
        UsageError: it is outside the range and `allow_untested` is False.
    """
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    parsed = tuple(int(number or 0) for number in numbers.groups()) if numbers else (0, 0, 0)
    if VERSION_MIN <= parsed < VERSION_BELOW:
        return
    least, below = (".".join(map(str, bound)) for bound in (VERSION_MIN, VERSION_BELOW))
    problem = f"NIXL {version} is not in the range that kvferry is tested with (from {least}, below {below})"
    if not allow_untested:
        raise UsageError(f"{problem}; install nixl=={VERSION_ADVISED}, or set allow_untested to try this one")
    logger.warning("%s; going on, because allow_untested is set", problem)
