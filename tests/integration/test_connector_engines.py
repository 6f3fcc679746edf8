"""Two real vLLM engines with FerryConnector over NIXL, driven as a router would, without one.

The reference is the prefill engine itself, asked to answer alone: the same weights and arithmetic.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
from random import Random

import aiohttp
import pytest

from tests.support.engine_processes import EngineProcess, Fleet, complete, metric, tokens

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines") / "model"
    subprocess.run([sys.executable, "-m", "kvferry.cli.main", "tiny-model", str(directory)], check=True)
    return directory


@pytest.fixture(scope="module")
def engines(model):
    producer = EngineProcess(model, model.parent / "p.log", "kv_producer", "p", core="0")
    consumer = EngineProcess(model, model.parent / "d.log", "kv_consumer", "d", core="1")
    producer.start()
    consumer.start()
    try:
        producer.wait_ready()
        consumer.wait_ready()
        yield producer, consumer
    finally:
        producer.stop()
        consumer.stop()


@pytest.fixture
async def fleet(engines):
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        yield Fleet(session, *engines)


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 300, 1500])
async def test_pushed_answers_equal_the_reference(fleet, count):
    prompt = tokens(count, seed=count)
    before = await fleet.received()
    answer = await fleet.both(prompt)
    assert answer.status == 200
    assert answer.texts == (await fleet.reference(prompt)).texts
    await fleet.until(fleet.settled)
    assert await fleet.received() - before == (1 if count > 1 else 0)


async def test_chunks_leave_while_later_ones_are_computed(fleet):
    name = "kvferry_bytes_before_prefill_end_total"
    early = await metric(fleet.session, fleet.producer.url, name)
    total = await metric(fleet.session, fleet.producer.url, "kvferry_transfer_bytes_total")
    prompt = tokens(1800, seed=99)
    transfer = secrets.token_hex(16)
    waiting = asyncio.create_task(fleet.decode(prompt, transfer))
    await fleet.until(fleet.receiving)
    await fleet.prefill(prompt, transfer)
    assert (await waiting).status == 200
    await fleet.until(fleet.settled)
    early = await metric(fleet.session, fleet.producer.url, name) - early
    total = await metric(fleet.session, fleet.producer.url, "kvferry_transfer_bytes_total") - total
    assert early * 2 >= total > 0


async def test_kv_may_be_computed_before_the_consumer_comes(fleet):
    prompt, transfer = tokens(400, seed=7), secrets.token_hex(16)
    prefilled = await fleet.prefill(prompt, transfer)
    assert prefilled.body["kv_transfer_params"]["transfer_id"] == transfer
    answer = await fleet.decode(prompt, transfer)
    assert answer.texts == (await fleet.reference(prompt)).texts
    await fleet.until(fleet.settled)


async def test_a_prefix_on_either_side_changes_nothing(fleet):
    stem = tokens(384, seed=11)
    await complete(fleet.session, fleet.consumer.url, prompt=stem, max_tokens=1)
    await complete(fleet.session, fleet.producer.url, prompt=stem[:256], max_tokens=1)
    for tail in (1, 60, 200):
        prompt = stem + tokens(tail, seed=12 + tail)
        answer = await fleet.both(prompt)
        assert answer.texts == (await fleet.reference(prompt)).texts
    await fleet.until(fleet.settled)


async def test_several_choices_share_one_prefill(fleet):
    """P19: both children get their KV, one prefill, nothing is left."""
    prompt = tokens(300, seed=21)
    answer = await fleet.both(prompt, n=2, temperature=1, top_k=1)
    (alone,) = (await fleet.reference(prompt)).texts
    assert answer.texts == [alone, alone]
    await fleet.until(fleet.settled)


BAD = [
    ({"remote_engine_id": None}, "remote_engine_id"),
    ({"remote_port": 10**9}, "remote_port"),
    ({"remote_port": "x"}, "remote_port"),
    ({"tp_size": 10**9}, "tp_size"),
    ({"pp_size": -1}, "pp_size"),
    ({"transfer_id": "short"}, "transfer_id"),
    ({"transfer_id": 7}, "transfer_id"),
    ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
    ({"transfer_mode": "pull"}, "transfer_mode"),
    ({"do_remote_prefill": False, "do_remote_decode": True}, "do_remote_decode"),
]


@pytest.mark.parametrize(("changes", "field"), BAD)
async def test_malformed_params_are_an_error_for_that_request(fleet, changes, field):
    """S01, V01, X02: HTTP 400 that names the key; the engine goes on serving."""
    params = await fleet.source() | {"transfer_id": secrets.token_hex(16)} | changes
    answer = await complete(
        fleet.session, fleet.consumer.url, prompt=[5, 6], max_tokens=2, kv_transfer_params=params
    )
    assert answer.status == 400
    assert field in answer.body["error"]["message"]
    after = await complete(fleet.session, fleet.consumer.url, prompt=[5, 6], max_tokens=2)
    assert after.status == 200


async def test_a_rejected_decode_leg_releases_the_producer(fleet):
    """P17: the consumer refuses the request before admission; the producer does not wait for its lease."""
    transfer = secrets.token_hex(16)
    await fleet.prefill(tokens(300, seed=31), transfer)
    answer = await fleet.decode(tokens(4000, seed=31), transfer)
    assert answer.status == 400
    await fleet.until(fleet.settled)


async def test_an_unknown_producer_is_recomputed(fleet):
    """V03: nobody answers at that address; the request runs here within the handshake's bound."""
    prompt = tokens(200, seed=41)
    params = await fleet.source() | {"transfer_id": secrets.token_hex(16), "remote_port": 1}
    answer = await complete(
        fleet.session, fleet.consumer.url, prompt=prompt, max_tokens=8, kv_transfer_params=params
    )
    assert answer.texts == (await fleet.reference(prompt)).texts
    await fleet.until(fleet.settled)


async def test_mixed_load_with_disconnects(fleet):
    """P02, P44: random clients leave; every answer equals the reference, afterwards nothing is held."""
    random = Random(5)
    stems = [tokens(256, seed=50 + number) for number in range(3)]
    slots = asyncio.Semaphore(8)

    async def one(number):
        stem = random.choice(stems)[: random.randrange(256)]
        prompt = stem + tokens(random.randrange(1, 500), number)
        leaves = random.random() < 0.3
        async with slots:
            if leaves:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(fleet.both(prompt), random.random())
                return
            answer = await fleet.both(prompt)
            assert answer.status == 200
            assert answer.texts == (await fleet.reference(prompt)).texts

    await asyncio.gather(*(one(number) for number in range(60)))
    await fleet.until(fleet.settled)


async def test_a_killed_producer_is_recomputed_and_comes_back(fleet):
    """P04, P47: D answers by itself, keeps serving, and uses P again once it is back."""
    prompt, transfer = tokens(600, seed=61), secrets.token_hex(16)
    expected = (await fleet.reference(prompt)).texts
    waiting = asyncio.create_task(fleet.decode(prompt, transfer))
    await fleet.until(fleet.receiving)
    fleet.producer.kill()
    async with asyncio.timeout(60):
        answer = await waiting
    assert answer.texts == expected
    assert (await complete(fleet.session, fleet.consumer.url, prompt=[5, 6], max_tokens=2)).status == 200
    fleet.producer.start()
    await asyncio.to_thread(fleet.producer.wait_ready)
    fleet.forget_source()
    again = tokens(500, seed=62)
    before = await fleet.received()
    answer = await fleet.both(again)
    assert answer.texts == (await fleet.reference(again)).texts
    assert await fleet.received() == before + 1
