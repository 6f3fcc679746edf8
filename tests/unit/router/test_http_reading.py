"""From a client's bytes to requests: framing, limits, what is refused. No socket."""

from __future__ import annotations

import gzip

import pytest

from kvferry.router.ground.errors import RequestError
from kvferry.router.http.reading import HEAD_BYTES_MAX, Readers, Request, RequestReader

BODY_BYTES_MAX = 100_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


class Heard:
    """A reader and what it has told."""

    def __init__(self, screen: RequestError | None = None) -> None:
        self.requests: list[Request] = []
        self.expected = 0
        self.screened = 0
        self._screen = screen
        told = Readers(self._screened, self._expects, self.requests.append)
        self.reader = RequestReader(told, BODY_BYTES_MAX)

    def _screened(self, request: Request) -> RequestError | None:
        self.screened += 1
        return self._screen

    def _expects(self) -> None:
        self.expected += 1

    def feed(self, *pieces: bytes) -> Heard:
        for piece in pieces:
            if not self.reader.refused:
                self.reader.feed(piece)
        return self

    def problem(self) -> RequestError:
        (request,) = self.requests
        assert request.problem is not None
        assert not request.keeps_alive
        assert self.reader.refused
        return request.problem


def test_a_request_is_read_whatever_the_pieces() -> None:
    raw = HEAD + b"X-Thing: a\r\nx-thing: b\r\nContent-Length: 4\r\n\r\nbody"
    for size in (1, 7, len(raw)):
        heard = Heard().feed(*[raw[start : start + size] for start in range(0, len(raw), size)])
        (request,) = heard.requests
        assert (request.method, request.path, request.body) == ("POST", "/v1/completions", b"body")
        assert request.header(b"x-thing") == "a, b"
        assert request.keeps_alive
        assert not heard.reader.within


def test_pipelined_requests_come_one_after_the_other() -> None:
    one = HEAD + b"Content-Length: 1\r\n\r\n"
    heard = Heard().feed(one + b"1" + one + b"2" + b"GET /health?x=1 HTTP/1.1\r\nHost: x\r\n\r\n" + one)
    assert [(request.path, request.body) for request in heard.requests] == [
        ("/v1/completions", b"1"),
        ("/v1/completions", b"2"),
        ("/health", b""),
    ]
    assert heard.reader.within
    assert heard.reader.number == 4


def test_chunks_extensions_and_trailers_are_framing_only() -> None:
    chunks = (
        b"4;name=value\r\nbo" + b"dy\r\n3\r\n-!\n\r\n0\r\nAuthorization: Bearer forged\r\nX-Sum: 1\r\n\r\n"
    )
    heard = Heard().feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, HEAD + b"\r\n")
    first, second = heard.requests
    assert first.body == b"body-!\n"
    assert b"authorization" not in first.headers
    assert b"x-sum" not in first.headers
    assert second.headers == {b"host": b"x"}


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n",
        b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n",
        b"Content-Length: +4\r\n\r\n",
        b"Content-Length: 0x4\r\n\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n",
        b"Content-Length : 4\r\n\r\n",
        b"X: a\r\n b\r\n\r\n",
        b"X: a\0b\r\n\r\n",
        b"X: a\rContent-Length: 4\r\n\r\n",
        b"X Y: a\r\n\r\n",
        b": a\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n4\nbody\n0\n\n",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff1\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n4\r\nbodyXX",
    ],
)
def test_what_two_parsers_could_read_in_two_ways_is_refused(head: bytes) -> None:
    """Hostile: request smuggling, header injection."""
    problem = Heard().feed(HEAD + head + b"body" + HEAD + b"\r\n").problem()
    assert problem.status == 400


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET\r\n\r\n", 400),
        (b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    ],
)
def test_what_is_no_request_is_refused(raw: bytes, status: int) -> None:
    problem = Heard().feed(raw).problem()
    assert problem.status in {status, 505}


def test_a_client_of_http_1_0_needs_no_host() -> None:
    (request,) = Heard().feed(b"GET /health HTTP/1.0\r\n\r\n").requests
    assert request.problem is None
    assert not request.keeps_alive


@pytest.mark.parametrize("header", [b"X: " + b"a" * HEAD_BYTES_MAX, b"X: a\r\n" * (HEAD_BYTES_MAX // 6)])
def test_a_head_has_a_limit(header: bytes) -> None:
    pieces = [header[start : start + 1000] for start in range(0, len(header), 1000)]
    problem = Heard().feed(HEAD, *pieces, b"\r\n" * 600).problem()
    assert problem.status == 431


def test_a_body_has_a_limit_before_it_is_read_and_while_it_is() -> None:
    told = Heard().feed(HEAD + b"Content-Length: 100001\r\n\r\n")
    assert told.problem().status == 413
    grown = Heard().feed(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"2710\r\n" + b"x" * 10000 + b"\r\n"] * 11
    )
    assert grown.problem().status == 413
    within = Heard().feed(HEAD + b"Content-Length: 100000\r\n\r\n" + b"x" * 100_000)
    assert within.requests[0].problem is None


def test_framing_may_not_outweigh_what_it_frames() -> None:
    """Hostile: chunk extensions and trailers that never end would be read for nothing."""
    extension = Heard().feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", *[b"x" * 10_000] * 10)
    assert extension.problem().status == 400
    trailers = Heard().feed(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *[b"X: " + b"x" * 10_000 + b"\r\n"] * 10
    )
    assert trailers.problem().status == 400
    small = Heard().feed(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 60_000, b"0\r\n\r\n"
    )
    assert small.requests[0].body == b"x" * 60_000


def test_leave_to_send_is_given_unless_the_head_says_enough() -> None:
    heard = Heard().feed(HEAD + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n")
    assert heard.expected == 1
    refusal = RequestError(401, Heard().feed(b"\0").problem().cause, "no")
    refused = Heard(refusal).feed(HEAD + b"Expect: 100-continue\r\nContent-Length: 90000\r\n\r\n")
    assert refused.expected == 0
    assert refused.problem() is refusal


def test_a_short_body_is_read_before_it_is_refused_so_that_its_connection_serves_on() -> None:
    refusal = RequestError(401, Heard().feed(b"\0").problem().cause, "no")
    heard = Heard(refusal).feed(HEAD + b"Content-Length: 4\r\n\r\nbody")
    assert heard.screened == 0
    assert heard.requests[0].keeps_alive


@pytest.mark.parametrize(
    "offer", [b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: x\r\n"]
)
def test_an_offer_to_speak_something_else_is_not_taken(offer: bytes) -> None:
    """Java's client and curl offer h2c with a body; what follows the head is that body."""
    heard = Heard().feed(HEAD + offer + b"Content-Length: 4\r\n\r\nbo", b"dy" + HEAD + b"\r\n")
    first, second = heard.requests
    assert (first.method, first.path, first.body) == ("POST", "/v1/completions", b"body")
    assert first.problem is second.problem is None


def test_a_compressed_body_is_read_within_the_limit() -> None:
    def sent(body: bytes, encoding: bytes = b"gzip") -> Request:
        head = HEAD + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (encoding, len(body))
        (request,) = Heard().feed(head + body).requests
        return request

    assert sent(gzip.compress(b"hello")).body == b"hello"
    for body, encoding, status in (
        (gzip.compress(b"x" * (BODY_BYTES_MAX + 1)), b"gzip", 413),
        (gzip.compress(b"hello")[:-9], b"gzip", 400),
        (b"hello", b"gzip", 400),
        (b"hello", b"br", 415),
    ):
        problem = sent(body, encoding).problem
        assert problem is not None
        assert problem.status == status
