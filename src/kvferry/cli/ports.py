"""Free TCP ports on this machine."""

from __future__ import annotations

import contextlib
import socket

from kvferry.errors import UsageError

PORT_MAX = 65535


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that nobody listens on.

    All are held at once while choosing, so that they differ; another program may still take one before its
    server binds it, which then ends with an error that names the port.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_bound(host, 0)) for _ in range(count)]
        return [int(held.getsockname()[1]) for held in sockets]


def claim_port(host: str, port: int) -> int:
    """`port` if it is free, or a free one if `port` is 0.

    Raises:
        UsageError: the port is no port, the address is not this machine's, or the port is taken.
    """
    if not 0 <= port <= PORT_MAX:
        raise UsageError(f"--port must be a port from 0 to {PORT_MAX}, not {port}")
    try:
        with _bound(host, port) as held:
            return int(held.getsockname()[1])
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
