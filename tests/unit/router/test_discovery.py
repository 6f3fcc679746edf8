"""Which engines are in the pool: lists, names, ranks, and what an administrator does."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from random import Random
from typing import Any

import pytest

from kvferry.errors import UsageError
from kvferry.router.engines.discovery import Discovery, alone
from kvferry.router.engines.pool import Origin, Pool, Role, Worker
from kvferry.router.ground.errors import RequestError
from kvferry.router.ground.settings import RouterSettings
from kvferry.router.operation.admin import Admin

NAME = "dns+http://engines.local:8100"


class World:
    """A pool without a router, and a resolver that answers as planned."""

    def __init__(self, prefill: Collection[str] = (NAME,), decode: Collection[str] = ("http://d0",)) -> None:
        self.addresses: Collection[str] | Exception = ["10.0.0.2", "10.0.0.1"]
        self.asked: list[tuple[str, int]] = []
        self.joined: list[Worker] = []
        self.left: list[Worker] = []
        settings = RouterSettings(prefill=tuple(prefill), decode=tuple(decode))
        self.pool = Pool(
            chance=Random(0),
            changed=lambda worker: None,
            joined=self.joined.append,
            left=self.left.append,
        )
        for role in Role:
            urls = settings.prefill if role is Role.PREFILL else settings.decode
            self.pool.add(role, alone(urls), settings.policy(role))
        self.discovery = Discovery(self.pool, settings, self.look_up)
        self.admin = Admin(self.pool, self.discovery)

    async def look_up(self, host: str, port: int) -> Collection[str]:
        self.asked.append((host, port))
        if isinstance(self.addresses, Exception):
            raise self.addresses
        return self.addresses

    def urls(self, role: Role = Role.PREFILL) -> list[str]:
        return [worker.url for worker in self.pool.workers(role)]


async def test_a_name_stands_for_an_engine_at_each_of_its_addresses() -> None:
    world = World()
    assert world.urls() == []
    await world.discovery.refresh()
    assert world.asked == [("engines.local", 8100)]
    assert world.urls() == ["http://10.0.0.1:8100", "http://10.0.0.2:8100"]
    assert world.joined == world.pool.workers(Role.PREFILL)
    assert world.urls(Role.DECODE) == ["http://d0"]


async def test_an_address_that_is_new_joins_and_one_that_is_gone_leaves() -> None:
    world = World()
    await world.discovery.refresh()
    kept, gone = world.pool.workers(Role.PREFILL)
    world.addresses = ["10.0.0.1", "fd00::7"]
    with gone.leg():
        await world.discovery.refresh()
        assert world.urls() == ["http://10.0.0.1:8100", "http://[fd00::7]:8100"]
        assert world.pool.workers(Role.PREFILL)[0] is kept
        assert world.left == [gone]
        assert gone.in_flight == 1
    assert not gone.ready


@pytest.mark.parametrize("failure", [OSError("no such host"), TimeoutError(), UnicodeError("label too long")])
async def test_a_failing_look_up_changes_nothing(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    await world.discovery.refresh()
    before = world.pool.workers()
    world.addresses = failure
    await world.discovery.refresh()
    assert world.pool.workers() == before
    assert "stay as they are" in caplog.text


async def test_names_are_looked_up_again_and_again() -> None:
    world = World()
    world.discovery._settings = RouterSettings(prefill=(NAME,), decode=("http://d0",), resolve_seconds=0.001)
    await world.discovery.start()
    world.addresses = ["10.0.0.9"]
    while world.urls() != ["http://10.0.0.9:8100"]:  # noqa: ASYNC110 - the test's time-out is the bound
        await asyncio.sleep(0)
    await world.discovery.close()


async def test_a_new_list_adds_and_takes_away_and_keeps_who_is_on_both() -> None:
    world = World(prefill=["http://p0", "http://p1"])
    stays = world.pool.workers(Role.PREFILL)[1]
    world.discovery.apply(["http://p1", "http://p2"], ["http://d0"])
    assert world.urls() == ["http://p1", "http://p2"]
    assert world.pool.workers(Role.PREFILL)[0] is stays


@pytest.mark.parametrize(
    ("urls", "problem"),
    [([], "at least one"), (["ftp://x"], "not a base URL"), (["http://a", "http://a"], "twice")],
)
async def test_a_bad_list_changes_nothing(urls: list[str], problem: str) -> None:
    world = World(prefill=["http://p0"])
    with pytest.raises(UsageError, match=problem):
        world.discovery.apply(["http://p9"], urls)
    assert world.urls() == ["http://p0"]


def test_a_name_with_a_certificate_is_refused() -> None:
    with pytest.raises(UsageError, match="certificate"):
        RouterSettings(prefill=("dns+https://engines.local",), decode=("http://d",))


async def test_ranks_belong_to_their_url() -> None:
    world = World(prefill=["http://p0"])
    world.pool.join(Worker("http://p0", Role.PREFILL, 1))
    world.discovery.apply(["http://p0"], ["http://d0"])
    assert len(world.pool.workers(Role.PREFILL)) == 2
    world.discovery.apply(["http://p1"], ["http://d0"])
    assert world.urls() == ["http://p1"]


async def test_an_administrators_engine_outlives_new_lists() -> None:
    world = World(prefill=["http://p0"])
    (shown,) = world.admin.add("prefill", "http://p7/")
    assert shown["url"] == "http://p7"
    assert shown["origin"] == Origin.ADMIN
    world.discovery.apply(["http://p1"], ["http://d0"])
    assert world.urls() == ["http://p7", "http://p1"]


async def test_what_an_administrator_has_removed_comes_back_with_the_next_list_only() -> None:
    world = World()
    await world.discovery.refresh()
    world.admin.remove(None, "http://10.0.0.1:8100")
    await world.discovery.refresh()
    assert world.urls() == ["http://10.0.0.2:8100"]
    world.discovery.apply([NAME], ["http://d0"])
    assert world.urls() == ["http://10.0.0.2:8100", "http://10.0.0.1:8100"]


async def test_a_drained_engine_gets_nothing_new_until_it_is_added_again() -> None:
    world = World(decode=["http://d0", "http://d1"])
    for worker in world.pool.workers():
        world.pool.alive(worker)
    (shown,) = world.admin.drain("decode", "http://d0")
    assert shown["draining"]
    assert shown["problem"] == "is being drained"
    world.pool.alive(world.pool.workers(Role.DECODE)[0])
    assert {world.pool.choose(Role.DECODE) for _ in range(4)} == {world.pool.workers(Role.DECODE)[1]}
    (shown,) = world.admin.add("decode", "http://d0")
    assert shown["ready"]
    assert len(world.pool.workers(Role.DECODE)) == 2


async def test_a_worker_in_both_roles_is_named_by_role_or_taken_in_both() -> None:
    world = World(prefill=["http://x"], decode=["http://x", "http://d"])
    assert len(world.admin.drain(None, "http://x")) == 2
    assert len(world.admin.remove("decode", "http://x")) == 1
    assert world.urls() == ["http://x"]


async def test_removing_now_ends_what_is_open() -> None:
    world = World()
    (worker,) = world.pool.workers(Role.DECODE)
    aborted = []

    class Stream:
        reads = 5

        def abort(self) -> None:
            aborted.append(self)

    with worker.leg() as leg:
        leg.stream = Stream()
        world.admin.remove("decode", "http://d0")
        assert not aborted
        assert worker.gone
    world.admin.add("decode", "http://d0")
    (worker,) = world.pool.workers(Role.DECODE)
    with worker.leg() as leg:
        leg.stream = Stream()
        world.admin.remove("decode", "http://d0", now=True)
        assert len(aborted) == 1


@pytest.mark.parametrize(
    ("role", "url", "param"),
    [
        ("both", "http://a", "role"),
        (None, "http://a", "role"),
        (["prefill"], "http://a", "role"),
        ("prefill", 5, "url"),
        ("prefill", "a", "url"),
        ("prefill", "http://a/v1", "url"),
        ("prefill", NAME, "url"),
    ],
)
async def test_a_bad_engine_is_a_400_that_names_the_field(role: Any, url: Any, param: str) -> None:
    world = World()
    before = world.pool.workers()
    with pytest.raises(RequestError) as caught:
        world.admin.add(role, url)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert world.pool.workers() == before


async def test_an_unknown_worker_is_a_404() -> None:
    world = World()
    for act in (world.admin.drain, world.admin.remove):
        with pytest.raises(RequestError) as caught:
            act(None, "http://nobody")
        assert caught.value.status == 404


async def test_the_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.engines.pool.WORKERS_MAX", 2)
    world = World(prefill=["http://p0"])
    with pytest.raises(RequestError) as caught:
        world.admin.add("prefill", "http://p1")
    assert caught.value.status == 400
