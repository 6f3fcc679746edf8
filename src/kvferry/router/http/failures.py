"""How a connection to an engine fails. Apart, for exceptions are not compiled."""

from __future__ import annotations

from kvferry.errors import KvferryError


class LostError(KvferryError):
    """The connection ended, or what came is no HTTP, before the answer was complete."""


class ConnectError(KvferryError):
    """No connection: the other side has not seen the request."""
