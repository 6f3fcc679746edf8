"""What an administrator can do with the pool while the router runs: see, add, drain and remove workers."""

from __future__ import annotations

from typing import Any

from kvferry.errors import UsageError
from kvferry.router.engines.discovery import Discovery
from kvferry.router.engines.pool import Origin, Pool, Role, Worker
from kvferry.router.ground.errors import Cause, RequestError, invalid
from kvferry.router.ground.settings import NAMED, check_url


class Admin:
    """The face of `/workers`; every method answers with what the workers look like afterwards."""

    def __init__(self, pool: Pool, discovery: Discovery) -> None:
        self._pool = pool
        self._discovery = discovery

    def described(self) -> list[dict[str, Any]]:
        """All workers."""
        now = self._pool.clock()
        return [described(worker, now) for worker in self._pool.workers()]

    def add(self, role: object, url: object) -> list[dict[str, Any]]:
        """Add an engine, or give a drained one work again.

        Raises:
            RequestError: 400, naming the field.
        """
        its_role, its_url = _role(role), _url(url)
        there = [worker for worker in self._pool.workers(its_role) if worker.url == its_url]
        for worker in there:
            self._pool.undrain(worker)
        if not there:
            there = [Worker(its_url, its_role, origin=Origin.ADMIN)]
            try:
                self._pool.join(there[0])
            except UsageError as error:
                raise invalid("url", str(error)) from error
        return self._described(there)

    def drain(self, role: object, name: object) -> list[dict[str, Any]]:
        """Send nothing new to a worker, or to all ranks at a URL; what is open goes on.

        Raises:
            RequestError: 400, naming the field, or 404.
        """
        found = self._named(role, name)
        for worker in found:
            self._pool.drain(worker)
        return self._described(found)

    def remove(self, role: object, name: object, *, now: bool = False) -> list[dict[str, Any]]:
        """Take a worker, or all ranks at a URL, out of the pool; `now` ends what is open there.

        What has sent no byte to its client is then tried elsewhere.

        Raises:
            RequestError: 400, naming the field, or 404.
        """
        found = self._named(role, name)
        for worker in found:
            self._discovery.dismiss(worker)
            self._pool.remove(worker)
            if now:
                worker.end()
        return self._described(found)

    def _named(self, role: object, name: object) -> list[Worker]:
        roles = tuple(Role) if role is None else (_role(role),)
        if not isinstance(name, str):
            raise invalid("url", "must be the URL or the name of a worker; see /workers")
        workers = [worker for each in roles for worker in self._pool.workers(each)]
        found = [worker for worker in workers if name.rstrip("/") in {worker.name, worker.url}]
        if not found:
            raise RequestError(
                404, Cause.NOT_FOUND, "url: there is no such worker; see /workers", param="url"
            )
        return found

    def _described(self, workers: list[Worker]) -> list[dict[str, Any]]:
        now = self._pool.clock()
        return [described(worker, now) for worker in workers]


def described(worker: Worker, now: float) -> dict[str, Any]:
    """One worker as `/workers` shows it."""
    shown: dict[str, Any] = {
        "name": worker.name,
        "url": worker.url,
        "rank": worker.rank,
        "role": worker.role.value,
        "origin": worker.origin.value,
        "up": worker.up,
        "ready": worker.ready,
        "draining": worker.draining,
        "drained": worker.drained,
        "breaker": worker.breaker.state(now).value,
        "in_flight": worker.in_flight,
        "tokens_in_flight": worker.tokens,
        "transfers": worker.transfers,
        "problem": worker.problem,
        "version": worker.version,
        "models": [{"id": model.name, "max_model_len": model.length_max} for model in worker.models],
    }
    if worker.holds is not None:
        shown["holds"] = worker.holds
    source = worker.source
    if source is not None:
        shown["engine"] = {
            "id": source.engine,
            "incarnation": source.incarnation,
            "host": source.host,
            "port": source.port,
            "tp": source.tp,
            "pp": source.pp,
        }
    return shown


def _role(role: object) -> Role:
    if not isinstance(role, str) or role not in {each.value for each in Role}:
        raise invalid("role", "must be 'prefill' or 'decode'")
    return Role(role)


def _url(url: object) -> str:
    if not isinstance(url, str):
        raise invalid("url", "must be an engine's base URL, like http://10.0.0.1:8100")
    if url.startswith(NAMED):
        raise invalid("url", f"{NAMED} belongs into the router's flags or its configuration file")
    base = url.rstrip("/")
    try:
        check_url("url", base)
    except UsageError as error:
        raise RequestError(400, Cause.INVALID_REQUEST, str(error), param="url") from error
    return base
