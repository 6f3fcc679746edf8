"""A prompt that is to be served, and by which engines it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.handoff import TransferMode
from kvferry.ids import TransferId
from kvferry.router.api.conversation import Fingerprint, fingerprint
from kvferry.router.api.openai import Body, Endpoint, estimated_tokens
from kvferry.router.engines.pool import Worker
from kvferry.router.ground.errors import Cause
from kvferry.router.record.timeline import Timeline

_ANSWER_TOKENS = 256
"""What an answer is taken to have whose length nobody has bounded."""
_ANSWER_TOKENS_MAX = 4096
"""A bound beyond this is no expectation."""


@dataclass(slots=True, eq=False)
class Prompt:
    """One prompt of a client request."""

    endpoint: Endpoint
    body: Body
    n: int
    stream: bool
    whole_prompt: bool
    request_id: str
    """Of the client request and the prompt's position in it; each dispatch adds a random part of its own."""
    headers: Mapping[str, str]
    """What both legs get of the client's headers."""

    session: str | None = None
    """The client's name for the conversation that it belongs to."""
    timeline: Timeline | None = None
    """Of the client request."""

    _fingerprint: Fingerprint | None = field(default=None, init=False)
    _estimated_tokens: int = field(default=0, init=False)

    @property
    def fingerprint(self) -> Fingerprint:
        """What its continuations are known by."""
        # Not cached by functools, whose lock costs as much as what it guards.
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.endpoint, self.body, self.session)
        return self._fingerprint

    @property
    def estimated_tokens(self) -> int:
        """How long it is, roughly."""
        if not self._estimated_tokens:
            self._estimated_tokens = estimated_tokens(self.endpoint, self.body)
        return self._estimated_tokens

    @property
    def expected_tokens(self) -> int:
        """How many tokens a decode engine will hold for it in the end, roughly."""
        asked = self.body.get("max_completion_tokens") or self.body.get("max_tokens")
        answer = _ANSWER_TOKENS
        if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0:
            answer = min(asked, _ANSWER_TOKENS_MAX)
        return self.estimated_tokens + self.n * answer


@dataclass(slots=True)
class Route:
    """How a prompt was served: by which decode engine, and how its KV came there."""

    decode: Worker
    prefill: Worker | None = None
    mode: TransferMode | None = None
    """None when the decode engine prefilled itself."""
    cause: Cause = Cause.NONE
    """Why it did; NONE when the KV was handed over."""
    transfer: TransferId | None = None
    """By which the KV was handed over."""
