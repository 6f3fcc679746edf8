"""`kv_connector_extra_config`: every key that an operator may set, typed and validated at start."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvferry.errors import UsageError
from kvferry.handoff import LEASE_SECONDS_MAX, TransferMode
from kvferry.host.modes import Modes
from kvferry.layout.describe import STRIDE_ORDERS
from kvferry.protocol.limits import Limits

_Number = TypeVar("_Number", int, float)

BLOCKS_OUTERMOST = "blocks_outermost"
"""Of `cache_layout`: ask the engine for an order with blocks outermost, and take what comes."""
OF_THE_ENGINE = "engine"
"""The same: ask for nothing."""
CACHE_LAYOUTS = (BLOCKS_OUTERMOST, OF_THE_ENGINE, *STRIDE_ORDERS)

PORT_DEFAULT = 5600
HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
SECRET_VARIABLE = "KVFERRY_SIDE_CHANNEL_SECRET"
"""vLLM logs its arguments, and with them a secret that is given in the extra config."""
TESTING_VARIABLE = "KVFERRY_TESTING"

# Keys of the extra config that set a field of Limits. Operators of vLLM know `kv_lease_duration`.
LIMIT_KEYS = {
    "kv_lease_duration": "lease_seconds",
    "renew_seconds": "renew_seconds",
    "permission_seconds": "write_seconds",
    "silence_seconds": "silence_seconds",
    "handshake_seconds": "handshake_seconds",
    "unknown_seconds": "unknown_seconds",
    "starved_seconds": "starved_seconds",
    "slice_seconds": "slice_seconds",
    "slice_bytes": "slice_bytes",
    "in_flight_per_peer": "in_flight_per_peer",
    "transfers_max": "transfers_max",
}


class _Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that are not limits, as they are written in the extra config."""

    side_channel_host: str | None = None
    side_channel_port: int | None = None
    advertise_host: str | None = None
    transfer_mode: TransferMode | None = None
    allowed_modes: tuple[TransferMode, ...] = ("push", "pull")
    backends: tuple[str, ...] = ("UCX",)
    num_threads: int = 4
    progress_thread: bool = False
    switch_seconds: float = 0.0005
    retry_bound_seconds: float = 30.0
    allow_untested_nixl: bool = False
    cache_layout: str = BLOCKS_OUTERMOST
    waiting_blocks_share: float = 0.5
    quarantine_share: float = 0.1
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: float = 480.0
    held_blocks_share: float = 0.2
    kv_recompute_threshold: int = 64
    drain_seconds: float = 1.0
    close_seconds: float = 5.0
    side_channel_secret: str | None = None
    test_corrupt_block: int | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the connector runs with."""

    side_channel_host: str
    """Where the directory binds."""
    side_channel_port: int
    """0 lets the system choose; the data-parallel index is already added."""
    advertise_host: str
    """What peers are told to connect to."""
    modes: Modes
    limits: Limits
    backends: tuple[str, ...]
    num_threads: int
    progress_thread: bool
    switch_seconds: float
    """Python's switch interval in a rank's process, at most; 0 leaves what is set."""
    retry_bound_seconds: float
    """After so long the backend has given up on what it had accepted; it outlasts a permission by this."""
    allow_untested_nixl: bool
    cache_layout: str
    """One of `CACHE_LAYOUTS`."""
    waiting_blocks_share: float
    """Share of the cache that may wait for remote KV; beyond it the scheduler is told to ask again."""
    quarantine_share: float
    """Share of the cache in quarantine beyond which the engine admits no remote KV and is not ready."""
    bidirectional_kv_xfer: bool
    """Whether this engine keeps what it has decoded for the next turn, and takes what others have kept."""
    decoder_kv_blocks_ttl: float
    """How long it keeps a turn that nobody comes for."""
    held_blocks_share: float
    """Share of the cache that turns may occupy together; the oldest are given back first."""
    kv_recompute_threshold: int
    """Fewer tokens than these are computed rather than kept or received."""
    drain_seconds: float
    """How long a step may wait at a preemption for writes that read the preempted blocks."""
    close_seconds: float
    side_channel_secret: str | None
    corrupt_block: int | None
    """Test hook: the prompt's block of this index is damaged before it is pushed."""


KNOWN_KEYS = tuple(sorted((*_Keys.__struct_fields__, *LIMIT_KEYS)))


def read_settings(
    extra: Mapping[str, Any], data_parallel_index: int = 0, environment: Mapping[str, str] | None = None
) -> Settings:
    """Validate an engine's `kv_connector_extra_config`; `environment` stands in for the process's.

    Raises:
        UsageError: an unknown key, a wrong type or a value out of range; names the key and what is right.
    """
    environment = os.environ if environment is None else environment
    keys = _typed(extra)
    host = keys.side_channel_host or environment.get(HOST_VARIABLE) or "127.0.0.1"
    return Settings(
        side_channel_host=host,
        side_channel_port=_port(keys, data_parallel_index, environment),
        advertise_host=_advertised(keys, host),
        modes=_modes(keys),
        limits=_limits(extra),
        backends=keys.backends,
        num_threads=_least("num_threads", keys.num_threads, 0),
        progress_thread=keys.progress_thread,
        switch_seconds=_least("switch_seconds", keys.switch_seconds, 0),
        retry_bound_seconds=_least("retry_bound_seconds", keys.retry_bound_seconds, 1),
        allow_untested_nixl=keys.allow_untested_nixl,
        cache_layout=_cache_layout(keys),
        waiting_blocks_share=_share("waiting_blocks_share", keys.waiting_blocks_share),
        quarantine_share=_share("quarantine_share", keys.quarantine_share),
        bidirectional_kv_xfer=keys.bidirectional_kv_xfer,
        decoder_kv_blocks_ttl=_hold_seconds(keys),
        held_blocks_share=_share("held_blocks_share", keys.held_blocks_share),
        kv_recompute_threshold=_least("kv_recompute_threshold", keys.kv_recompute_threshold, 0),
        drain_seconds=_least("drain_seconds", keys.drain_seconds, 0),
        close_seconds=_least("close_seconds", keys.close_seconds, 0),
        side_channel_secret=keys.side_channel_secret or environment.get(SECRET_VARIABLE) or None,
        corrupt_block=_corrupt_block(keys, environment),
    )


