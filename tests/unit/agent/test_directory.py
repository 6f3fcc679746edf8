"""The side channel over real sockets of the loopback interface, and its documents."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import msgspec
import pytest
import zmq

from kvferry.agent.directory import (
    NONCE_BYTES,
    REQUEST_BYTES_MAX,
    Answer,
    Ask,
    Challenge,
    Directory,
    NotReady,
    Prove,
    RankEntry,
    Refused,
    client_proof,
    decode_directory,
    decode_request,
    decode_response,
    encode,
    server_proof,
)
from kvferry.agent.directory_client import DirectoryClient
from kvferry.agent.directory_server import DirectoryServer
from kvferry.agent.links import Resolver
from kvferry.cli.ports import free_ports
from kvferry.errors import PeerError, PeerGoneError, TransportError, UsageError
from kvferry.ids import EngineId, Incarnation

ENGINE = EngineId("engine-1")
HOST = "127.0.0.1"
SECRET = "open sesame"
WAIT_SECONDS = 15.0
"""Only a broken run waits for so long."""


def directory(engine: str = ENGINE, tp: int = 2, pp: int = 1, metadata: bytes = b"meta") -> Directory:
    ranks = tuple(
        RankEntry(pp=at, tp=rank, peer=f"{engine}/{at}/{rank}", metadata=metadata, cache=b"cache")
        for at in range(pp)
        for rank in range(tp)
    )
    return Directory(
        engine=EngineId(engine), incarnation=Incarnation("life"), tp_size=tp, pp_size=pp, ranks=ranks
    )


class Asked:
    """The results of lookups, in the order in which they came."""

    def __init__(self) -> None:
        self.results: queue.Queue[tuple[str, Directory | Exception]] = queue.Queue()

    def named(self, name: str = "") -> Callable[[Directory | Exception], None]:
        return lambda result: self.results.put((name, result))

    def next(self) -> tuple[str, Directory | Exception]:
        return self.results.get(timeout=WAIT_SECONDS)

    def result(self) -> Directory | Exception:
        return self.next()[1]


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def server() -> Iterator[DirectoryServer]:
    server = DirectoryServer(HOST, 0)
    server.publish(directory())
    yield server
    server.close()


@pytest.fixture
def client() -> Iterator[DirectoryClient]:
    client = DirectoryClient()
    yield client
    client.close()


@contextmanager
def dealer_to(server: DirectoryServer) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
    stranger.connect(f"tcp://{HOST}:{server.port}")
    yield stranger
    context.destroy(linger=0)


@contextmanager
def impostor(*responses: list[bytes] | Callable[[bytes], bytes]) -> Iterator[int]:
    """A server that answers requests with `responses`, in order; yields its port."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
    port = router.bind_to_random_port(f"tcp://{HOST}")

    def serve() -> None:
        for response in responses:
            who, request = router.recv_multipart()
            router.send_multipart([who, *(response if isinstance(response, list) else [response(request)])])

    thread = threading.Thread(target=serve)
    thread.start()
    yield port
    thread.join(WAIT_SECONDS)
    context.destroy(linger=0)


# --- documents -------------------------------------------------------------------------------------


def test_a_directory_survives_the_trip():
    document = directory(tp=2, pp=3)
    assert decode_directory(encode(document)) == document


@pytest.mark.parametrize(
    "change",
    [
        {"tp_size": 3},
        {"pp_size": 2},
        {"tp_size": 1},
        {"ranks": ()},
        {"tp_size": 0, "ranks": ()},
        {"ranks": directory().ranks[:1] * 2},
        {"tp_size": -2, "pp_size": -1},
        {"version": 2},
    ],
)
def test_a_directory_that_contradicts_itself_is_refused(change):
    with pytest.raises(PeerError, match=r"engine-1|version"):
        decode_directory(encode(msgspec.structs.replace(directory(), **change)))


def test_random_bytes_are_a_peer_error_everywhere():
    """S03: bytes that are no document of ours are refused by every decoder."""
    random = Random(1)
    for _ in range(500):
        blob = random.randbytes(random.randrange(60))
        for decode in (decode_request, decode_response, decode_directory):
            with pytest.raises(PeerError):
                decode(blob)
    with pytest.raises(PeerError, match="nonce"):
        decode_request(encode(Ask(nonce=b"short")))


