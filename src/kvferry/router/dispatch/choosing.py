"""The choice of engines for one prompt, and what they are expected to do for it until its legs are open."""

from __future__ import annotations

from kvferry.router.dispatch.prompt import Prompt
from kvferry.router.dispatch.services import Services
from kvferry.router.engines.pool import Ask, Role, Worker
from kvferry.router.engines.worker import Commitment
from kvferry.router.ground.policy import CACHE_POLICIES


class Choosing:
    """Chooses for one prompt; `close` it in every case."""

    def __init__(self, services: Services, prompt: Prompt) -> None:
        self._services = services
        self._prompt = prompt
        self._asks: dict[Role, Ask] = {}
        self._committed: dict[Role, Commitment] = {}

    def ask(self, role: Role) -> Ask:
        """What a choice for the prompt may depend on."""
        ask = self._asks.get(role)
        if ask is None:
            settings = self._services.settings
            ask = self._asks[role] = ask_of(settings.policy(role), settings.affinity, self._prompt)
        return ask

    async def choose(self, role: Role, tried: set[Worker], preferred: Worker | None) -> Worker | None:
        """A usable engine; from now on others know what it is going to do for the prompt."""
        worker = await self._services.worker(role, tried, preferred, self.ask(role))
        self.sent(role)
        if worker is not None:
            prompt = self._prompt
            tokens = prompt.estimated_tokens if role is Role.PREFILL else prompt.expected_tokens
            self._committed[role] = worker.commit(tokens)
        return worker

    def sent(self, role: Role) -> None:
        """The leg is open and counts by itself, or there is none."""
        commitment = self._committed.pop(role, None)
        if commitment is not None:
            commitment.end()

    def close(self) -> None:
        """Nothing more is sent."""
        for role in Role:
            self.sent(role)


def ask_of(policy: str, affinity: str, prompt: Prompt) -> Ask:
    """What a choice by this policy may depend on."""
    model = prompt.body.get("model")
    return Ask(
        model=model if isinstance(model, str) else None,
        tokens=prompt.estimated_tokens,
        chain=prompt.fingerprint.chain if policy in CACHE_POLICIES else (),
        session=prompt.fingerprint.session if affinity == "session" else None,
    )
