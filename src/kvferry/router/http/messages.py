"""How HTTP heads look: status lines, dates, headers as bytes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus

Headers = dict[bytes, bytes]
"""Names in lower case; values of a repeated name joined by a comma."""

_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}


class _Date:
    """The header `Date`, made once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._line = b""

    def line(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"Date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._line


date = _Date()


def status_line(status: int) -> bytes:
    """The first line of an answer."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


def header_lines(headers: Mapping[str, str]) -> bytes:
    """The headers as they are sent.

    Raises:
        ValueError: a value would end its line, and so begin something else.
    """
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers) or "\0" in text:
        raise ValueError("a header's value has a line end or a zero byte")
    return text.encode("latin-1", "replace")


def note_header(headers: Headers, name: bytes, value: bytes) -> None:
    """Take in one header."""
    name = name.lower()
    before = headers.get(name)
    headers[name] = value if before is None else before + b", " + value
