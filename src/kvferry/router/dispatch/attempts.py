"""What all dispatches of one prompt share: the budget, who was tried, and what a failure leads to."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

from kvferry.handoff import TransferMode
from kvferry.router.api.openai import Body
from kvferry.router.dispatch.affinity import Continuation
from kvferry.router.dispatch.choosing import Choosing
from kvferry.router.dispatch.prompt import Prompt
from kvferry.router.dispatch.sending import Sending
from kvferry.router.dispatch.services import Services
from kvferry.router.engines.pool import Pool, Role, Worker
from kvferry.router.ground.errors import Cause, RequestError, nobody_decodes
from kvferry.router.ground.policy import ModeChoice, transfer_mode
from kvferry.router.ground.settings import OnPrefillFailure
from kvferry.router.legs.tasks import LegError, Reason

logger = logging.getLogger(__name__)

_BACKOFF_SECONDS_MAX = 1.0


class Again(Exception):
    """The prompt's legs shall be sent anew."""


class EarlyChoice:
    """The decode engine that an early choice takes; None where nothing is chosen, or not by `auto`."""

    def __init__(self, pool: Pool, prompt: Prompt, choosing: Choosing) -> None:
        self._pool = pool
        self._prompt = prompt
        self._choosing = choosing
        self.worker: Worker | None = None

    def prefilled(self, decode: Worker | None = None) -> None:
        """Prefill has ended, in a push with a leg at `decode`; note what a late choice is worth beside it."""
        early = None if self.worker is None else decode or self.worker
        if early is not None:
            tokens = 0 if decode is None else self._prompt.expected_tokens
            ask = self._choosing.ask(Role.DECODE)
            gain_seconds = self._pool.gain_seconds(early, ask, leg_tokens=tokens)
            self._pool.late_choice.note(gain_seconds, self._pool.clock())


@dataclass(frozen=True, slots=True)
class Beginning:
    """What was found out for a prompt's first dispatch, which has begun."""

    before: Continuation | None
    met: int
    """Legs in flight at the decode engine when it was chosen."""


