"""Reads directories of other engines, many at a time, on one thread that sleeps while it has nothing to read.

Every lookup has its own socket and its own deadlines, and the thread waits for all of them at once, so a peer
that is slow or dead delays no other. Implements `agent.links.Resolver`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvferry.agent.addresses import format_address, is_loopback
from kvferry.agent.directory import (
    NONCE_BYTES,
    RESPONSE_BYTES_MAX,
    Answer,
    Ask,
    Challenge,
    Directory,
    NotReady,
    Prove,
    Refused,
    client_proof,
    decode_directory,
    decode_response,
    encode,
    same_proof,
    server_proof,
)
from kvferry.agent.probe import Prober
from kvferry.errors import KvferryError, PeerError, PeerGoneError, TransportError
from kvferry.ids import EngineId

logger = logging.getLogger(__name__)

Callback = Callable[[Directory | Exception], None]
Key = tuple[str, int, EngineId]

DEADLINE_SECONDS = 10.0
ATTEMPT_SECONDS = 2.0
"""So long one request may stay without an answer before it is made again on a new connection."""
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.05, 1.0
"""Between two questions to an engine that is not ready; doubles each time."""
LOOKUPS_MAX = 256
CLOSE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class _Lookup:
    """One engine that is being asked, for all who want to know."""

    key: Key
    deadline: float
    callbacks: list[Callback]
    socket: zmq.Socket[bytes] | None = None
    next_at: float = 0.0
    """When to ask (again)."""
    pause_seconds: float = PAUSE_SECONDS_MIN
    nonce: bytes = b""
    challenge: bytes | None = None
    state: str = "has not answered"
    """For the error at the deadline."""


@dataclass(slots=True)
class _Mail:
    """What other threads leave for the client's thread, under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    wanted: deque[tuple[Key, Callback]] = field(default_factory=deque)
    closing: bool = False
    thread: threading.Thread | None = None


