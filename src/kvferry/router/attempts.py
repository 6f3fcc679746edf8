"""What all dispatches of one prompt share: the budget, who was tried, and how legs are made and ended."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import msgspec

from kvferry.handoff import SourceParams, TransferMode
from kvferry.ids import TransferId
from kvferry.router.affinity import Continuation
from kvferry.router.errors import Cause, RequestError
from kvferry.router.legs import Call, DecodeStream, LegError, PrefillAnswer, Reason
from kvferry.router.openai import Body, Endpoint, decode_body, prefill_body
from kvferry.router.policy import ModeChoice, transfer_mode
from kvferry.router.pool import Pool, Role, Worker
from kvferry.router.probe import release_body
from kvferry.router.prompts import Prompt
from kvferry.router.services import Services
from kvferry.router.settings import OnPrefillFailure

logger = logging.getLogger(__name__)

_BACKOFF_SECONDS_MAX = 1.0


class Again(Exception):
    """The prompt's legs shall be sent anew."""


class EarlyChoice:
    """The decode engine that an early choice takes; None where nothing is chosen, or not by `auto`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.worker: Worker | None = None

    def prefilled(self, decode: Worker | None = None) -> None:
        """Prefill has ended, in a push with a leg at `decode`; note what a late choice is worth beside it."""
        early = None if self.worker is None else decode or self.worker
        if early is not None:
            gain_seconds = self._pool.gain_seconds(early, has_leg=decode is not None)
            self._pool.late_choice.note(gain_seconds, self._pool.clock())


class Attempts:
    """One prompt's dispatches, seen from each of them."""

    def __init__(self, services: Services, prompt: Prompt) -> None:
        self.services = services
        self.settings = services.settings
        self.prompt = prompt
        self.alone = Cause.NEEDS_WHOLE_PROMPT if prompt.whole_prompt else Cause.NONE
        """Why no prefill engine is asked; NONE while one is."""
        self.retries_left = services.settings.retries
        self.failure: LegError | None = None
        """The last one, to be told when nothing is left to try."""
        self._tried: set[Worker] = set()
        self._choice = ModeChoice("push", "fixed")
        self.early = EarlyChoice(services.pool)
        self._met = 0
        """Legs in flight at the decode engine when it was chosen."""
        self._before = _continuation(services, prompt)

    async def choose(self, role: Role) -> Worker | None:
        """A ready engine, after a moment if it is one that has failed before; None when there is none."""
        before = self._before
        preferred = None if before is None else before.worker(role)
        worker = await self.services.worker(role, self._tried, preferred)
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
        message = "no decode engine is ready; see /workers"
        return RequestError(503, Cause.NO_DECODE, message, retry_after_seconds=1)

    def without_prefill(self) -> None:
        """No prefill engine is ready, or none shall be asked: the decode engine prefills itself."""
        if self.alone is Cause.NONE:
            self.alone = Cause.NO_PREFILL if self.failure is None else Cause.PREFILL_FAILED

    def mode(self) -> TransferMode:
        """The mode of the next dispatch; counted with the reason for it when it is begun."""
        fixed = self.settings.transfer_mode
        if fixed == "auto":
            pool = self.services.pool
            decode = None if self._before is None else self._before.worker(Role.DECODE)
            settled = decode is not None and pool.keeps(decode)
            self.early.worker = None if settled else pool.next(Role.DECODE)
            self._choice = transfer_mode(
                self.prompt.estimated_tokens,
                pool.queues(Role.DECODE),
                pool.late_choice.worth(pool.clock()),
                settled=settled,
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

    def again(self, leg: Role, reason: str) -> NoReturn:
        """Send the legs anew, for which one retry is taken."""
        self.retries_left -= 1
        self.services.metrics.retries.labels(leg.value, reason).inc()
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

    async def another_prefill(self) -> Worker | None:
        """A prefill engine for a retry, if settings and budget allow one and one is ready."""
        if self.settings.on_prefill_failure is not OnPrefillFailure.RETRY or not self.retries_left:
            return None
        return await self.services.worker(Role.PREFILL, self._tried)

    def after_failure(self, failure: LegError) -> None:
        """A leg failed for good: another try, if it is a decode leg and the budget allows.

        Raises:
            RequestError: nothing is left to try.
        """
        role = failure.worker.role
        if role is Role.PREFILL or failure.reason is Reason.REJECTED or not self.retries_left:
            raise failure.request_error() from failure
        self._note(failure)
        self.retries_left -= 1
        self.services.metrics.retries.labels(role.value, failure.reason.value).inc()

    async def decode(
        self, worker: Worker, headers: Mapping[str, str], params: Body | None
    ) -> Body | DecodeStream:
        """Run a decode leg to its answer, or to its first event in a stream.

        Raises:
            LegError: it failed before.
        """
        call = self._call(headers, decode_body(self.prompt.body, params))
        engines = self.services.engines
        return await (engines.stream(worker, call) if self.prompt.stream else engines.answer(worker, call))

    async def prefill(self, worker: Worker, headers: Mapping[str, str], params: Body) -> PrefillAnswer:
        """Run a prefill leg to its end.

        Raises:
            LegError: it failed.
        """
        body = prefill_body(self.prompt.endpoint, self.prompt.body, params)
        return await self.services.engines.prefill(worker, self._call(headers, body))

    def release(self, worker: Worker, source: SourceParams | None, transfer: TransferId) -> None:
        """Give back what a decode leg leaves behind that its engine may never have heard of."""
        if source is None or source.incarnation is None:
            # An engine with another connector would take the release for a request; its lease ends by itself.
            return
        body = msgspec.json.encode(release_body(self.prompt.body.get("model"), transfer))
        call = Call(Endpoint.COMPLETIONS.value, body, self.headers())
        self.services.background.run(self.services.engines.release(worker, call))

    def headers(self) -> dict[str, str]:
        """The headers of one dispatch's legs, with an id of its own."""
        # Engines that pair legs by the id strip `-` and 8 hexadecimal digits; 16 are not mistaken for these.
        request_id = f"{self.prompt.request_id}-{secrets.token_hex(8)}"
        return {**self.prompt.headers, "Content-Type": "application/json", "X-Request-Id": request_id}

    def _call(self, headers: Mapping[str, str], body: Body) -> Call:
        return Call(self.prompt.endpoint.value, msgspec.json.encode(body), headers)

    def _note(self, failure: LegError) -> None:
        logger.warning("request %s, %s: %s", self.prompt.request_id, failure.worker.url, failure)
        self._tried.add(failure.worker)
        self.failure = failure


def _continuation(services: Services, prompt: Prompt) -> Continuation | None:
    if services.settings.affinity == "off":
        return None
    turn = services.turns.recall(prompt.fingerprint, services.pool.clock())
    return Continuation(prompt.fingerprint, turn, services.metrics)
