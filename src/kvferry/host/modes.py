"""Which ways of moving KV an engine offers, and which one a request takes."""

from __future__ import annotations

import msgspec

from kvferry.errors import HandoffError
from kvferry.handoff import TransferMode


class Modes(msgspec.Struct, frozen=True):
    """An engine's modes: one for requests that name none, and those that requests may name."""

    default: TransferMode = "push"
    allowed: tuple[TransferMode, ...] = ("push", "pull")

    def of(self, asked: TransferMode | None) -> TransferMode:
        """The mode of a request that asks for this one, or for none.

        Raises:
            HandoffError: it is not allowed here.
        """
        mode = asked or self.default
        if mode not in self.allowed:
            others = " or ".join(f"'{one}'" for one in self.allowed)
            raise HandoffError(
                "transfer_mode",
                f"'{mode}' is not among this engine's allowed_modes; use {others}, or leave it out",
            )
        return mode
