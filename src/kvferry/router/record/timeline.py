"""Where one client request's time went."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.router.record.tracing import Trace

STAGES = ("queue", "prefill", "hand_over", "first_token")


@dataclass(slots=True)
class Timeline:
    """Instants on the event loop's clock, in seconds; None until they have come.

    Of several prompts in one request, and of legs that were sent anew, the last one tells, except for `sent`.
    """

    arrived: float
    sent: float | None = None
    """The first leg was sent."""
    prefilled: float | None = None
    """The prefill engine has answered."""
    answered: float | None = None
    """The decode engine has answered; in a stream, its first event is there."""
    first_byte: float | None = None
    """The first byte went to the client."""
    prefill: str = ""
    """The engine that was asked last to prefill."""
    decode: str = ""
    """The engine that was asked last to decode."""
    trace: Trace | None = None
    """Its spans, where they are wanted."""

    def leg_sent(self, role: str, worker: str, now: float) -> None:
        """A leg is being sent to the engine with this name."""
        if self.sent is None:
            self.sent = now
        if role == "prefill":
            self.prefill = worker
        else:
            self.decode = worker

    def stages(self) -> dict[str, float]:
        """Seconds by stage, of those that have come: queue, prefill, hand_over, first_token.

        `hand_over` is what the decode engine has needed beyond prefill: the rest of the transfer, its queue
        and its first step. `first_token` is the whole, from arrival on.
        """
        stages = {}
        if self.sent is not None:
            stages["queue"] = self.sent - self.arrived
            if self.prefilled is not None:
                stages["prefill"] = self.prefilled - self.sent
        if self.prefilled is not None and self.answered is not None:
            stages["hand_over"] = max(self.answered - self.prefilled, 0.0)
        if self.first_byte is not None:
            stages["first_token"] = self.first_byte - self.arrived
        return stages