class Attempts:
    """One prompt's dispatches, seen from each of them."""

    def __init__(self, services: Services, prompt: Prompt, begun: Beginning | None = None) -> None:
        self.services = services
        self.settings = services.settings
        self.prompt = prompt
        self.alone = _alone(services, prompt)
        """Why no prefill engine is asked; NONE while one is."""
        self.retries_left = services.settings.retries
        self.failure: LegError | None = None
        """The last one, to be told when nothing is left to try."""
        self._tried: set[Worker] = set()
        self._choice = ModeChoice("push", "fixed")
        self._met = 0 if begun is None else begun.met
        """Legs in flight at the decode engine when it was chosen."""
        self._before = services.continuation(prompt) if begun is None else begun.before
        self._choosing = Choosing(services, prompt)
        self.early = EarlyChoice(services.pool, prompt, self._choosing)
        self.legs = Sending(services, prompt, self._choosing)
        if begun is None:
            services.budget.request()

    async def choose(self, role: Role) -> Worker | None:
        """A ready engine, after a moment if it is one that has failed before; None when there is none."""
        before = self._before
        preferred = None if before is None else before.worker(role)
        worker = await self._choosing.choose(role, self._tried, preferred)
        if role is Role.DECODE and worker is not None:
            self._met = worker.in_flight
        if before is not None and role is Role.DECODE:
            before.tell(worker)
        if worker in self._tried:
            attempt = self.settings.retries - self.retries_left
            seconds = self.settings.retry_backoff_seconds * 2 ** max(attempt - 1, 0)
            await asyncio.sleep(min(seconds, _BACKOFF_SECONDS_MAX))
        return worker

    def nobody_decodes(self) -> RequestError:
        """What the client is told when no decode engine is ready."""
        if self.failure is not None and self.failure.worker.role is Role.DECODE:
            return self.failure.request_error()
        return nobody_decodes()

    def without_prefill(self) -> None:
        """No prefill engine is ready, or none shall be asked: the decode engine prefills itself."""
        if self.alone is Cause.NONE:
            self.alone = Cause.NO_PREFILL if self.failure is None else Cause.PREFILL_FAILED

    def mode(self) -> TransferMode:
        """The mode of the next dispatch; counted with the reason for it when it is begun."""
        fixed = self.settings.transfer_mode
        if fixed == "auto":
            pool = self.services.pool
            before = None if self._before is None else self._before.worker(Role.DECODE)
            ask = self._choosing.ask(Role.DECODE)
            self.early.worker = pool.next(Role.DECODE, before, ask)
            self._choice = transfer_mode(
                self.prompt.estimated_tokens,
                pool.queues(Role.DECODE, ask),
                pool.late_choice.worth(pool.clock()),
                settled=self.early.worker is None,
            )
        else:
            self._choice = ModeChoice(fixed, "fixed")
        return self._choice.mode

    def history(self) -> Body:
        """What the turn before left at its decode engine for this prefill; nothing the second time."""
        return {} if self._before is None else self._before.take_held(self.services.pool.clock())

    def begin(self) -> None:
        """Both roles have an engine for the dispatch whose `mode` was chosen last."""
        self.services.metrics.transfers.labels(self._choice.mode, self._choice.reason).inc()

    def waiting(self, worker: Worker) -> AbstractContextManager[None]:
        """For as long as a prefilled prompt waits for a decode engine's answer."""
        if not self.prompt.stream:
            return nullcontext()
        return worker.pace.waiting(self.services.pool.clock())

    def waited(self, worker: Worker, seconds: float) -> None:
        """Note what a decode engine has added to the first token by itself; only streams show it."""
        if self.prompt.stream:
            worker.pace.note(max(seconds, 0.0), self.services.pool.clock(), self._met)

    def held(self, seconds: float) -> None:
        """Note for how long a decode engine held room for the prompt while its prefill had not ended."""
        self.services.note_held(self.prompt.estimated_tokens, seconds)

    @property
    def may_retry(self) -> bool:
        """Whether the prompt's and the router's budgets have a retry left."""
        if self.retries_left and not self.services.budget.allows:
            self.services.metrics.retries_denied.inc()
            return False
        return self.retries_left > 0

    def again(self, leg: Role, reason: str) -> NoReturn:
        """Send the legs anew, for which one retry is taken."""
        self._take_retry(leg, reason)
        raise Again

    def decode_alone(self, reason: str) -> NoReturn:
        """The decode engine shall prefill itself, by a new leg. The last resort: no retry is taken for it."""
        self.alone = Cause.PREFILL_FAILED
        self.services.metrics.retries.labels(Role.DECODE.value, reason).inc()
        raise Again

    def prefill_failed(self, failure: LegError) -> None:
        """Note a failed prefill leg.

        Raises:
            LegError: `failure` itself, when the client shall get it.
        """
        self._note(failure)
        if failure.reason is Reason.REJECTED or self.settings.on_prefill_failure is OnPrefillFailure.FAIL:
            raise failure

    async def another_prefill(self) -> bool:
        """Whether settings and budget allow another prefill leg, and an engine is ready for it."""
        if self.settings.on_prefill_failure is not OnPrefillFailure.RETRY or not self.may_retry:
            return False
        return await self.services.any_ready(Role.PREFILL)

    def after_failure(self, failure: LegError) -> None:
        """A leg failed for good: another try, if it is a decode leg and the budget allows.

        Raises:
            RequestError: nothing is left to try.
        """
        role = failure.worker.role
        if role is Role.PREFILL or failure.reason is Reason.REJECTED or not self.may_retry:
            raise failure.request_error() from failure
        self._note(failure)
        self._take_retry(role, failure.reason.value)

    def close(self) -> None:
        """Nothing more is sent."""
        self._choosing.close()

    def _take_retry(self, leg: Role, reason: str) -> None:
        self.retries_left -= 1
        self.services.budget.spend()
        self.services.metrics.retries.labels(leg.value, reason).inc()

    def _note(self, failure: LegError) -> None:
        logger.warning("request %s, %s: %s", self.prompt.request_id, failure.worker.name, failure)
        self._tried.add(failure.worker)
        self.failure = failure


def _alone(services: Services, prompt: Prompt) -> Cause:
    if prompt.whole_prompt:
        return Cause.NEEDS_WHOLE_PROMPT
    least = services.settings.local_prefill_below
    return Cause.SHORT_PROMPT if least and prompt.estimated_tokens < least else Cause.NONE