def test_proofs_depend_on_the_secret_the_role_and_every_part():
    """S06: a proof of one exchange is worth nothing in another."""
    one, two = bytes(NONCE_BYTES), bytes([1]) * NONCE_BYTES
    proofs = [
        client_proof(SECRET, one, two),
        client_proof("other", one, two),
        client_proof(SECRET, two, one),
        server_proof(SECRET, one, two, b""),
        server_proof(SECRET, one, two, b"document"),
    ]
    assert len(set(proofs)) == len(proofs)


# --- asking ----------------------------------------------------------------------------------------


def test_a_directory_is_read(server, client, asked):
    resolver: Resolver = client
    resolver.resolve(HOST, server.port, ENGINE, asked.named())
    assert asked.result() == directory()
    assert server.snapshot()["answered"] == 1


def test_it_works_over_ipv6(client, asked):
    """O04: bind, advertise and connect by IPv6, with and without brackets."""
    server = DirectoryServer("[::1]", 0)
    server.publish(directory())
    client.resolve("::1", server.port, ENGINE, asked.named())
    assert asked.result() == directory()
    client.resolve("[::1]", server.port, ENGINE, asked.named())
    assert asked.result() == directory()
    server.close()


def test_a_new_directory_replaces_the_old_one(server, client, asked):
    newer = msgspec.structs.replace(directory(), incarnation=Incarnation("another life"))
    server.publish(newer)
    client.resolve(HOST, server.port, ENGINE, asked.named())
    assert asked.result() == newer


def test_another_engine_at_the_address_is_an_error_that_names_both(server, client, asked):
    """A05: a lookup of an engine that has ended fails cleanly."""
    client.resolve(HOST, server.port, EngineId("engine-0"), asked.named())
    error = asked.result()
    assert isinstance(error, PeerError)
    assert "'engine-1'" in str(error)
    assert "'engine-0'" in str(error)


def test_an_engine_that_is_not_ready_is_asked_again(client, asked):
    """O10: the answer comes when the engine has started."""
    server = DirectoryServer(HOST, 0)
    client.resolve(HOST, server.port, ENGINE, asked.named())
    with dealer_to(server) as stranger:
        stranger.send(encode(Ask(nonce=bytes(NONCE_BYTES))))
        assert decode_response(stranger.recv()) == NotReady()
    server.publish(directory())
    assert asked.result() == directory()
    server.close()


def test_an_engine_that_is_not_there_yet_is_waited_for(client, asked):
    """O10: connection refused is not the end."""
    probe = socket.create_server((HOST, 0))
    port = probe.getsockname()[1]
    probe.close()
    client.resolve(HOST, port, ENGINE, asked.named())
    server = DirectoryServer(HOST, port)
    server.publish(directory())
    assert asked.result() == directory()
    server.close()


@pytest.mark.parametrize("ready", [True, False])
def test_the_deadline_ends_a_lookup(asked, ready):
    """O10, O03: the failure wakes the waiter, says what is wrong, and what a loopback address means."""
    # An engine that answers gets the time to do so on a busy machine.
    client = DirectoryClient(deadline_seconds=1.0 if ready else 0.2)
    listener = socket.create_server((HOST, 0))
    server = DirectoryServer(HOST, 0)
    port = server.port if ready else listener.getsockname()[1]
    client.resolve(HOST, port, ENGINE, asked.named())
    error = asked.result()
    assert isinstance(error, TransportError)
    assert error.retryable
    assert f"engine-1 at {HOST}:{port}" in str(error)
    assert "loopback" in str(error)
    if ready:
        assert "is reachable but not ready within 1 s" in str(error)
    client.close()
    server.close()
    listener.close()


def test_dead_peers_do_not_delay_the_others(server, client, asked):
    """P05: a hundred peers that never answer, and one that does."""
    dead = socket.create_server((HOST, 0))
    for number in range(100):
        client.resolve(HOST, dead.getsockname()[1], EngineId(f"dead-{number}"), asked.named("dead"))
    client.resolve(HOST, server.port, ENGINE, asked.named("alive"))
    assert asked.next() == ("alive", directory())
    client.close()
    ended = [asked.next() for _ in range(100)]
    assert all(name == "dead" and isinstance(result, TransportError) for name, result in ended)
    dead.close()


