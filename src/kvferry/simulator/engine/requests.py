"""A request as one engine sees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from kvferry.handoff import DecodeParams, HeldParams, PrefillParams
from kvferry.ids import TransferId
from kvferry.simulator.ground.content import Prompt


class Status(enum.Enum):
    """Where a request stands in its engine. The names are those that the host of a real engine sees."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "receiving"
    """It holds blocks that its producer fills."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stopped"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "aborted"

    @property
    def ended(self) -> bool:
        """Whether the engine is done with it."""
        return self in _ENDED

    @property
    def ended_normally(self) -> bool:
        """Whether it ran to its own end."""
        return self is Status.FINISHED_STOPPED or self is Status.FINISHED_LENGTH_CAPPED


_ENDED = frozenset({Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_ABORTED})


@dataclass(slots=True, eq=False)
class Request:
    """One request; it is a `host.requests.EngineRequest`.

    Counts are tokens: `computed` have KV or are being computed, `outputs` were sampled, `placeholders` will
    be by steps in flight, `in_flight` are being computed, `stale` of these by steps of before a preemption.
    """

    name: str
    prompt: Prompt
    outputs_max: int
    transfer: TransferId
    params: PrefillParams | DecodeParams
    stops: bool = False
    """Its last token is a stop token."""
    status: Status = Status.WAITING
    blocks: list[list[int]] = field(default_factory=list)
    """Its block table in each cache group; none before its engine knows it."""
    computed: int = 0
    outputs: int = 0
    placeholders: int = 0
    in_flight: int = 0
    stale: int = 0
    last_step: int = -1
    kept: HeldParams | None = None
    """What its engine keeps of it after its end."""
    decoding: bool = False
    """A step has used its KV, and no preemption has taken that away since."""

    @property
    def length(self) -> int:
        """Prompt and output."""
        return self.prompt.tokens + self.outputs

    @property
    def is_decode(self) -> bool:
        """Whether it is a decode leg."""
        return isinstance(self.params, DecodeParams)

    @property
    def history(self) -> HeldParams | None:
        """What another engine keeps of its beginning."""
        return self.params.history if isinstance(self.params, PrefillParams) else None

    # --- as the host names it --------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        """`name`."""
        return self.name

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt's length."""
        return self.prompt.tokens

    @property
    def kv_transfer_params(self) -> Any:
        """As the router sent them."""
        return self.params.to_params()

    @property
    def sampling_params(self) -> Any:
        """Nothing out of the ordinary."""
        return None

    @property
    def num_tokens(self) -> int:
        """`length`."""
        return self.length

    @property
    def num_computed_tokens(self) -> int:
        """`computed`."""
        return self.computed

    @property
    def all_token_ids(self) -> list[int]:
        """Tokens by their content; those behind the prompt are what the prompt leads to."""
        shared = min(self.prompt.shared_tokens, self.length)
        return [-self.prompt.family - 1] * shared + [self.prompt.number] * (self.length - shared)

    mm_features: tuple[()] = ()
    prompt_embeds: None = None
    lora_request: None = None
    cache_salt: None = None
