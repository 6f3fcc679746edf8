"""What we use of vLLM's requests, and the reading of their untrusted `kv_transfer_params`."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from kvferry.errors import HandoffError
from kvferry.handoff import DecodeParams, PrefillParams, parse_request
from kvferry.host.modes import Modes

_NORMAL_ENDS = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
PROBE_KEY = "probe"
RELEASE_KEY = "release"


class EngineRequest(Protocol):
    """vLLM's request, as far as the scheduler side reads it."""

    @property
    def request_id(self) -> str:
        """The engine's own id of it."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt's length."""
        ...

    @property
    def kv_transfer_params(self) -> Any:
        """As they came over HTTP: hostile."""
        ...

    @property
    def sampling_params(self) -> Any:
        """vLLM's, or None."""
        ...

    @property
    def status(self) -> Any:
        """An enum by whose names the engine's states are known."""
        ...


def ended_normally(request: EngineRequest) -> bool:
    """Whether the request ran to its own end, by whatever stop condition."""
    return request.status.name in _NORMAL_ENDS


def is_preempted(request: EngineRequest) -> bool:
    """Whether the engine has taken the request's blocks and will compute it again."""
    return bool(request.status.name == "PREEMPTED")


def wants_prompt_logprobs(request: EngineRequest) -> bool:
    """Whether the prompt must be computed here whatever KV there is."""
    return getattr(request.sampling_params, "prompt_logprobs", None) is not None


def is_probe(params: Any) -> bool:
    """Whether a prefill request only asks for this engine's coordinates."""
    return isinstance(params, dict) and params.get(PROBE_KEY) is True


def is_release(params: Any) -> bool:
    """Whether a prefill request only says that nobody will come for its transfer."""
    return isinstance(params, dict) and params.get(RELEASE_KEY) is True


def read_params(
    params: Any, *, produces: bool, consumes: bool, modes: Modes
) -> PrefillParams | DecodeParams | None:
    """Read a request's params as an engine of this role can honour them; they name the mode that it takes.

    Raises:
        HandoffError: malformed, or not for this engine; names the key.
    """
    request = parse_request(params)
    if isinstance(request, PrefillParams) and not produces:
        raise HandoffError(
            "do_remote_decode", "this engine's kv_role does not produce; send it to a prefill engine"
        )
    if isinstance(request, DecodeParams) and not consumes:
        raise HandoffError(
            "do_remote_prefill", "this engine's kv_role does not consume; send it to a decode engine"
        )
    return None if request is None else msgspec.structs.replace(request, mode=modes.of(request.mode))
