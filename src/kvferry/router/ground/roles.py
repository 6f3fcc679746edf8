"""The two roles of engines."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """What an engine does for a request; also the name of the leg that goes to it."""

    PREFILL = "prefill"
    DECODE = "decode"
