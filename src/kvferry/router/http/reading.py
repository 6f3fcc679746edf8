"""From a client's bytes to requests, within limits. No socket, no clock.

httptools refuses what the standard forbids (two lengths, a length beside chunks, bare line ends). Refused
here is what it leaves to its caller: heads and bodies that are too long, framing that outweighs what it
frames, a missing or repeated `Host`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import httptools

from kvferry.router.ground.errors import Cause, RequestError, invalid
from kvferry.router.http.messages import Headers, note_header

HEAD_BYTES_MAX = 64 << 10
HEADERS_MAX = 256
_SHORT_BYTES_MAX = 64 << 10
_FRAMING_PER_BODY_BYTE = 8
"""What chunks of one byte need, with room."""


class Request:
    """What a client asks; `problem` is set when it is to be refused unread, which ends its connection."""

    __slots__ = ("body", "headers", "keeps_alive", "method", "path", "problem", "version")

    def __init__(self, method: str, path: str, headers: Headers, version: str, keeps_alive: bool) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.version = version
        self.keeps_alive = keeps_alive
        self.body = b""
        self.problem: RequestError | None = None

    def header(self, name: bytes) -> str:
        """A header by its name in lower case; empty when it is absent or not ASCII."""
        value = self.headers.get(name)
        return value.decode() if value is not None and value.isascii() else ""


@dataclass(frozen=True, slots=True)
class Readers:
    """What a reader tells as it reads."""

    screen: Callable[[Request], RequestError | None]
    """A request's head has been read: why its body shall not be, if it shall not."""
    expects: Callable[[], None]
    """The client waits for leave to send the body."""
    whole: Callable[[Request], None]
    """A request is complete, or has a problem."""


