"""What an operator can set, and the bounds of everything that waits or grows."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from kvferry.errors import UsageError
from kvferry.router.ground.policy import POLICIES
from kvferry.router.ground.roles import Role

MEBIBYTE = 1 << 20
RouterMode = Literal["push", "pull", "auto"]
Affinity = Literal["conversation", "session", "off"]
TRANSFER_MODES: tuple[RouterMode, ...] = ("push", "pull", "auto")
DecodeDispatch = Literal["eager", "late"]
AFFINITIES: tuple[Affinity, ...] = ("conversation", "session", "off")
DECODE_DISPATCHES: tuple[DecodeDispatch, ...] = ("eager", "late")
NAMED = "dns+"
"""What a URL begins with whose host name stands for many engines, one at each of its addresses."""
_FROM_ZERO = frozenset(
    {
        "leg_timeout_seconds",
        "local_prefill_below",
        "queue_max",
        "retries",
        "retry_backoff_seconds",
        "retry_budget",
    }
)


class OnPrefillFailure(enum.Enum):
    """What happens when a prefill leg is lost or answers 5xx while no byte has gone to the client."""

    RETRY = "retry"
    """Another prefill engine with a new transfer; with none left the decode engine prefills itself."""
    RECOMPUTE = "recompute"
    """The decode engine prefills itself."""
    FAIL = "fail"
    """The client gets an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The router's configuration; construction validates it.

    Raises:
        UsageError: a value is impossible; the message names it.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    prefill_policy: str = "round_robin"
    decode_policy: str = "least_load"
    api_key: str | None = None
    engine_api_key: str | None = None
    """What engines are sent instead of the client's key."""
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    transfer_mode: RouterMode = "push"
    """`auto` decides for each transfer, see `policy.transfer_mode`."""

    affinity: Affinity = "conversation"
    """Whether a conversation's next turn goes to the engines of the one before.

    `session`: to those that its name belongs to, which every router finds without memory.
    """

    request_timeout_seconds: float = 600.0
    connect_timeout_seconds: float = 5.0
    body_timeout_seconds: float = 60.0
    """How long a client may take to send its request."""
    decode_recovery_seconds: float = 30.0
    """How long a decode leg whose prefill engine died may take to recompute before it is sent anew."""
    prefill_linger_seconds: float = 30.0
    """How long a prefill leg may outlive its decode leg."""
    prefill_lease_seconds: float = 30.0
    """How long a prefill engine keeps what nobody has asked for, `kv_lease_duration` there; pull only."""
    health_interval_seconds: float = 2.0
    turn_seconds: float = 600.0
    """How long a turn of a conversation is remembered."""
    health_timeout_seconds: float = 2.0
    probe_timeout_seconds: float = 30.0
    recheck_seconds: float = 2.0
    """How long a request waits for a check of engines when none is known to be ready."""
    retry_backoff_seconds: float = 0.1
    drain_seconds: float = 30.0
    silence_seconds: float = 15.0
    """How long an engine's health check may stay unanswered until the legs that wait for it end."""
    resolve_seconds: float = 10.0
    """Between two look-ups of a name that stands for many engines."""
    keep_alive_seconds: float = 75.0
    """How long a client's connection may be idle."""
    queue_timeout_seconds: float = 60.0
    """How long a request may wait for its turn."""
    leg_timeout_seconds: float = 0.0
    """How long a leg may take to its first byte before it counts as failed; 0 for as long as the request."""

    data_parallel: bool = True
    """Whether the ranks behind one address become workers of their own."""
    decode_dispatch: DecodeDispatch = "eager"
    """Push: whether the decode leg is sent with the prefill leg, or shortly before its expected end."""
    local_prefill_below: int = 0
    """Prompts of fewer tokens are prefilled by their decode engine."""
    fair_queue: bool = False
    """Whether requests that wait get their turns by API key."""
    retry_budget: float = 0.2
    """Retries per request, over all requests; see `budget`."""

    retries: int = 2
    concurrent_requests_max: int = 1024
    queue_max: int = 1024
    """How many requests may wait for their turn."""
    turns_max: int = 4096
    """How many keys of turns are remembered."""
    connections_max: int = 16384
    """Of clients."""
    prompts_max: int = 256
    body_bytes_max: int = 64 * MEBIBYTE
    answer_bytes_max: int = 256 * MEBIBYTE
    event_bytes_max: int = 16 * MEBIBYTE

    def __post_init__(self) -> None:
        for flag, urls in (("--prefill", self.prefill), ("--decode", self.decode)):
            check_list(flag, urls)
        for flag, policy in (
            ("--prefill-policy", self.prefill_policy),
            ("--decode-policy", self.decode_policy),
        ):
            if policy not in POLICIES:
                raise UsageError(f"{flag}: {policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        if self.transfer_mode not in TRANSFER_MODES:
            modes = ", ".join(TRANSFER_MODES)
            raise UsageError(f"--transfer-mode: {self.transfer_mode!r} is unknown; choose one of {modes}")
        if self.affinity not in AFFINITIES:
            raise UsageError(
                f"--affinity: {self.affinity!r} is unknown; choose one of {', '.join(AFFINITIES)}"
            )
        if self.decode_dispatch not in DECODE_DISPATCHES:
            choices = ", ".join(DECODE_DISPATCHES)
            raise UsageError(
                f"--decode-dispatch: {self.decode_dispatch!r} is unknown; choose one of {choices}"
            )
        self._check_numbers()

    def policy(self, role: Role) -> str:
        """The name of the role's policy."""
        return self.prefill_policy if role is Role.PREFILL else self.decode_policy

    def _check_numbers(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name in _FROM_ZERO:
                if not value >= 0:
                    raise UsageError(f"{name}: must be 0 or more, not {value}")
            elif name.endswith("_seconds") and not value > 0:
                raise UsageError(f"{name}: must be more than 0, not {value}")
            elif name.endswith("_max") and value < 1:
                raise UsageError(f"{name}: must be at least 1, not {value}")


def check_list(flag: str, urls: Collection[str]) -> None:
    """Check the URLs of one role.

    Raises:
        UsageError: the message begins with `flag`.
    """
    if not urls:
        raise UsageError(f"{flag}: give at least one URL, for example {flag} http://127.0.0.1:8100")
    for url in urls:
        check_url(flag, url)
    if len(set(urls)) != len(urls):
        raise UsageError(f"{flag}: the same URL is given twice")


def check_url(flag: str, url: str) -> None:
    """Check an engine's base URL.

    Raises:
        UsageError: it is none; the message begins with `flag`.
    """
    try:
        parts = urlsplit(url.removeprefix(NAMED))
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if url.startswith(NAMED) and not url.startswith(f"{NAMED}http://"):
        raise UsageError(
            f"{flag}: {url!r}: only {NAMED}http:// stands for many engines; a certificate is for one host"
        )
    if usable and parts.path.endswith("/v1"):
        raise UsageError(
            f"{flag}: {url!r} ends in /v1; give the engine's base URL, {url.removesuffix('/v1')}"
        )
    if not usable or parts.query or parts.fragment or url.endswith("/"):
        raise UsageError(f"{flag}: {url!r} is not a base URL; write it like http://127.0.0.1:8100")
