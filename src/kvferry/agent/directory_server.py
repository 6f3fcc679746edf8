"""Serves one engine's directory on the side channel, from a thread of its own in the scheduler's process.

What strangers send is ignored, whatever it is: bytes that are not ZeroMQ never get past the library, frames
over the limit end their connection there, and what is no request is counted. Between requests the thread
sleeps in a poll without a time-out.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass

import zmq

from kvferry.agent.addresses import bare_host, format_address, is_loopback
from kvferry.agent.directory import (
    NONCE_BYTES,
    REQUEST_BYTES_MAX,
    RESPONSE_BYTES_MAX,
    Answer,
    Ask,
    Challenge,
    Directory,
    NotReady,
    Prove,
    Refused,
    Response,
    client_proof,
    decode_directory,
    decode_request,
    encode,
    same_proof,
    server_proof,
)
from kvferry.errors import PeerError, UsageError

logger = logging.getLogger(__name__)

CHALLENGES_MAX = 1024
"""Challenges that wait for their proof; beyond it the oldest is void and its client asks again."""
ANSWERS_PENDING_MAX = 8
"""Answers that wait for one client to read them; more are dropped, and the client asks again."""
CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class ServerStats:
    """Requests since the start, by what became of them."""

    answered: int = 0
    not_ready: int = 0
    challenged: int = 0
    refused: int = 0
    """Wrong or missing proofs."""
    ignored: int = 0
    """Messages that are no request."""


class DirectoryServer:
    """The server of one engine. Bound, and serving, from the constructor on; `close` it."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        advertise_host: str | None = None,
        secret: str | None = None,
        port_setting: str = "side_channel_port",
    ) -> None:
        """Bind and start.

        Args:
            host: the address to bind; an interface of this host.
            port: the port to bind; 0 chooses a free one, see `port`.
            advertise_host: what other engines connect to, where that differs from `host`.
            secret: shared by all engines; without it nobody gets the directory.
            port_setting: how the operator knows the port, for the error when it is taken.

        Raises:
            UsageError: the address cannot be bound.
        """
        self.host = bare_host(host, "side_channel_host")
        self.advertise_host = bare_host(advertise_host or host, "advertise_host")
        self._secret = secret or None
        self._stats = ServerStats()
        self._document: bytes | None = None
        self._challenges: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self.port = self._bind(port, port_setting)
        except UsageError:
            self._context.destroy(linger=0)
            raise
        if is_loopback(self.advertise_host):
            logger.warning(
                "the side channel is advertised as %s: only engines on this host can reach it; "
                "set advertise_host for others",
                format_address(self.advertise_host, self.port),
            )
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="kvferry-directory", daemon=True)
        self._thread.start()

    def publish(self, directory: Directory) -> None:
        """Serve this directory from now on; before the first one, clients are told to ask again.

        Raises:
            PeerError: the directory contradicts itself.
            UsageError: it is longer than clients accept.
        """
        document = encode(directory)
        decode_directory(document)
        if len(document) > RESPONSE_BYTES_MAX // 2:
            raise UsageError(
                f"the directory has {len(document)} bytes, at most {RESPONSE_BYTES_MAX // 2} can be served"
            )
        self._document = document

    def snapshot(self) -> dict[str, int]:
        """Counters since the start, as `ServerStats` names them."""
        return asdict(self._stats)

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        if self._wake.fileno() < 0:
            return
        self._wake.send(b"x")
        self._thread.join(CLOSE_SECONDS)
        self._wake.close()

    # --- the thread ----------------------------------------------------------------------------------

    def _bind(self, port: int, port_setting: str) -> int:
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        self._socket.setsockopt(zmq.SNDHWM, ANSWERS_PENDING_MAX)
        where = format_address(_numeric(self.host), port)
        try:
            self._socket.bind(f"tcp://{where}")
        except zmq.ZMQError as problem:
            if problem.errno == zmq.EADDRINUSE:
                raise UsageError(
                    f"port {port} of {self.host} is taken; set {port_setting} to a free port, or to 0"
                ) from None
            raise UsageError(
                f"the side channel cannot bind {where}: {problem}; check side_channel_host and {port_setting}"
            ) from None
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes), "ZeroMQ names the endpoint that it has just bound"
        return int(endpoint.rstrip(b"\x00").rpartition(b":")[2])

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._woken.fileno() in ready:
                break
            try:
                self._handle(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.ZMQError as problem:
                logger.info("the side channel could not read or answer a message: %s", problem)
        self._woken.close()
        self._context.destroy(linger=0)

    def _handle(self, frames: list[zmq.Frame]) -> None:
        client = frames[0].bytes
        try:
            if len(frames) != 2:
                raise PeerError(f"{len(frames) - 1} frames, not 1")  # noqa: TRY301 - one way out for strangers
            request = decode_request(frames[1].bytes)
        except PeerError as problem:
            self._stats.ignored += 1
            logger.info("ignored a message from %s on the side channel: %s", _address(frames), problem)
            return
        response = self._response(client, request, _address(frames))
        self._socket.send_multipart([client, encode(response)], zmq.NOBLOCK)

    def _response(self, client: bytes, request: Ask | Prove, address: str) -> Response:
        if isinstance(request, Ask) and self._secret is not None:
            return self._challenge(client, request)
        nonces = self._challenges.pop(client, None)
        if self._secret is not None and not self._proven(request, nonces):
            self._stats.refused += 1
            logger.warning("%s has not proven the side channel's secret; it gets no metadata", address)
            return Refused(reason="the side channel's secret is wrong; set the same one on every engine")
        if self._document is None:
            self._stats.not_ready += 1
            return NotReady()
        self._stats.answered += 1
        if self._secret is None or nonces is None:
            return Answer(directory=self._document)
        return Answer(directory=self._document, proof=server_proof(self._secret, *nonces, self._document))

    def _challenge(self, client: bytes, request: Ask) -> Challenge:
        self._stats.challenged += 1
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._challenges[client] = (request.nonce, nonce)
        self._challenges.move_to_end(client)
        while len(self._challenges) > CHALLENGES_MAX:
            self._challenges.popitem(last=False)
        return Challenge(nonce=nonce)

    def _proven(self, request: Ask | Prove, nonces: tuple[bytes, bytes] | None) -> bool:
        if self._secret is None or nonces is None or not isinstance(request, Prove):
            return False
        return request.nonce == nonces[0] and same_proof(request.proof, client_proof(self._secret, *nonces))


def _numeric(host: str) -> str:
    """ZeroMQ binds addresses, not names."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as problem:
        raise UsageError(f"side_channel_host {host!r} has no address: {problem}") from None
    # An IPv4 address is preferred, because that is what a name without more ado is expected to mean.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def _address(frames: list[zmq.Frame]) -> str:
    try:
        return str(frames[-1].get("Peer-Address"))
    except (zmq.ZMQError, KeyError):
        return "an unknown address"
