"""The router's options: each is a flag, an environment variable and a key of the configuration file.

A flag goes before its variable, that before the file, that before the default. `--retries` is the variable
`KVFERRY_RETRIES` and the key `retries`; keys may be written with `-` or `_`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import UsageError
from kvferry.router.ground.policy import POLICIES
from kvferry.router.ground.settings import (
    AFFINITIES,
    DECODE_DISPATCHES,
    TRANSFER_MODES,
    OnPrefillFailure,
    RouterSettings,
)
from kvferry.router.operation.listening import Listening

PREFIX = "KVFERRY_"
CONFIG = "--config"
_TRUTHS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option; `kind` is str, int, float, bool, or list for one that may be repeated."""

    flag: str
    field: str
    """Of `RouterSettings` or `Listening`; the policies' options fill two."""
    text: str
    kind: type = str
    default: Any = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def key(self) -> str:
        """In the configuration file."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """In the environment."""
        return PREFIX + self.key.upper()

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flag; one that is not given leaves nothing in the namespace."""
        shown = "" if self.default in (None, "", ()) else f" (default: {_written(self.default)})"
        common: dict[str, Any] = {"dest": self.key, "default": argparse.SUPPRESS, "help": self.text + shown}
        if self.kind is bool:
            parser.add_argument(self.flag, action=argparse.BooleanOptionalAction, **common)
        elif self.kind is list:
            parser.add_argument(self.flag, action="append", metavar=self.metavar, **common)
        else:
            choices = self.choices or None
            parser.add_argument(self.flag, type=self.kind, choices=choices, metavar=self.metavar, **common)

    def read_text(self, text: str) -> Any:
        """The value that a variable has.

        Raises:
            UsageError: it has none.
        """
        if self.kind is list:
            return text.replace(",", " ").split()
        if self.kind is bool:
            value = _TRUTHS.get(text.strip().lower())
            if value is None:
                raise UsageError(f"{self.variable}: must be true or false, not {text!r}")
            return value
        try:
            return self.checked(self.kind(text), self.variable)
        except ValueError:
            raise UsageError(f"{self.variable}: must be a number, not {text!r}") from None

    def read_value(self, value: Any, file: str) -> Any:
        """The value that a key of the file has.

        Raises:
            UsageError: it is of another kind.
        """
        where = f"{file}: {self.key}"
        if self.kind is list:
            if isinstance(value, str):
                return [value]
            if isinstance(value, list) and all(isinstance(each, str) for each in value):
                return value
            raise UsageError(f"{where}: must be a list of texts")
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not self.kind:
            wanted = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[
                self.kind
            ]
            raise UsageError(f"{where}: must be {wanted}, not {value!r}")
        return self.checked(value, where)

    def checked(self, value: Any, where: str) -> Any:
        """The value, if it is one of the choices.

        Raises:
            UsageError: it is not.
        """
        if self.choices and value not in self.choices:
            raise UsageError(f"{where}: {value!r} is unknown; choose one of {', '.join(self.choices)}")
        return value


