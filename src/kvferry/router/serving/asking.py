"""What a client's request says besides its body: headers for engines, its id, its conversation."""

from __future__ import annotations

import re

from kvferry.router.ground.randoms import randoms
from kvferry.router.ground.settings import RouterSettings
from kvferry.router.http.reading import Request

FORWARDED_HEADERS = {
    b"authorization": "Authorization",
    b"traceparent": "traceparent",
    b"tracestate": "tracestate",
}
_FORWARDED = frozenset(FORWARDED_HEADERS)
_REQUEST_ID = re.compile(r"[0-9A-Za-z_.:-]{1,128}")
_SESSION = re.compile(r"[\x20-\x7e]{1,256}")


def forwarded(request: Request, settings: RouterSettings) -> dict[str, str]:
    """What engines get of a client's headers; their own key instead of the client's where they have one."""
    headers = request.headers
    told: dict[str, str] = {}
    if settings.engine_api_key is None and _FORWARDED.isdisjoint(headers):
        return told
    for name, shown in FORWARDED_HEADERS.items():
        value = headers.get(name)
        if value and value.isascii():
            told[shown] = value.decode()
    if settings.engine_api_key is not None:
        told["Authorization"] = f"Bearer {settings.engine_api_key}"
    return told


def request_id_of(request: Request) -> str:
    """The client's id for its request if it is sane, else one of ours."""
    given = request.header(b"x-request-id")
    if not given:
        return randoms.digits(32)
    return given if _REQUEST_ID.fullmatch(given) else randoms.digits(32)


def session_of(request: Request) -> str | None:
    """The client's name for its conversation, if it is sane; it is its own among those of other keys."""
    given = request.header(b"x-session-id")
    if not given:
        return None
    key = request.headers.get(b"authorization", b"")
    return f"{key.decode()}\n{given}" if _SESSION.fullmatch(given) and key.isascii() else None
