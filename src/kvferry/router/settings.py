"""What an operator can set, and the bounds of everything that waits or grows."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from kvferry.errors import UsageError
from kvferry.router.policy import POLICIES

MEBIBYTE = 1 << 20
RouterMode = Literal["push", "pull", "auto"]
Affinity = Literal["conversation", "off"]
TRANSFER_MODES: tuple[RouterMode, ...] = ("push", "pull", "auto")
AFFINITIES: tuple[Affinity, ...] = ("conversation", "off")


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
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    transfer_mode: RouterMode = "push"
    """`auto` decides for each transfer, see `policy.transfer_mode`."""

    affinity: Affinity = "conversation"
    """Whether a conversation's next turn goes to the engines of the one before."""

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

    retries: int = 2
    concurrent_requests_max: int = 1024
    turns_max: int = 4096
    """How many keys of turns are remembered."""
    prompts_max: int = 256
    body_bytes_max: int = 64 * MEBIBYTE
    answer_bytes_max: int = 256 * MEBIBYTE
    event_bytes_max: int = 16 * MEBIBYTE

    def __post_init__(self) -> None:
        for flag, urls in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not urls:
                raise UsageError(f"{flag}: give at least one URL, for example {flag} http://127.0.0.1:8100")
            for url in urls:
                _check_url(flag, url)
            if len(set(urls)) != len(urls):
                raise UsageError(f"{flag}: the same URL is given twice")
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
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name.endswith("_seconds") and name != "retry_backoff_seconds" and not value > 0:
                raise UsageError(f"{name}: must be more than 0, not {value}")
            if name.endswith("_max") and value < 1:
                raise UsageError(f"{name}: must be at least 1, not {value}")
        if self.retries < 0:
            raise UsageError(f"retries: must be 0 or more, not {self.retries}")


def _check_url(flag: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if usable and parts.path.endswith("/v1"):
        raise UsageError(
            f"{flag}: {url!r} ends in /v1; give the engine's base URL, {url.removesuffix('/v1')}"
        )
    if not usable or parts.query or parts.fragment or url.endswith("/"):
        raise UsageError(f"{flag}: {url!r} is not a base URL; write it like http://127.0.0.1:8100")
