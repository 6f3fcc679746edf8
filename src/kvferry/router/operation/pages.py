"""What the router itself answers: health, readiness, workers, models, metrics, status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.router.api.openai import Body, read_object
from kvferry.router.dispatch.dispatcher import Dispatcher
from kvferry.router.engines.pool import Role, Worker
from kvferry.router.ground.errors import JSON, Cause, RequestError, invalid, nobody_decodes, not_allowed
from kvferry.router.http.reading import Request
from kvferry.router.legs.failures import LegError
from kvferry.router.operation.admin import Admin
from kvferry.router.operation.status import Status, page_of, status_of
from kvferry.router.record.metrics import CONTENT_TYPE
from kvferry.router.serving.admission import Admission
from kvferry.router.serving.asking import forwarded

PageHandler = Callable[[Request], Awaitable["Page"]]
_MODEL = "/v1/models/"


@dataclass(frozen=True, slots=True)
class Page:
    """An answer of the router's own."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


class Pages:
    """The pages of one router."""

    def __init__(self, dispatcher: Dispatcher, admission: Admission, admin: Admin) -> None:
        self._dispatcher = dispatcher
        self._pool = dispatcher.pool
        self._admission = admission
        self._admin = admin
        self._started = asyncio.get_running_loop().time()
        self._routes: dict[str, dict[str, PageHandler]] = {
            "/v1/models": {"GET": self.models},
            "/health": {"GET": self.readiness},
            "/readiness": {"GET": self.readiness},
            "/liveness": {"GET": self.liveness},
            "/metrics": {"GET": self.exposition},
            "/workers": {"GET": self.workers, "POST": self.add_worker, "DELETE": self.remove_worker},
            "/workers/drain": {"POST": self.drain_worker},
            "/status": {"GET": self.status},
        }

    def find(self, request: Request) -> PageHandler:
        """Who answers a request.

        Raises:
            RequestError: 404 or 405.
        """
        methods = self._routes.get(request.path)
        if methods is None and request.path.startswith(_MODEL):
            methods = {"GET": self.model}
        if methods is None:
            raise RequestError(404, Cause.NOT_FOUND, f"{request.path}: there is no such path")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            raise not_allowed(
                request.path, request.method, (*methods, *(["HEAD"] if "GET" in methods else ()))
            )
        return handler

    async def models(self, request: Request) -> Page:
        """`GET /v1/models`: what the ready decode engines serve, each model once."""
        return _json({"object": "list", "data": await self._models(request)})

    async def model(self, request: Request) -> Page:
        """`GET /v1/models/NAME`."""
        name = request.path.removeprefix(_MODEL)
        for model in await self._models(request):
            if model.get("id") == name:
                return _json(model)
        raise RequestError(404, Cause.NOT_FOUND, f"no engine serves the model {name!r}", param="model")

    async def readiness(self, request: Request) -> Page:
        """`GET /readiness`, `/health`: 200 when a request could be served: a ready engine of each role."""
        del request
        draining = self._admission.closed
        ready = self._pool.ready and not draining
        counts = {role.value: sum(w.ready for w in self._pool.workers(role)) for role in Role}
        return _json({"ready": ready, "draining": draining, **counts}, 200 if ready else 503)

    async def liveness(self, request: Request) -> Page:
        """`GET /liveness`: 200 as long as the router runs."""
        del request
        return _json({"alive": True})

    async def exposition(self, request: Request) -> Page:
        """`GET /metrics`."""
        del request
        return Page(self._dispatcher.metrics.exposition(), content_type=CONTENT_TYPE)

    async def status(self, request: Request) -> Page:
        """`GET /status`: for programs as JSON, for browsers as a page."""
        status = self._status()
        if "text/html" in request.header(b"accept"):
            return Page(page_of(status).encode(), content_type="text/html; charset=utf-8")
        return Page(msgspec.json.encode(status))

    async def workers(self, request: Request) -> Page:
        """`GET /workers`: the engines, and why one is not ready."""
        del request
        return _json({"workers": self._admin.described()})

    async def add_worker(self, request: Request) -> Page:
        """`POST /workers` with `role` and `url`: an engine more, or one that was drained again."""
        body = self._change(request)
        return _json({"workers": self._admin.add(body.get("role"), body.get("url"))})

    async def drain_worker(self, request: Request) -> Page:
        """`POST /workers/drain` with `url` (or a worker's name), and `role` where both have it."""
        body = self._change(request)
        return _json({"workers": self._admin.drain(body.get("role"), body.get("url"))})

    async def remove_worker(self, request: Request) -> Page:
        """`DELETE /workers` as with drain; `now` ends what is open there."""
        body = self._change(request)
        now = body.get("now", False)
        if not isinstance(now, bool):
            raise invalid("now", "must be true or false")
        return _json({"workers": self._admin.remove(body.get("role"), body.get("url"), now=now)})

    def _change(self, request: Request) -> Body:
        """The body of a request that changes the pool.

        Raises:
            RequestError: it is none, or nobody may: whoever can reach a router without a key would own it.
        """
        if self._dispatcher.settings.api_key is None:
            message = "workers can be changed only with an API key; start the router with --api-key"
            raise RequestError(403, Cause.UNAUTHORIZED, message)
        return read_object(request.body)

    def _status(self) -> Status:
        seconds = asyncio.get_running_loop().time() - self._started
        return status_of(self._pool, self._admission, self._dispatcher.settings, seconds)

    async def _models(self, request: Request) -> list[dict[str, Any]]:
        dispatcher = self._dispatcher
        if not await dispatcher.any_ready(Role.DECODE):
            raise nobody_decodes()
        asked = [worker for worker in self._pool.workers(Role.DECODE) if worker.ready]
        headers = forwarded(request, dispatcher.settings)
        answers = await asyncio.gather(*[self._ask(worker, headers) for worker in asked])
        failures = [answer for answer in answers if isinstance(answer, RequestError)]
        if len(failures) == len(answers):
            raise failures[0]
        merged: dict[object, dict[str, Any]] = {}
        for answer in answers:
            for model in answer if isinstance(answer, list) else ():
                merged.setdefault(model.get("id"), model)
        return list(merged.values())

    async def _ask(self, worker: Worker, headers: Mapping[str, str]) -> list[dict[str, Any]] | RequestError:
        try:
            async with asyncio.timeout(self._dispatcher.settings.health_timeout_seconds):
                raw = await self._dispatcher.engines.models(worker, {**headers, **worker.headers})
            return list(_models_in(raw))
        except LegError as error:
            return error.request_error()
        except TimeoutError:
            return RequestError(504, Cause.TIMEOUT, "the decode engine did not answer in time")


def _models_in(raw: bytes) -> Iterable[dict[str, Any]]:
    try:
        data = msgspec.json.decode(raw, type=dict[str, Any]).get("data")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()
    return [model for model in data if isinstance(model, dict)] if isinstance(data, list) else ()


def _json(body: object, status: int = 200) -> Page:
    return Page(msgspec.json.encode(body), status)
