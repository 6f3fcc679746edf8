"""Host and port as text, IPv6 with and without brackets and scopes included."""

from __future__ import annotations

import ipaddress
import re

from kvferry.errors import UsageError

_HOST_NAME = re.compile(r"[0-9A-Za-z_](?:[0-9A-Za-z_.-]{0,252}[0-9A-Za-z_.])?")
_SCOPE = re.compile(r"[0-9A-Za-z_.-]{1,32}")


def bare_host(text: str, setting: str = "host") -> str:
    """A host name or address without brackets. `setting` names the field in errors.

    Raises:
        UsageError: it is neither a host name nor an address.
    """
    bracketed = text.startswith("[") and text.endswith("]")
    host = text[1:-1] if bracketed else text
    address, percent, scope = host.partition("%")
    if ":" in address:
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            raise UsageError(f"{setting} {text!r} is not an IPv6 address") from None
        if percent and not _SCOPE.fullmatch(scope):
            raise UsageError(
                f"{setting} {text!r} has an impossible scope; give an interface's name"
            ) from None
        return host
    if bracketed or percent or not _HOST_NAME.fullmatch(host):
        raise UsageError(f"{setting} {text!r} is neither a host name nor an address")
    return host


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets around IPv6.

    Raises:
        UsageError: the host or port is impossible.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"port {port} is not from 0 to 65535")
    bare = bare_host(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Read `host:port`; without a port (a bare IPv6 address has none) it is `default_port`.

    Raises:
        UsageError: there is no port and no default, or a part is impossible.
    """
    host, port = text, ""
    if text.startswith("["):
        inside, bracket, rest = text.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UsageError(f"address {text!r} has unmatched brackets")
        host, port = inside + bracket, rest[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not port and not text.endswith(":") and default_port is not None:
        return bare_host(host, "address"), default_port
    if not port.isascii() or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise UsageError(f"address {text!r} needs a port from 0 to 65535, as in 10.0.0.1:5600 or [::1]:5600")
    return bare_host(host, "address"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host can reach that address."""
    bare = host.strip("[]").partition("%")[0]
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False
