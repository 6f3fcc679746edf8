"""Which engines there are: those that flags and the configuration file list, and what a name stands for.

A listed URL is one engine. `dns+http://name:port` stands for one engine at each address of the name, looked
up again and again: a headless service. An engine that is listed no more gets nothing new; what is open there
goes on. A look-up that fails changes nothing. Engines that an administrator has added are never taken away
here, and one that an administrator has removed comes back only with the next list.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from urllib.parse import urlsplit

from kvferry.router.engines.pool import Origin, Pool, Role, Worker
from kvferry.router.ground.settings import NAMED, RouterSettings, check_list

logger = logging.getLogger(__name__)

ADDRESSES_MAX = 1024
"""Of one name."""
_LOOKUP_SECONDS = 5.0

Lookup = Callable[[str, int], Awaitable[Collection[str]]]
"""`(host, port)` -> addresses, IPv6 ones without brackets; raises OSError."""


async def look_up(host: str, port: int) -> Collection[str]:
    """The addresses of a host, by the system's resolver.

    Raises:
        OSError: there is none, or nobody can tell.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class Discovery:
    """Keeps the pool's engines to what is listed."""

    def __init__(self, pool: Pool, settings: RouterSettings, lookup: Lookup = look_up) -> None:
        self._pool = pool
        self._settings = settings
        self._lookup = lookup
        self._lists = {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode}
        self._found: dict[str, tuple[str, ...]] = {}
        """The URLs that a name was last found to stand for."""
        self._dismissed: set[tuple[Role, str]] = set()
        """Those that an administrator has taken away."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look up every name once, then now and then."""
        await self.refresh()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Look up no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def apply(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        """These are the lists from now on; what stands for names follows with the next look-up.

        Raises:
            UsageError: a list is empty or holds something that is no base URL; nothing is changed then.
        """
        lists = {Role.PREFILL: tuple(prefill), Role.DECODE: tuple(decode)}
        for role, urls in lists.items():
            check_list(f"--{role.value}", urls)
        self._lists = lists
        self._dismissed.clear()
        self._reconcile()

    def dismiss(self, worker: Worker) -> None:
        """An administrator has removed a worker."""
        self._dismissed.add((worker.role, worker.url))

    async def refresh(self) -> None:
        """Look up every name once."""
        names = sorted({url for urls in self._lists.values() for url in urls if url.startswith(NAMED)})
        await asyncio.gather(*[self._find(name) for name in names])
        self._reconcile()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resolve_seconds)
            await self.refresh()

    async def _find(self, name: str) -> None:
        parts = urlsplit(name.removeprefix(NAMED))
        host, port = parts.hostname or "", parts.port or 80
        try:
            async with asyncio.timeout(_LOOKUP_SECONDS):
                addresses = await self._lookup(host, port)
        except (OSError, UnicodeError) as error:
            logger.warning("%s: %s; its engines stay as they are", name, str(error) or type(error).__name__)
            return
        if len(addresses) > ADDRESSES_MAX:
            logger.warning("%s has %d addresses; %d are used", name, len(addresses), ADDRESSES_MAX)
        urls = [f"http://{_bracketed(address)}:{port}{parts.path}" for address in sorted(addresses)]
        self._found[name] = tuple(urls[:ADDRESSES_MAX])

    def _reconcile(self) -> None:
        for role, urls in self._lists.items():
            listed = {each for url in urls for each in self._found.get(url, () if _named(url) else (url,))}
            wanted = {url for url in listed if (role, url) not in self._dismissed}
            there = self._pool.workers(role)
            for url in sorted(wanted - {worker.url for worker in there}):
                logger.info("%s %s joins", role.value, url)
                self._pool.join(Worker(url, role))
            for worker in there:
                if worker.origin is Origin.CONFIGURED and worker.url not in wanted:
                    logger.info("%s %s leaves", role.value, worker.name)
                    self._pool.remove(worker)


def alone(urls: Iterable[str]) -> list[str]:
    """Those URLs that are one engine each."""
    return [url for url in urls if not _named(url)]


def _named(url: str) -> bool:
    return url.startswith(NAMED)


def _bracketed(address: str) -> str:
    # The zone of a link-local address would need an escape that HTTP clients disagree about; it is rare here.
    return f"[{address}]" if ":" in address else address