def test_lookups_of_one_engine_are_one(client, asked):
    server = DirectoryServer(HOST, 0)
    server.publish(directory())
    # The client's lock is held, so that all are in the queue before its thread looks.
    with client._mail.lock:
        for number in range(10):
            client._mail.wanted.append(((HOST, server.port, ENGINE), asked.named(str(number))))
    client.resolve(HOST, server.port, ENGINE, asked.named("last"))
    names = [asked.next() for _ in range(11)]
    assert [name for name, _ in names] == [*map(str, range(10)), "last"]
    assert all(result == directory() for _, result in names)
    assert server.snapshot()["answered"] == 1
    server.close()


def test_too_many_lookups_are_refused(asked):
    client = DirectoryClient(lookups_max=1)
    dead = socket.create_server((HOST, 0))
    client.resolve(HOST, dead.getsockname()[1], ENGINE, asked.named("first"))
    client.resolve(HOST, dead.getsockname()[1], EngineId("other"), asked.named("second"))
    name, error = asked.next()
    assert name == "second"
    assert isinstance(error, TransportError)
    assert error.retryable
    client.close()
    dead.close()


@pytest.mark.parametrize("host", ["", "a b", "x;y", "tcp://x", "*", "1:2", "h" * 300])
def test_an_impossible_address_fails_that_lookup_alone(server, client, asked, host):
    """S01: the address comes from HTTP; what is no address ends in an error for that request."""
    client.resolve(host, server.port, ENGINE, asked.named())
    assert isinstance(asked.result(), UsageError)
    client.resolve(HOST, server.port, ENGINE, asked.named())
    assert asked.result() == directory()


def test_an_answer_over_the_limit_is_not_read(server, asked):
    for size, deadline_seconds, kind in ((2000, 0.3, TransportError), (100, 10.0, Directory)):
        client = DirectoryClient(deadline_seconds=deadline_seconds, response_bytes_max=1000)
        server.publish(directory(metadata=bytes(size)))
        client.resolve(HOST, server.port, ENGINE, asked.named())
        assert isinstance(asked.result(), kind)
        client.close()


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ([b"nonsense"], "not a directory's response"),
        ([b"a", b"b"], "2 frames"),
        ([b""], "not a directory's response"),
        ([encode(Answer(directory=b"nonsense"))], "not a directory"),
        ([encode(Refused(reason="no\n" * 500))], "refused: no"),
        ([encode(Challenge(nonce=bytes(NONCE_BYTES)))], "asks for a shared secret"),
    ],
)
def test_an_impostors_answer_is_a_peer_error(client, asked, response, problem):
    with impostor(response) as port:
        client.resolve(HOST, port, ENGINE, asked.named())
        error = asked.result()
        assert isinstance(error, PeerError)
        assert problem in str(error)
        assert len(str(error)) < 400


def test_an_idle_client_has_no_timer_and_no_thread_before_its_first_lookup(server, asked):
    """G09: nothing wakes an idle client."""
    client = DirectoryClient()
    assert client._mail.thread is None
    client.resolve(HOST, server.port, ENGINE, asked.named())
    assert asked.result() == directory()
    assert client._timeout_milliseconds() is None
    client.close()


def test_close_is_idempotent_and_later_lookups_fail(asked):
    for used in (False, True):
        client = DirectoryClient()
        if used:
            client.resolve("a b", 1, ENGINE, asked.named())
            assert isinstance(asked.result(), UsageError)
        client.close()
        client.close()
        client.resolve(HOST, 1, ENGINE, asked.named())
        assert isinstance(asked.result(), TransportError)


# --- is an engine that was there still there? ------------------------------------------------------


def free_port() -> int:
    return free_ports(1)[0]


def test_an_impatient_lookup_of_an_engine_that_is_there_reads_its_directory(server, client, asked):
    """A05: also when it is another incarnation by now; who asks compares the names."""
    client.resolve(HOST, server.port, ENGINE, asked.named(), patient=False)
    assert asked.result() == directory()
    anew = msgspec.structs.replace(directory(), incarnation=Incarnation("next life"))
    server.publish(anew)
    client.resolve(HOST, server.port, ENGINE, asked.named(), patient=False)
    assert asked.result() == anew


