"""One prompt's life: its dispatches until one is answered, and what happens when a leg fails.

The rules of a push, in the order in which they are met:

- The decode engine is chosen first, then the prefill engine; without a ready prefill engine the decode engine
  prefills itself.
- The decode leg's answer (its first event, in a stream) decides: with it the prompt is served, whatever the
  prefill leg does; a prefill leg that is still open may finish in the background, for a bounded time.
- A leg that is rejected (4xx) ends both legs: every engine would say the same.
- A failed decode leg ends both legs; they are sent anew, with a new transfer.
- A failed prefill leg is handled as `--on-prefill-failure` says, see `push._after_prefill_failure`.
- A dispatch that ends unserved after its prefill leg has ended well leaves KV behind; the prefill engine is
  told to release it, since the decode engine may never have heard of the request.
- A prefill answer that shows another incarnation than the decode leg was sent to: both are sent anew.
- With `--decode-dispatch late` the prefill leg is sent first, and the decode engine is chosen and asked
  shortly before the expected end of prefill, or when it has ended. A prefill leg that fails before that
  leaves no other one.

Those of a pull are the same where they can be. Besides:

- The prefill engine is chosen first and its leg runs alone; the decode engine is chosen when that has ended.
- A decode engine that has not begun (refused, overloaded) is replaced by another one while the prefill engine
  keeps the KV: same transfer, no new prefill. One that may have begun may have ended the lease of what it was
  to fetch, so then both legs are sent anew.

A leg also fails when it has no answer within `--leg-timeout-secs` (a pushed decode leg: from the end of
prefill on), and when its engine's health check has been silent for too long.

Nothing here runs after the client's first byte, so each of these restarts is invisible to the client. Each
takes one of the prompt's retries and one of the router's budget. The caller bounds the whole by the request's
deadline, and ends both legs by cancelling.
"""

from __future__ import annotations

import msgspec

from kvferry.handoff import HOLDS_KEY
from kvferry.ids import TransferId
from kvferry.router.api.openai import Endpoint
from kvferry.router.dispatch.affinity import Turn
from kvferry.router.dispatch.attempts import Again, Attempts
from kvferry.router.dispatch.prompt import Prompt, Route
from kvferry.router.dispatch.prompts import Served
from kvferry.router.dispatch.pull import pull
from kvferry.router.dispatch.push import Begun, go_on, push
from kvferry.router.dispatch.services import Services
from kvferry.router.engines.pool import Role, Worker
from kvferry.router.engines.probe import held_body
from kvferry.router.ground.errors import JSON, Cause
from kvferry.router.legs.tasks import Call, LegError


class Dispatcher(Services):
    """Serves prompts."""

    async def serve(self, prompt: Prompt, begun: Begun | None = None) -> Served:
        """Dispatch the prompt until a decode leg answers; the first dispatch may have `begun`.

        Raises:
            RequestError: no leg answered, or one was rejected.
        """
        attempts = Attempts(self, prompt, None if begun is None else begun.beginning)
        try:
            while True:
                try:
                    if begun is not None:
                        legs, begun = begun.legs, None
                        return await go_on(attempts, legs)
                    return await _dispatch(attempts)
                except Again:
                    continue
                except LegError as failure:
                    attempts.after_failure(failure)
        finally:
            attempts.close()

    def remember(self, prompt: Prompt, route: Route, held: object) -> None:
        """A prompt has its whole answer, whose `kv_transfer_params` are `held`: its continuation may come."""
        if self.settings.affinity != "conversation":
            return
        # The children of one prompt end apart; what one of them keeps is not the next turn's beginning.
        kept = held if isinstance(held, dict) and prompt.n == 1 else None
        turn = self.turns.remember(prompt.fingerprint, route, kept, self.pool.clock())
        transfer = route.transfer if prompt.stream and prompt.n == 1 else None
        if kept is None and transfer is not None and route.decode.holds is not False:
            self.background.run(self._ask(prompt, route.decode, transfer, turn))

    async def _ask(self, prompt: Prompt, decode: Worker, transfer: TransferId, turn: Turn) -> None:
        """vLLM's streams end without `kv_transfer_params`: ask for what they would have told."""
        if decode.holds is False:
            return
        body = msgspec.json.encode(held_body(prompt.body.get("model"), transfer))
        headers = {**prompt.headers, "Content-Type": JSON, "X-Request-Id": f"{prompt.request_id}-held"}
        headers.update(decode.headers)
        params = await self.engines.held(decode, Call(Endpoint.COMPLETIONS.value, body, headers))
        decode.holds = params.pop(HOLDS_KEY, None) is True
        turn.keep(params, self.pool.clock())


async def _dispatch(attempts: Attempts) -> Served:
    if attempts.alone is Cause.NONE:
        if attempts.mode() == "pull":
            return await _pull(attempts)
        if attempts.settings.decode_dispatch == "late":
            return await _push_late(attempts)
    decode = await attempts.choose(Role.DECODE)
    if decode is None:
        raise attempts.nobody_decodes()
    prefill = await attempts.choose(Role.PREFILL) if attempts.alone is Cause.NONE else None
    # A prefill engine may have been forgotten while the choice backed off.
    if prefill is not None and prefill.source is not None:
        attempts.begin()
        return await push(attempts, prefill, prefill.source, decode)
    attempts.without_prefill()
    answer = await attempts.legs.decode(decode, attempts.legs.headers(), None)
    return Served(answer, Route(decode, cause=attempts.alone), None, attempts.services.background)


async def _push_late(attempts: Attempts) -> Served:
    # With nobody to receive it, a prefill would be in vain.
    if not await attempts.services.any_ready(Role.DECODE):
        raise attempts.nobody_decodes()
    prefill = await attempts.choose(Role.PREFILL)
    if prefill is None or prefill.source is None:
        attempts.without_prefill()
        raise Again
    attempts.begin()
    return await push(attempts, prefill, prefill.source)


async def _pull(attempts: Attempts) -> Served:
    # With nobody to fetch it, a prefill would be in vain.
    if not await attempts.services.any_ready(Role.DECODE):
        raise attempts.nobody_decodes()
    prefill = await attempts.choose(Role.PREFILL)
    if prefill is None:
        attempts.without_prefill()
        raise Again
    attempts.begin()
    return await pull(attempts, prefill)
