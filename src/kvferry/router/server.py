"""Start and stop: the router as a process, and its command line arguments."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import signal
import sys
from random import Random
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web

from kvferry.errors import UsageError
from kvferry.router.app import Api
from kvferry.router.dispatch import Dispatcher
from kvferry.router.health import Monitor
from kvferry.router.legs import Engines
from kvferry.router.metrics import RouterMetrics
from kvferry.router.policy import POLICIES
from kvferry.router.pool import Pool, Role, Worker
from kvferry.router.settings import AFFINITIES, TRANSFER_MODES, OnPrefillFailure, RouterSettings

logger = logging.getLogger(__name__)

# vLLM's servers close a connection that was idle for 5 s. Ours are closed before, so that a request is never
# written to one that is about to end.
_IDLE_CONNECTION_SECONDS = 3.0
_HARD_STOP_SECONDS = 0.1


class RouterServer:
    """A running router; an async context manager."""

    def __init__(self, settings: RouterSettings, host: str = "127.0.0.1", port: int = 0) -> None:
        self.settings = settings
        self.metrics = RouterMetrics()
        self.pool = Pool(chance=Random(), changed=self._worker_changed)
        self.pool.add(Role.PREFILL, settings.prefill, settings.prefill_policy)
        self.pool.add(Role.DECODE, settings.decode, settings.decode_policy)
        self._host = host
        self._port = port

    async def __aenter__(self) -> Self:
        self._session = _session(self.settings)
        try:
            await self._start()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def _start(self) -> None:
        settings = self.settings
        key = {} if settings.api_key is None else {"Authorization": f"Bearer {settings.api_key}"}
        self.monitor = Monitor(self.pool, self._session, settings, key)
        engines = Engines(self._session, self.pool, settings, self.metrics)
        self.dispatcher = Dispatcher(settings, self.pool, engines, self.monitor, self.metrics)
        self.api = Api(self.dispatcher)
        # Without handler_cancellation a client that leaves would not end its legs.
        self._runner = web.AppRunner(
            self.api.application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_HARD_STOP_SECONDS,
        )
        try:
            await self._runner.setup()
            await self._listen()
        except BaseException:
            await self._runner.cleanup()
            raise
        self.monitor.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.api.draining = True
        await self._runner.cleanup()
        await self.dispatcher.background.close()
        await self.monitor.close()
        await self._session.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def drain(self) -> None:
        """Refuse new requests and wait, for a bounded time, until those in flight have ended."""
        await self.api.drain()

    async def _listen(self) -> None:
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            where = f"{self._host}:{self._port}"
            raise UsageError(
                f"--host, --port: cannot listen on {where}: {error.strerror or error}; choose another"
            ) from error

    def _worker_changed(self, worker: Worker) -> None:
        self.metrics.worker_up.labels(worker.role.value, worker.url).set(worker.ready)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the router's arguments."""
    policies = tuple(POLICIES)
    add = parser.add_argument
    add("--prefill", action="append", metavar="URL", required=True, help="a prefill engine; may be repeated")
    add("--decode", action="append", metavar="URL", required=True, help="a decode engine; may be repeated")
    add("--policy", choices=policies, help="how engines of both roles are chosen")
    add("--prefill-policy", choices=policies, help="how prefill engines are chosen (default: round_robin)")
    add(
        "--decode-policy",
        choices=policies,
        help="how decode engines are chosen (default: least_load; least_wait with auto)",
    )
    add(
        "--transfer-mode",
        choices=TRANSFER_MODES,
        default="push",
        help="how KV comes to decode engines (default: %(default)s)",
    )
    add(
        "--affinity",
        choices=AFFINITIES,
        default="conversation",
        help="whether a conversation goes on at the engines of its last turn (default: %(default)s)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on, 0 for any (default: %(default)s)")
    add(
        "--api-key",
        default=os.environ.get("KVFERRY_API_KEY"),
        help="the key that clients must send, passed on to the engines (default: KVFERRY_API_KEY)",
    )
    add(
        "--on-prefill-failure",
        choices=[choice.value for choice in OnPrefillFailure],
        default=OnPrefillFailure.RETRY.value,
        help="when a prefill leg fails before the client's first byte (default: %(default)s)",
    )
    defaults = {field.name: field.default for field in dataclasses.fields(RouterSettings)}
    for name, (flag, text) in _NUMBERS.items():
        default = defaults[name]
        add(flag, dest=name, type=type(default), default=default, help=f"{text} (default: %(default)s)")