@pytest.mark.parametrize("host", [HOST, "localhost"])
def test_an_impatient_lookup_is_over_when_nobody_listens(asked, host):
    """P47: a patient one would go on until its deadline, which is far away here."""
    client = DirectoryClient(deadline_seconds=10_000.0)
    port = free_port()
    client.resolve(host, port, ENGINE, asked.named(), patient=False)
    error = asked.result()
    assert isinstance(error, PeerGoneError)
    assert f"{host}:{port}" in str(error)
    assert "engine-1" in str(error)
    client.close()


def test_an_impatient_lookup_of_what_listens_and_says_nothing_proves_nothing(asked):
    """P47: a frozen process is not a dead one."""
    client = DirectoryClient(deadline_seconds=0.2)
    listener = socket.create_server((HOST, 0))
    client.resolve(HOST, listener.getsockname()[1], ENGINE, asked.named(), patient=False)
    error = asked.result()
    assert isinstance(error, TransportError)
    assert not isinstance(error, PeerGoneError)
    client.close()
    listener.close()


def test_an_impatient_lookup_of_another_engine_is_an_error_that_names_both(server, client, asked):
    client.resolve(HOST, server.port, EngineId("engine-0"), asked.named(), patient=False)
    error = asked.result()
    assert isinstance(error, PeerError)
    assert "'engine-1'" in str(error)


@pytest.mark.parametrize("used", [False, True])
def test_an_impatient_lookup_after_the_end_is_answered_too(asked, used):
    """P66: a connection that breaks while the agent closes must not break its thread."""
    client = DirectoryClient()
    if used:
        client.resolve(HOST, free_port(), ENGINE, asked.named(), patient=False)
        assert isinstance(asked.result(), PeerGoneError)
    client.close()
    client.close()
    client.resolve(HOST, free_port(), ENGINE, asked.named(), patient=False)
    error = asked.result()
    assert isinstance(error, TransportError)
    assert not isinstance(error, PeerGoneError)


# --- serving ---------------------------------------------------------------------------------------


def test_a_taken_port_is_an_error_at_start_that_names_port_and_setting(server):
    """O01: the start fails, and says which setting to change."""
    with pytest.raises(UsageError, match=f"port {server.port} of 127.0.0.1 is taken; set VLLM_PORT "):
        DirectoryServer(HOST, server.port, port_setting="VLLM_PORT")
    other = DirectoryServer(HOST, 0)
    assert other.port not in (0, server.port)
    other.close()


def test_an_address_of_another_host_cannot_be_bound():
    with pytest.raises(UsageError, match=r"cannot bind 192\.0\.2\.1:0: .*check side_channel_host"):
        DirectoryServer("192.0.2.1", 0)
    with pytest.raises(UsageError, match="side_channel_host"):
        DirectoryServer("a b", 0)


def test_bind_and_advertised_address_are_separate_settings(caplog):
    """O03: what is advertised may differ; loopback is warned about."""
    with caplog.at_level(logging.WARNING):
        server = DirectoryServer(HOST, 0, advertise_host="10.1.2.3")
        assert (server.host, server.advertise_host) == (HOST, "10.1.2.3")
        server.close()
        assert caplog.records == []
        server = DirectoryServer("localhost", 0)
        server.close()
    assert "only engines on this host can reach it" in caplog.text


def test_a_closed_server_frees_its_port():
    server = DirectoryServer(HOST, 0)
    server.close()
    server.close()
    assert not server._thread.is_alive()
    again = DirectoryServer(HOST, server.port)
    assert again.port == server.port
    again.close()


def test_publish_refuses_a_directory_that_clients_would_refuse():
    server = DirectoryServer(HOST, 0)
    with pytest.raises(PeerError):
        server.publish(msgspec.structs.replace(directory(), ranks=()))
    server.close()


