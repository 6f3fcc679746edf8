"""Start and stop: the router as a process."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import ssl
import sys
from contextlib import suppress
from random import Random
from types import TracebackType
from typing import Self

import aiohttp

from kvferry.errors import UsageError
from kvferry.router import code_state
from kvferry.router.app import Api
from kvferry.router.dispatch.dispatcher import Dispatcher
from kvferry.router.engines.discovery import Discovery, alone
from kvferry.router.engines.health import Monitor
from kvferry.router.engines.pool import Pool, Role, Worker
from kvferry.router.ground.settings import RouterSettings
from kvferry.router.http.client import HttpClient
from kvferry.router.http.server import HttpServer, ServerLimits
from kvferry.router.legs.tasks import Engines
from kvferry.router.operation.admin import Admin
from kvferry.router.operation.listening import Listening
from kvferry.router.operation.options import (
    add_arguments,
    addresses,
    config_of,
    listening_of,
    settings_of,
    values_of,
)
from kvferry.router.operation.pages import Pages
from kvferry.router.record.accesslog import AccessLog
from kvferry.router.record.metrics import RouterMetrics
from kvferry.router.record.tracing import open_tracing
from kvferry.router.serving.admission import Admission

__all__ = ["RouterServer", "add_arguments", "run", "settings_of"]

logger = logging.getLogger(__name__)

# vLLM's servers close a connection that was idle for 5 s. Ours are closed before, so that a request is never
# written to one that is about to end.
_IDLE_CONNECTION_SECONDS = 3.0
# What lives as long as the process is not looked at again and again; requests make little that is cyclic.
_COLLECT_AFTER_OBJECTS = 50_000


class RouterServer:
    """A running router; an async context manager."""

    def __init__(self, settings: RouterSettings, listening: Listening | None = None) -> None:
        self.settings = settings
        self.listening = listening or Listening()
        self.metrics = RouterMetrics()
        self.pool = Pool(chance=Random(), changed=self._worker_changed, left=self._worker_left)
        self.pool.add(Role.PREFILL, alone(settings.prefill), settings.prefill_policy)
        self.pool.add(Role.DECODE, alone(settings.decode), settings.decode_policy)

    async def __aenter__(self) -> Self:
        self._engine_tls = self.listening.engine_tls()
        self._session = _session(self.settings, self._engine_tls)
        try:
            await self._start()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def _start(self) -> None:
        settings = self.settings
        key = settings.engine_api_key or settings.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.monitor = Monitor(self.pool, self._session, settings, headers)
        self.pool.joined = self.monitor.watch
        self.discovery = Discovery(self.pool, settings)
        self.client = HttpClient(settings.connect_timeout_seconds, _IDLE_CONNECTION_SECONDS, self._engine_tls)
        engines = Engines(self.client, self.pool, settings, self.metrics)
        self.dispatcher = Dispatcher(settings, self.pool, engines, self.monitor, self.metrics)
        self.admission = Admission(
            serving_max=settings.concurrent_requests_max,
            queue_max=settings.queue_max,
            queue_seconds=settings.queue_timeout_seconds,
            fair=settings.fair_queue,
        )
        # Asked when somebody looks, not told with every request.
        self.metrics.in_flight.set_function(lambda: self.admission.serving)
        self.metrics.queued.set_function(lambda: self.admission.waiting)
        self.log = AccessLog(self.listening.access_log, self.metrics.log_lines_dropped.inc)
        pages = Pages(self.dispatcher, self.admission, Admin(self.pool, self.discovery))
        self.tracing = open_tracing(self.listening.otlp_endpoint)
        self.api = Api(self.dispatcher, self.admission, pages, self.log, self.tracing)
        self.server = HttpServer(
            self.api,
            ServerLimits(
                body_bytes_max=settings.body_bytes_max,
                request_seconds=settings.body_timeout_seconds,
                idle_seconds=settings.keep_alive_seconds,
                connections_max=settings.connections_max,
            ),
        )
        await self._listen()
        self.monitor.start()
        await self.discovery.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.admission.close()
        await self.server.close()
        await self.dispatcher.background.close()
        await self.discovery.close()
        await self.monitor.close()
        await self.client.close()
        await self._session.close()
        await self.log.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server.address
        scheme = "https" if self.listening.ssl_certfile else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def drain(self) -> None:
        """Refuse new requests and wait, for a bounded time, until those in flight have ended."""
        await self.api.drain()

    def reload(self, prefill: tuple[str, ...], decode: tuple[str, ...]) -> None:
        """These are the engines from now on, and the certificate is read anew.

        Raises:
            UsageError: one of them cannot be used; what it would replace stays.
        """
        self.discovery.apply(prefill, decode)
        if self._tls is not None:
            self.listening.load_certificate(self._tls)

    async def _listen(self) -> None:
        host, port = self.listening.host, self.listening.port
        self._tls = self.listening.tls()
        try:
            await self.server.start(host, port, self._tls)
        except OSError as error:
            raise UsageError(
                f"--host, --port: cannot listen on {host}:{port}: {error.strerror or error}; choose another"
            ) from error

    def _worker_changed(self, worker: Worker) -> None:
        self.metrics.worker_up.labels(worker.role.value, worker.name).set(worker.ready)

    def _worker_left(self, worker: Worker) -> None:
        with suppress(KeyError):
            self.metrics.worker_up.remove(worker.role.value, worker.name)


def run(arguments: argparse.Namespace) -> int:
    """Run the router until SIGTERM or SIGINT; 0 after an orderly stop, 2 when it cannot start."""
    # Does nothing where the program has set up its log before.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings, listening = settings_of(arguments), listening_of(arguments)
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(_serve(settings, listening, arguments))
    except UsageError as error:
        sys.stderr.write(f"kvferry router: {error}\n")
        return 2
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, which is faster; it is not there on every system."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(settings: RouterSettings, listening: Listening, arguments: argparse.Namespace) -> None:
    with (
        _Signals(signal.SIGTERM, signal.SIGINT) as stop,
        _Signals(signal.SIGHUP) as again,
    ):
        await _serve_until(stop, again, RouterServer(settings, listening), arguments)


async def _serve_until(
    stop: _Signals, again: _Signals, router: RouterServer, arguments: argparse.Namespace
) -> None:
    settings = router.settings
    async with router as server:
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER_OBJECTS, 20, 20)
        sys.stdout.write(f"kvferry router listens on {server.url}\n")
        sys.stdout.flush()
        logger.info("the hot path is %s", code_state())
        reloading = asyncio.create_task(_reload(server, again, arguments))
        await stop.wait()
        reloading.cancel()
        logger.info("stopping; requests in flight have %g s", settings.drain_seconds)
        drain = asyncio.ensure_future(server.drain())
        hurry = asyncio.ensure_future(stop.wait())
        # A second signal ends the patience.
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, hurry):
            task.cancel()


async def _reload(server: RouterServer, signals: _Signals, arguments: argparse.Namespace) -> None:
    """At each SIGHUP take the engines and the certificate from their files again."""
    while True:
        await signals.wait()
        try:
            values = values_of(arguments)
            server.reload(addresses(values["prefill"] or ()), addresses(values["decode"] or ()))
        except UsageError as error:
            logger.error("SIGHUP: %s; nothing has been changed", error)  # noqa: TRY400 - it tells all
        else:
            logger.info("SIGHUP: read %s and the certificate again", config_of(arguments) or "the flags")


class _Signals:
    """Signals of a kind, one after the other, while it is entered.

    They are given back at the end: a closed loop of uvloop keeps its handlers, and swallows all later ones.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._received: asyncio.Queue[None] = asyncio.Queue()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self._received.put_nowait, None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)

    async def wait(self) -> None:
        await self._received.get()


def _session(settings: RouterSettings, tls: ssl.SSLContext) -> aiohttp.ClientSession:
    """What health checks and probes are sent with."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_SECONDS, ssl=tls),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        skip_auto_headers=("User-Agent",),
        trust_env=False,
    )