_NUMBERS = {
    "request_timeout_seconds": ("--request-timeout-secs", "bound of a whole request"),
    "connect_timeout_seconds": ("--connect-timeout-secs", "bound of connecting to an engine"),
    "decode_recovery_seconds": (
        "--decode-recovery-seconds",
        "how long a decode leg may recompute after its prefill engine died, before it is sent anew",
    ),
    "prefill_linger_seconds": (
        "--prefill-linger-seconds",
        "how long a prefill leg may outlive its decode leg",
    ),
    "prefill_lease_seconds": (
        "--prefill-lease-seconds",
        "pull: how long a prefill engine keeps what nobody has asked for, its kv_lease_duration",
    ),
    "turn_seconds": ("--turn-seconds", "how long a turn of a conversation is remembered"),
    "health_interval_seconds": ("--health-interval-seconds", "between two checks of an engine"),
    "drain_seconds": ("--drain-seconds", "how long requests in flight may take after SIGTERM"),
    "retries": ("--retries", "how often a prompt's legs are sent anew"),
    "concurrent_requests_max": ("--max-concurrent-requests", "more are answered with 429"),
    "turns_max": ("--max-turns", "turns that are remembered, counted by their keys"),
    "prompts_max": ("--max-prompts", "prompts in one request"),
    "body_bytes_max": ("--max-body-bytes", "length of a client's body"),
}


def settings_of(arguments: argparse.Namespace) -> RouterSettings:
    """The settings that the arguments name.

    Raises:
        UsageError: a value is impossible; the message names the flag.
    """
    numbers = {name: getattr(arguments, name) for name in _NUMBERS}
    return RouterSettings(
        prefill=tuple(url.rstrip("/") for url in arguments.prefill),
        decode=tuple(url.rstrip("/") for url in arguments.decode),
        prefill_policy=arguments.prefill_policy or arguments.policy or "round_robin",
        decode_policy=arguments.decode_policy or arguments.policy or _decode_policy(arguments),
        api_key=arguments.api_key or None,
        transfer_mode=arguments.transfer_mode,
        affinity=arguments.affinity,
        on_prefill_failure=OnPrefillFailure(arguments.on_prefill_failure),
        **numbers,
    )


def _decode_policy(arguments: argparse.Namespace) -> str:
    """A late choice is worth something if it knows more than an early one."""
    return "least_wait" if arguments.transfer_mode == "auto" else "least_load"


def run(arguments: argparse.Namespace) -> int:
    """Run the router until SIGTERM or SIGINT; 0 after an orderly stop, 2 when it cannot start."""
    # Does nothing where the program has set up its log before.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = settings_of(arguments)
        asyncio.run(_serve(settings, arguments.host, arguments.port))
    except UsageError as error:
        sys.stderr.write(f"kvferry router: {error}\n")
        return 2
    return 0


async def _serve(settings: RouterSettings, host: str, port: int) -> None:
    stop = _StopSignals()
    async with RouterServer(settings, host, port) as server:
        sys.stdout.write(f"kvferry router listens on {server.url}\n")
        sys.stdout.flush()
        await stop.wait()
        logger.info("stopping; requests in flight have %g s", settings.drain_seconds)
        drain = asyncio.ensure_future(server.drain())
        again = asyncio.ensure_future(stop.wait())
        # A second signal ends the patience.
        await asyncio.wait({drain, again}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, again):
            task.cancel()


class _StopSignals:
    """SIGTERM and SIGINT, one after the other."""

    def __init__(self) -> None:
        self._received: asyncio.Queue[None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received.put_nowait, None)

    async def wait(self) -> None:
        await self._received.get()


def _session(settings: RouterSettings) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        skip_auto_headers=("User-Agent",),
        trust_env=False,
    )
