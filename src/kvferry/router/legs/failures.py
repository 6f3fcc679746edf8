"""How one leg fails."""

from __future__ import annotations

import enum

from kvferry.errors import KvferryError
from kvferry.router.engines.worker import Worker
from kvferry.router.ground.errors import Cause, EngineAnswer, RequestError


class Reason(enum.StrEnum):
    """How a leg failed."""

    REFUSED = "refused"
    """No connection: the engine has not seen the request."""
    LOST = "lost"
    """The connection ended before the answer did."""
    REJECTED = "rejected"
    """A 4xx: the request is at fault, another engine would say the same."""
    ERROR = "error"
    """A 5xx, an error event, or an answer that cannot be read."""
    SLOW = "slow"
    """No answer within `--leg-timeout-secs`."""


_UNANSWERED = {Reason.REFUSED: 503, Reason.SLOW: 504}


class LegError(KvferryError):
    """One leg failed; `answer` is what the engine said, if it said something."""

    def __init__(
        self, worker: Worker, reason: Reason, detail: str, answer: EngineAnswer | None = None
    ) -> None:
        super().__init__(f"{worker.role.value} engine: {detail}")
        self.worker = worker
        self.reason = reason
        self.answer = answer

    @property
    def may_have_started(self) -> bool:
        """Whether the engine may have worked on the request; an overloaded one (502 to 504) has not."""
        overloaded = self.answer is not None and self.answer.status in {502, 503, 504}
        return self.reason is not Reason.REFUSED and not overloaded

    def request_error(self) -> RequestError:
        """What the client is told when nothing else can be tried."""
        unanswered = _UNANSWERED.get(self.reason, 502)
        status = unanswered if self.answer is None else self.answer.status
        cause = Cause(f"{self.worker.role.value}_{self.reason.value}")
        return RequestError(status, cause, str(self), answer=self.answer)
