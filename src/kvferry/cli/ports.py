"""Free TCP ports on this machine."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from kvferry.errors import UsageError

PORT_MAX = 65535
# Below are ports that services are known by.
_PORT_MIN = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES_PER_PORT = 64
"""So many taken ports in a row mean that ports are scarce; the kernel then finds one."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that nobody uses.

    They lie outside the range from which the kernel takes the near end of every outgoing connection: a port
    of that range may be gone before its server binds it, on any machine that has traffic. They are drawn by
    chance, so that two programs that choose at once rarely meet; a server that comes too late all the same
    ends with an error that names the port. All are held while choosing, so that they differ.

    Raises:
        OSError: the host is not this machine's, or it has no free port.
    """
    candidates = _candidates(_ephemeral_range())
    with contextlib.ExitStack() as stack:
        return [_hold_one(stack, host, candidates) for _ in range(count)]


def _hold_one(stack: contextlib.ExitStack, host: str, candidates: list[int]) -> int:
    for port in random.sample(candidates, min(_TRIES_PER_PORT, len(candidates))):
        with contextlib.suppress(OSError):
            stack.enter_context(_bound(host, port))
            return port
    return int(stack.enter_context(_bound(host, 0)).getsockname()[1])


def _candidates(ephemeral: range) -> list[int]:
    return [port for port in range(_PORT_MIN, PORT_MAX + 1) if port not in ephemeral]


def _ephemeral_range() -> range:
    try:
        first, last = _EPHEMERAL.read_text(encoding="ascii").split()
        return range(int(first), int(last) + 1)
    except (OSError, ValueError):
        # What Linux has unless somebody sets it.
        return range(32_768, 61_000)


def claim_port(host: str, port: int) -> int:
    """`port` if it is free, or a free one if `port` is 0.

    Raises:
        UsageError: the port is no port, the address is not this machine's, or the port is taken.
    """
    if not 0 <= port <= PORT_MAX:
        raise UsageError(f"--port must be a port from 0 to {PORT_MAX}, not {port}")
    try:
        if port == 0:
            return free_ports(1, host)[0]
        with _bound(host, port):
            return port
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with --host and "
            "--port (0 takes any free port)"
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do: a port whose last connections are only lingering counts as free.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held
