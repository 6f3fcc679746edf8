"""The loop whose time jumps: timers, sockets, and what waits in vain."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvferry.bench import virtual_time
from kvferry.bench.virtual_time import run_virtually


async def slept(seconds: float) -> float:
    clock = asyncio.get_running_loop().time
    started = clock()
    await asyncio.sleep(seconds)
    return clock() - started


def test_an_hour_passes_at_once_and_to_the_microsecond() -> None:
    assert run_virtually(slept(3600.0)) == pytest.approx(3600.0, abs=1e-6)


def test_timers_end_in_their_order() -> None:
    ended: list[float] = []

    async def one(seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append(seconds)

    async def all_of_them() -> None:
        await asyncio.gather(*[one(seconds) for seconds in (3.0, 1.0, 2.0)])

    run_virtually(all_of_them())
    assert ended == [1.0, 2.0, 3.0]


def test_what_is_said_over_sockets_takes_no_time() -> None:
    """While a timer is near, too: otherwise time would pass between a message and its answer."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    async def talk() -> float:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        timer = asyncio.ensure_future(asyncio.sleep(1e-3))
        clock = asyncio.get_running_loop().time
        started = clock()
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for _ in range(200):
                writer.write(b"hello\n")
                assert await reader.readline() == b"hello\n"
            seconds = clock() - started
            writer.close()
            await writer.wait_closed()
        await timer
        return seconds

    assert run_virtually(talk()) == 0.0


def test_waiting_in_vain_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "_PATIENCE_SECONDS", 0.01)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="nothing will bring"):
        run_virtually(asyncio.Event().wait())
    assert time.monotonic() > started