def test_strangers_never_stop_the_server(server, client, asked):
    """S03: random frames, too many, too large; the next good request is answered."""
    random = Random(7)
    with dealer_to(server) as stranger:
        for _ in range(1000):
            stranger.send_multipart(
                [random.randbytes(random.randrange(80)) for _ in range(random.randint(1, 4))]
            )
        stranger.send(encode(Ask(nonce=b"wrong")))
        # One connection is one queue: the answer to the good request comes after all of the above.
        stranger.send(encode(Ask(nonce=bytes(NONCE_BYTES))))
        assert decode_response(stranger.recv()) == Answer(directory=encode(directory()))
    assert server.snapshot()["ignored"] == 1001
    with dealer_to(server) as stranger:
        stranger.send(bytes(1 << 20))
        client.resolve(HOST, server.port, ENGINE, asked.named())
        assert asked.result() == directory()
    assert server.snapshot()["ignored"] == 1001, f"frames over {REQUEST_BYTES_MAX} bytes are not even read"


def test_bytes_that_are_not_zeromq_never_stop_the_server(server, client, asked):
    """S04: a scanner, a scraper, a greeting cut short."""
    random = Random(8)
    for greeting in (
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        random.randbytes(5000),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03",
        b"",
    ):
        with socket.create_connection((HOST, server.port), timeout=WAIT_SECONDS) as stranger:
            stranger.sendall(greeting)
    client.resolve(HOST, server.port, ENGINE, asked.named())
    assert asked.result() == directory()


# --- the shared secret -----------------------------------------------------------------------------


@pytest.fixture
def guarded() -> Iterator[DirectoryServer]:
    server = DirectoryServer(HOST, 0, secret=SECRET)
    server.publish(directory())
    yield server
    server.close()


def test_with_the_same_secret_the_directory_is_read(guarded, asked):
    """S06: both sides prove that they have it."""
    client = DirectoryClient(secret=SECRET)
    client.resolve(HOST, guarded.port, ENGINE, asked.named())
    assert asked.result() == directory()
    client.close()


def test_a_wrong_secret_gets_no_metadata_and_is_logged_and_counted(guarded, asked, caplog):
    """S06: the peer's address is in the log, no key is."""
    client = DirectoryClient(secret="wrong key")
    with caplog.at_level(logging.DEBUG):
        client.resolve(HOST, guarded.port, ENGINE, asked.named())
        error = asked.result()
    assert isinstance(error, PeerError)
    assert "secret is wrong" in str(error)
    assert guarded.snapshot()["refused"] == 1
    assert guarded.snapshot()["answered"] == 0
    assert f"{HOST} has not proven" in caplog.text
    assert SECRET not in caplog.text
    assert "wrong key" not in caplog.text
    client.close()


def test_a_client_without_the_secret_is_told_that_one_is_needed(guarded, client, asked):
    client.resolve(HOST, guarded.port, ENGINE, asked.named())
    error = asked.result()
    assert isinstance(error, PeerError)
    assert "set the same side_channel_secret" in str(error)


def test_a_proof_cannot_be_used_twice_or_without_a_challenge(guarded):
    """S06: each challenge is good for one proof."""
    nonce = bytes(NONCE_BYTES)
    with dealer_to(guarded) as stranger:
        stranger.send(encode(Prove(nonce=nonce, proof=client_proof(SECRET, nonce, nonce))))
        assert isinstance(decode_response(stranger.recv()), Refused)
        stranger.send(encode(Ask(nonce=nonce)))
        challenge = decode_response(stranger.recv())
        assert isinstance(challenge, Challenge)
        prove = encode(Prove(nonce=nonce, proof=client_proof(SECRET, nonce, challenge.nonce)))
        stranger.send(prove)
        assert isinstance(decode_response(stranger.recv()), Answer)
        stranger.send(prove)
        assert isinstance(decode_response(stranger.recv()), Refused)


def test_a_server_that_cannot_prove_the_secret_is_not_believed(asked):
    """S06: an impostor, with or without a challenge, and an honest engine that lacks the secret."""
    document = encode(directory())
    challenge = [encode(Challenge(nonce=bytes(NONCE_BYTES)))]
    for responses in (
        [[encode(Answer(directory=document))]],
        [challenge, [encode(Answer(directory=document, proof=bytes(32)))]],
        [challenge, challenge],
    ):
        client = DirectoryClient(secret=SECRET)
        with impostor(*responses) as port:
            client.resolve(HOST, port, ENGINE, asked.named())
            assert isinstance(asked.result(), PeerError)
        client.close()