class RequestReader:
    """Reads the requests of one connection, one after the other."""

    def __init__(self, told: Readers, body_bytes_max: int) -> None:
        self._told = told
        self._body_bytes_max = body_bytes_max
        self._parser = httptools.HttpRequestParser(self)
        self.within = False
        """Whether a request has begun and is not complete."""
        self.number = 0
        """How many requests have begun."""
        self.refused = False
        """Whether nothing more is read."""
        self._upgrading = False
        self._request: Request | None = None
        self._body: list[bytes] = []
        self._begin()

    def feed(self, data: bytes) -> None:
        """Take in what has arrived."""
        self._raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            if not self.refused:
                self.refuse(invalid("request", f"is not HTTP/1.1: {error}"))
            return
        if self.within and self._raw_bytes - self._framing_bytes_max > 0:
            self.refuse(self._too_long())

    def refuse(self, problem: RequestError) -> None:
        """Read nothing more; the request that was being read has this problem."""
        self.refused = True
        self.within = False
        request = self._request
        if request is None:
            request = Request("", "", dict(self._headers), "1.1", False)
        request.problem = problem
        request.keeps_alive = False
        self._body = []
        self._told.whole(request)

    # --- told by the parser --------------------------------------------------

    def on_message_begin(self) -> None:
        self._begin()
        self.number += 1
        self.within = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # What follows the body is for nobody here.
        if self._request is None:
            self._header_count += 1
            if self._header_count > HEADERS_MAX:
                self._stop(
                    RequestError(431, Cause.INVALID_REQUEST, f"there are more than {HEADERS_MAX} headers")
                )
            note_header(self._headers, name, value)

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            self._upgrading = True
            return
        version = parser.get_http_version()
        path = self._url.partition(b"?")[0].decode("latin-1")
        method = parser.get_method().decode()
        self._request = Request(method, path, self._headers, version, parser.should_keep_alive())
        problem = self._problem(version)
        if problem is None and not self._short():
            problem = self._told.screen(self._request)
        if problem is not None:
            self._stop(problem)
        if version == "1.1" and self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._told.expects()

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self._body_bytes_max:
            self._stop(self._body_too_long())

    def on_message_complete(self) -> None:
        request = self._request
        if request is None:
            return
        self.within = False
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._begin()
        encoding = request.headers.get(b"content-encoding")
        if encoding is not None:
            try:
                request.body = self._decoded(request.body, encoding)
            except RequestError as error:
                request.problem = error
        self._told.whole(request)

    # -------------------------------------------------------------------------

    def _begin(self) -> None:
        self._url = b""
        self._headers: Headers = {}
        self._header_count = 0
        self._request = None
        self._body = []
        self._body_bytes = 0
        self._raw_bytes = 0

    def _stop(self, problem: RequestError) -> None:
        """From inside the parser's callbacks: the exception ends its work."""
        self.refuse(problem)
        raise problem

    @property
    def _framing_bytes_max(self) -> int:
        """How many bytes a request may have that has come so far."""
        return HEAD_BYTES_MAX + self._body_bytes * (1 + _FRAMING_PER_BODY_BYTE)

    def _problem(self, version: str) -> RequestError | None:
        if version not in {"1.0", "1.1"}:
            message = f"HTTP/{version} is not spoken here; use HTTP/1.1"
            return RequestError(505, Cause.INVALID_REQUEST, message)
        host = self._headers.get(b"host")
        if (host is None and version == "1.1") or (host is not None and b"," in host):
            return invalid("Host", "must be given once")
        length = self._headers.get(b"content-length")
        if length is not None and length.isdigit() and int(length[:20]) > self._body_bytes_max:
            return self._body_too_long()
        return None

    def _short(self) -> bool:
        """Whether reading the body to its end is worth it, for then the connection serves on."""
        if b"transfer-encoding" in self._headers:
            return False
        return int(self._headers.get(b"content-length", b"0")[:20]) <= _SHORT_BYTES_MAX

    def _body_too_long(self) -> RequestError:
        message = f"the body has more than {self._body_bytes_max} bytes (--max-body-bytes)"
        return RequestError(413, Cause.BODY_TOO_LARGE, message)

    def _too_long(self) -> RequestError:
        if self._request is None:
            return RequestError(431, Cause.INVALID_REQUEST, f"the head has more than {HEAD_BYTES_MAX} bytes")
        return invalid("body", "has far more framing than content; send larger chunks")

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Go on in HTTP/1.1, as a server may: curl and Java's client offer h2c with every request.

        The parser has ended the message there, so the head is read once more without the offer.
        """
        method = self._parser.get_method()
        if method == b"CONNECT" or not self._upgrading:
            self.refuse(RequestError(405, Cause.NOT_FOUND, f"{method.decode()} is not spoken here"))
            return
        self._upgrading = False
        head = [b"%s %s HTTP/1.1\r\n" % (method, self._url)]
        for name, value in self._headers.items():
            if name not in {b"upgrade", b"connection"}:
                head.append(b"%s: %s\r\n" % (name, value))
        self._parser = httptools.HttpRequestParser(self)
        self.feed(b"".join(head) + b"\r\n" + rest)

    def _decoded(self, body: bytes, encoding: bytes) -> bytes:
        """The body of a client that compresses.

        Raises:
            RequestError: 415, 400 or 413.
        """
        encoding = encoding.strip().lower()
        if encoding == b"identity":
            return body
        if encoding not in {b"gzip", b"x-gzip", b"deflate"}:
            name = encoding.decode("latin-1")
            raise RequestError(415, Cause.INVALID_REQUEST, f"Content-Encoding: {name!r}; use gzip or none")
        inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        try:
            whole = inflater.decompress(body, self._body_bytes_max + 1)
        except zlib.error as error:
            raise invalid("body", f"cannot be read: {error}") from None
        if len(whole) > self._body_bytes_max:
            raise self._body_too_long()
        if not inflater.eof or inflater.unused_data:
            raise invalid("body", "cannot be read: its compressed form has no end, or more than one")
        return whole