class DirectoryClient:
    """Looks directories up. `resolve` from any thread; `close` once."""

    def __init__(
        self,
        *,
        secret: str | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        lookups_max: int = LOOKUPS_MAX,
        response_bytes_max: int = RESPONSE_BYTES_MAX,
    ) -> None:
        """Make a client; its thread starts with the first lookup.

        Args:
            secret: shared by all engines; with it, an engine that cannot prove it is not believed.
            deadline_seconds: after so long a lookup fails.
            lookups_max: engines that can be asked at one time; more are refused (`retryable`).
            response_bytes_max: the longest answer that is read.
        """
        self._secret = secret or None
        self._deadline_seconds = deadline_seconds
        self._lookups_max = lookups_max
        self._response_bytes_max = response_bytes_max
        self._mail = _Mail()
        self._lookups: dict[Key, _Lookup] = {}
        self._poller = zmq.Poller()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._prober = Prober()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)

    def resolve(
        self, host: str, port: int, engine: EngineId, callback: Callback, *, patient: bool = True
    ) -> None:
        """Call `callback` once, from a thread of the client's, with the directory or why there is none.

        The error is a `TransportError` when the engine cannot be reached in time, or this client is full or
        closed, a `PeerError` when what answers is not that engine, and a `UsageError` when the address is
        impossible. Lookups of the same engine at the same address are one. `callback` must not raise.

        A patient lookup waits for an engine that is starting; an impatient one ends with a `PeerGoneError`
        as soon as its connection is refused.
        """
        if patient:
            self._look_up(host, port, engine, callback)
            return

        def judge(refused: bool) -> None:
            if refused:
                where = format_address(host, port)
                callback(PeerGoneError(f"nobody listens at {where}, where engine {engine} was"))
            else:
                self._look_up(host, port, engine, callback)

        self._prober.ask(host, port, judge)

    def _look_up(self, host: str, port: int, engine: EngineId, callback: Callback) -> None:
        with self._mail.lock:
            if not self._mail.closing:
                self._mail.wanted.append(((host, port, engine), callback))
                if self._mail.thread is None:
                    self._mail.thread = threading.Thread(
                        target=self._run, name="kvferry-resolver", daemon=True
                    )
                    self._mail.thread.start()
                self._ring()
                return
        callback(TransportError(f"the directory of {engine} was asked for after the end"))

    def close(self) -> None:
        """Stop; lookups that are under way fail. Idempotent, bounded."""
        self._prober.close()
        with self._mail.lock:
            already, self._mail.closing = self._mail.closing, True
            thread = self._mail.thread
            if not already:
                self._ring()
        if thread is not None:
            thread.join(CLOSE_SECONDS)
        self._wake.close()
        if thread is None:
            self._woken.close()

    def _ring(self) -> None:
        # A full buffer means that the thread has been rung for already.
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"x")

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._context = zmq.Context()
        self._poller.register(self._woken, zmq.POLLIN)
        while self._step():
            pass
        for lookup in list(self._lookups.values()):
            self._end(lookup, TransportError(f"the lookup of {lookup.key[2]} was ended by our own shutdown"))
        self._woken.close()
        self._context.destroy(linger=0)

    def _step(self) -> bool:
        """Wait for something to do and do it; False when closing."""
        ready = dict(self._poller.poll(self._timeout_milliseconds()))
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        with self._mail.lock:
            wanted = list(self._mail.wanted)
            self._mail.wanted.clear()
            if self._mail.closing:
                for key, callback in wanted:
                    self._lookups.setdefault(key, _Lookup(key, 0.0, [])).callbacks.append(callback)
                return False
        for key, callback in wanted:
            self._want(key, callback)
        for lookup in list(self._lookups.values()):
            self._advance(lookup, lookup.socket in ready)
        return True

    def _timeout_milliseconds(self) -> int | None:
        if not self._lookups:
            return None
        due = min(min(lookup.next_at, lookup.deadline) for lookup in self._lookups.values())
        return max(0, math.ceil((due - time.monotonic()) * 1000))

    def _want(self, key: Key, callback: Callback) -> None:
        lookup = self._lookups.get(key)
        if lookup is not None:
            lookup.callbacks.append(callback)
            return
        lookup = _Lookup(key, time.monotonic() + self._deadline_seconds, [callback])
        if len(self._lookups) >= self._lookups_max:
            full = f"{len(self._lookups)} directories are being asked for already"
            self._tell(lookup, TransportError(full, retryable=True))
            return
        self._lookups[key] = lookup

    def _advance(self, lookup: _Lookup, answered: bool) -> None:
        now = time.monotonic()
        try:
            if answered:
                self._answered(lookup, now)
            elif now >= lookup.deadline:
                raise self._too_late(lookup)
            elif now >= lookup.next_at:
                self._ask(lookup, now)
        except KvferryError as problem:
            self._end(lookup, problem)
        except zmq.ZMQError as problem:
            self._end(lookup, TransportError(f"asking {_where(lookup)}: {problem}"))

    def _ask(self, lookup: _Lookup, now: float) -> None:
        self._hang_up(lookup)
        where = _where(lookup)
        assert self._context is not None
        dealer = self._context.socket(zmq.DEALER)
        self._poller.register(dealer, zmq.POLLIN)
        lookup.socket = dealer
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.setsockopt(zmq.MAXMSGSIZE, self._response_bytes_max)
        dealer.connect(f"tcp://{where}")
        lookup.nonce = secrets.token_bytes(NONCE_BYTES)
        lookup.challenge = None
        lookup.next_at = now + ATTEMPT_SECONDS
        dealer.send(encode(Ask(nonce=lookup.nonce)), zmq.NOBLOCK)

    def _answered(self, lookup: _Lookup, now: float) -> None:
        assert lookup.socket is not None
        frames = lookup.socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 1:
            raise PeerError(f"{_where(lookup)} answered with {len(frames)} frames, not 1")
        response = decode_response(frames[0])
        if isinstance(response, Answer):
            self._end(lookup, self._believed(lookup, response))
        elif isinstance(response, Challenge):
            self._prove(lookup, response)
        elif isinstance(response, NotReady):
            self._hang_up(lookup)
            lookup.state = "is reachable but not ready"
            lookup.next_at = now + lookup.pause_seconds
            lookup.pause_seconds = min(2 * lookup.pause_seconds, PAUSE_SECONDS_MAX)
        else:
            assert isinstance(response, Refused)
            raise PeerError(f"{_where(lookup)} refused: {response.reason[:200]}")

    def _prove(self, lookup: _Lookup, challenge: Challenge) -> None:
        if self._secret is None:
            raise PeerError(
                f"{_where(lookup)} asks for a shared secret; set the same side_channel_secret on every engine"
            )
        if lookup.challenge is not None or len(challenge.nonce) != NONCE_BYTES:
            raise PeerError(f"{_where(lookup)} sent a second or damaged challenge")
        assert lookup.socket is not None
        lookup.challenge = challenge.nonce
        proof = client_proof(self._secret, lookup.nonce, challenge.nonce)
        lookup.socket.send(encode(Prove(nonce=lookup.nonce, proof=proof)), zmq.NOBLOCK)

    def _believed(self, lookup: _Lookup, answer: Answer) -> Directory:
        if self._secret is not None:
            proof = b""
            if lookup.challenge is not None:
                proof = server_proof(self._secret, lookup.nonce, lookup.challenge, answer.directory)
            if not proof or not same_proof(answer.proof, proof):
                raise PeerError(
                    f"{_where(lookup)} has not proven that it has the shared secret; "
                    "set the same side_channel_secret on every engine"
                )
        directory = decode_directory(answer.directory)
        engine = lookup.key[2]
        if directory.engine != engine:
            raise PeerError(
                f"{_where(lookup)} is engine {directory.engine!r}, not {engine!r}; "
                "the engine asked for has ended, or its address is wrong"
            )
        return directory

    def _too_late(self, lookup: _Lookup) -> TransportError:
        hint = ""
        if is_loopback(lookup.key[0]):
            hint = "; a loopback address reaches this host only: has the engine an advertise_host?"
        return TransportError(
            f"engine {lookup.key[2]} at {_where(lookup)} {lookup.state} "
            f"within {self._deadline_seconds:g} s{hint}",
            retryable=True,
        )

    def _end(self, lookup: _Lookup, result: Directory | Exception) -> None:
        self._hang_up(lookup)
        self._lookups.pop(lookup.key, None)
        self._tell(lookup, result)

    def _tell(self, lookup: _Lookup, result: Directory | Exception) -> None:
        for callback in lookup.callbacks:
            callback(result)

    def _hang_up(self, lookup: _Lookup) -> None:
        if lookup.socket is not None:
            self._poller.unregister(lookup.socket)
            lookup.socket.close(linger=0)
            lookup.socket = None


def _where(lookup: _Lookup) -> str:
    return format_address(lookup.key[0], lookup.key[1])