def _written(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


_SETTINGS = {field.name: field.default for field in dataclasses.fields(RouterSettings)}
_LISTENING = {field.name: field.default for field in dataclasses.fields(Listening)}
_POLICIES = tuple(POLICIES)
_PORT = 8000


def _setting(flag: str, field: str, text: str, kind: type | None = None, **more: Any) -> Option:
    default = _SETTINGS[field]
    return Option(flag, field, text, kind or type(default), default, **more)


def _listening(flag: str, field: str, text: str, metavar: str | None = None) -> Option:
    return Option(flag, field, text, str, _LISTENING[field], metavar=metavar)


OPTIONS = (
    Option("--prefill", "prefill", "a prefill engine; may be repeated", list, metavar="URL"),
    Option("--decode", "decode", "a decode engine; may be repeated", list, metavar="URL"),
    Option("--policy", "", "how engines of both roles are chosen", choices=_POLICIES),
    Option(
        "--prefill-policy", "prefill_policy", "how prefill engines are chosen", str, "round_robin", _POLICIES
    ),
    Option(
        "--decode-policy",
        "decode_policy",
        "how decode engines are chosen; least_wait with auto",
        str,
        "least_load",
        _POLICIES,
    ),
    _setting("--transfer-mode", "transfer_mode", "how KV comes to decode engines", choices=TRANSFER_MODES),
    _setting(
        "--decode-dispatch",
        "decode_dispatch",
        "push: whether the decode leg is sent at once or shortly before prefill is expected to end",
        choices=DECODE_DISPATCHES,
    ),
    _setting(
        "--local-prefill-below",
        "local_prefill_below",
        "prompts of fewer tokens are prefilled by their decode engine",
    ),
    _setting(
        "--affinity",
        "affinity",
        "whether a conversation goes on at the engines of its last turn",
        choices=AFFINITIES,
    ),
    _setting(
        "--data-parallel",
        "data_parallel",
        "whether the data-parallel ranks behind one address become workers of their own",
    ),
    _listening("--host", "host", "address to listen on"),
    Option("--port", "port", "port to listen on, 0 for any", int, _PORT),
    _listening("--ssl-certfile", "ssl_certfile", "PEM file with the router's certificate and chain", "FILE"),
    _listening("--ssl-keyfile", "ssl_keyfile", "PEM file with the certificate's key", "FILE"),
    _listening(
        "--engine-ca-file", "engine_ca_file", "PEM file with the authorities of https engines", "FILE"
    ),
    _setting("--api-key", "api_key", "the key that clients must send, passed on to the engines", str),
    _setting(
        "--engine-api-key", "engine_api_key", "the key that engines are sent instead of the client's", str
    ),
    _listening(
        "--access-log", "access_log", "file for one JSON line per request, - for standard output", "FILE"
    ),
    _listening("--otlp-endpoint", "otlp_endpoint", "URL that OpenTelemetry spans are sent to", "URL"),
    Option(
        "--on-prefill-failure",
        "on_prefill_failure",
        "when a prefill leg fails before the client's first byte",
        str,
        OnPrefillFailure.RETRY.value,
        tuple(choice.value for choice in OnPrefillFailure),
    ),
    _setting("--retries", "retries", "how often a prompt's legs are sent anew"),
    _setting("--retry-budget", "retry_budget", "retries per request, over all requests"),
    _setting("--request-timeout-secs", "request_timeout_seconds", "bound of a whole request"),
    _setting("--connect-timeout-secs", "connect_timeout_seconds", "bound of connecting to an engine"),
    _setting("--body-timeout-secs", "body_timeout_seconds", "bound of a request's way here"),
    _setting("--keep-alive-secs", "keep_alive_seconds", "how long a connection may be idle"),
    _setting(
        "--leg-timeout-secs",
        "leg_timeout_seconds",
        "bound of a leg's wait for its first byte, 0 for as long as the request",
    ),
    _setting("--queue-timeout-secs", "queue_timeout_seconds", "how long a request may wait for its turn"),
    _setting(
        "--decode-recovery-seconds",
        "decode_recovery_seconds",
        "how long a decode leg may recompute after its prefill engine died, before it is sent anew",
    ),
    _setting(
        "--prefill-linger-seconds",
        "prefill_linger_seconds",
        "how long a prefill leg may outlive its decode leg",
    ),
    _setting(
        "--prefill-lease-seconds",
        "prefill_lease_seconds",
        "pull: how long a prefill engine keeps what nobody has asked for, its kv_lease_duration",
    ),
    _setting("--turn-seconds", "turn_seconds", "how long a turn of a conversation is remembered"),
    _setting("--health-interval-seconds", "health_interval_seconds", "between two checks of an engine"),
    _setting(
        "--engine-silence-seconds",
        "silence_seconds",
        "how long a health check may stay unanswered until what waits for the engine ends",
    ),
    _setting("--resolve-seconds", "resolve_seconds", "between two look-ups of a name of many engines"),
    _setting("--drain-seconds", "drain_seconds", "how long requests in flight may take after SIGTERM"),
    _setting("--max-concurrent-requests", "concurrent_requests_max", "more wait for their turn"),
    _setting("--queue-size", "queue_max", "how many may wait; more are answered with 429"),
    _setting("--fair-queue", "fair_queue", "whether those that wait get their turns by API key"),
    _setting("--max-connections", "connections_max", "connections of clients; more are closed"),
    _setting("--max-turns", "turns_max", "turns that are remembered, counted by their keys"),
    _setting("--max-prompts", "prompts_max", "prompts in one request"),
    _setting("--max-body-bytes", "body_bytes_max", "length of a client's body"),
)
_BY_KEY = {option.key: option for option in OPTIONS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the router's arguments."""
    parser.add_argument(
        CONFIG,
        metavar="FILE",
        default=None,
        help="TOML file with any of these options; read again at SIGHUP for its engines (KVFERRY_CONFIG)",
    )
    for option in OPTIONS:
        option.add_to(parser)


def config_of(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> str | None:
    """The path of the configuration file, if there is one."""
    return arguments.config or environment.get(PREFIX + "CONFIG") or None


def values_of(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The value of each option by its key, from wherever it comes.

    Raises:
        UsageError: a variable or the file has a value that its option cannot have.
    """
    path = config_of(arguments, environment)
    file = {} if path is None else file_values(path)
    given = vars(arguments)
    values = {}
    for option in OPTIONS:
        text = environment.get(option.variable, "")
        if option.key in given:
            values[option.key] = given[option.key]
        elif text:
            values[option.key] = option.read_text(text)
        else:
            values[option.key] = file.get(option.key, option.default)
    return values


def file_values(path: str) -> dict[str, Any]:
    """The values in a configuration file, by their options' keys.

    Raises:
        UsageError: it cannot be read, or says something that is no option.
    """
    try:
        read = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{CONFIG}: {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{CONFIG}: {path} is not TOML: {error}") from error
    values = {}
    for name, value in read.items():
        option = _BY_KEY.get(name.replace("-", "_"))
        if option is None:
            raise UsageError(f"{path}: {name}: there is no such option; see `kvferry router --help`")
        values[option.key] = option.read_value(value, path)
    return values


def settings_of(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> RouterSettings:
    """How the router serves.

    Raises:
        UsageError: a value is impossible; the message names the flag.
    """
    values = values_of(arguments, environment)
    chosen = _filled(RouterSettings, values)
    chosen["prefill"] = addresses(values["prefill"] or ())
    chosen["decode"] = addresses(values["decode"] or ())
    chosen["on_prefill_failure"] = OnPrefillFailure(values["on_prefill_failure"])
    chosen["api_key"] = values["api_key"] or None
    chosen["engine_api_key"] = values["engine_api_key"] or None
    both = values["policy"]
    for key in ("prefill_policy", "decode_policy"):
        if both and not _is_given(arguments, environment, key):
            chosen[key] = both
    if (
        values["transfer_mode"] == "auto"
        and not both
        and not _is_given(arguments, environment, "decode_policy")
    ):
        # A late choice is worth something if it knows more than an early one.
        chosen["decode_policy"] = "least_wait"
    return RouterSettings(**chosen)


def listening_of(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Listening:
    """Where the router listens, and what it writes.

    Raises:
        UsageError: a value is impossible; the message names the flag.
    """
    return Listening(**_filled(Listening, values_of(arguments, environment)))


def addresses(urls: Iterable[str]) -> tuple[str, ...]:
    """Base URLs as the router writes them."""
    return tuple(url.rstrip("/") for url in urls)


def _filled(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(kind)}
    return {option.field: values[option.key] for option in OPTIONS if option.field in fields}


def _is_given(arguments: argparse.Namespace, environment: Mapping[str, str], key: str) -> bool:
    path = config_of(arguments, environment)
    return (
        key in vars(arguments)
        or bool(environment.get(_BY_KEY[key].variable))
        or (path is not None and key in file_values(path))
    )