def read_modes(extra: Mapping[str, Any]) -> Modes:
    """What an engine's `kv_connector_extra_config` says of modes, whatever else it says.

    Raises:
        UsageError: as `read_settings`.
    """
    return _modes(_typed({key: extra[key] for key in ("transfer_mode", "allowed_modes") if key in extra}))


def _typed(extra: Mapping[str, Any]) -> _Keys:
    unknown = sorted(set(extra) - set(KNOWN_KEYS))
    if unknown:
        raise UsageError(
            f"kv_connector_extra_config.{unknown[0]} is not known; the keys are: {', '.join(KNOWN_KEYS)}"
        )
    ours = {key: value for key, value in extra.items() if key not in LIMIT_KEYS}
    try:
        keys = msgspec.convert(ours, _Keys)
    except msgspec.ValidationError as error:
        raise UsageError(f"kv_connector_extra_config: {error}") from error
    if not keys.backends or not all(keys.backends):
        raise UsageError(
            "kv_connector_extra_config.backends must name at least one NIXL backend, e.g. ['UCX']"
        )
    return keys


def _limits(extra: Mapping[str, Any]) -> Limits:
    given = {LIMIT_KEYS[key]: value for key, value in extra.items() if key in LIMIT_KEYS}
    try:
        return msgspec.convert(given, Limits)
    except (msgspec.ValidationError, UsageError) as error:
        # Limits speaks of its own fields; the operator wrote the keys.
        text = str(error)
        for key, field in LIMIT_KEYS.items():
            text = text.replace(field, key)
        raise UsageError(f"kv_connector_extra_config: {text}") from error


def _port(keys: _Keys, data_parallel_index: int, environment: Mapping[str, str]) -> int:
    port = keys.side_channel_port
    name = "kv_connector_extra_config.side_channel_port"
    if port is None:
        text = environment.get(PORT_VARIABLE, str(PORT_DEFAULT))
        name = PORT_VARIABLE
        if not text.isdecimal():
            raise UsageError(f"{name} must be a port number, not {text!r}")
        port = int(text)
    if port == 0:
        return 0
    if not 0 < port <= 65535 - data_parallel_index:
        raise UsageError(
            f"{name} must be from 0 to 65535 with the data-parallel index ({data_parallel_index}) added, "
            f"not {port}"
        )
    return port + data_parallel_index


def _advertised(keys: _Keys, host: str) -> str:
    if keys.advertise_host:
        return keys.advertise_host
    try:
        everywhere = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere:
        raise UsageError(
            f"side_channel_host {host} binds every interface; set advertise_host to the address that "
            "the other engines shall connect to"
        )
    return host


def _modes(keys: _Keys) -> Modes:
    allowed = keys.allowed_modes
    if not allowed:
        raise UsageError("kv_connector_extra_config.allowed_modes must name 'push', 'pull' or both")
    default = keys.transfer_mode or ("push" if "push" in allowed else "pull")
    if default not in allowed:
        raise UsageError(
            f"kv_connector_extra_config.transfer_mode is {default!r}, which allowed_modes does not have; "
            "add it there, or set transfer_mode to a mode that is allowed"
        )
    return Modes(default, allowed)


def _cache_layout(keys: _Keys) -> str:
    if keys.cache_layout not in CACHE_LAYOUTS:
        raise UsageError(
            f"kv_connector_extra_config.cache_layout must be one of {', '.join(CACHE_LAYOUTS)}, "
            f"not {keys.cache_layout!r}"
        )
    return keys.cache_layout


def _share(key: str, value: float) -> float:
    if not 0 < value <= 1:
        raise UsageError(
            f"kv_connector_extra_config.{key} must be greater than 0 and at most 1, not {value!r}"
        )
    return value


def _hold_seconds(keys: _Keys) -> float:
    if not 0 < keys.decoder_kv_blocks_ttl <= LEASE_SECONDS_MAX:
        raise UsageError(
            "kv_connector_extra_config.decoder_kv_blocks_ttl must be greater than 0 and at most "
            f"{LEASE_SECONDS_MAX:g} seconds, not {keys.decoder_kv_blocks_ttl!r}"
        )
    return keys.decoder_kv_blocks_ttl


def _least(key: str, value: _Number, least: float) -> _Number:
    if value < least:
        raise UsageError(f"kv_connector_extra_config.{key} must be at least {least:g}, not {value!r}")
    return value


def _corrupt_block(keys: _Keys, environment: Mapping[str, str]) -> int | None:
    if keys.test_corrupt_block is None:
        return None
    if environment.get(TESTING_VARIABLE) != "1":
        raise UsageError(
            "kv_connector_extra_config.test_corrupt_block damages KV on purpose and needs "
            f"{TESTING_VARIABLE}=1"
        )
    return _least("test_corrupt_block", keys.test_corrupt_block, 0)
