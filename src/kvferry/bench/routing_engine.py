"""Engines that answer at once and compute nothing: what a router is measured with.

`python -m kvferry.bench.routing_engine --role decode --port 9000`. A prefill engine answers with coordinates;
a decode engine streams `max_tokens` chunks, all at once, or with `seed` N one every N milliseconds, in the
same steps for all its streams, as an engine does. Requests are read with two searches, not by a parser, so
that the engines are not what limits a router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import defaultdict
from typing import cast

HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: *(\d+)")
_TOKENS = re.compile(rb'"max_tokens": *(\d+)')
_PACE = re.compile(rb'"seed": *(\d+)')
_CHUNK = {
    "id": "cmpl-0123456789abcdef0123456789abcdef-0",
    "object": "text_completion",
    "created": 1700000000,
    "model": "bench",
    "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "stop_reason": None}],
}
_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "bench-engine",
    "remote_block_ids": [[0]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "bench",
    "tp_size": 1,
    "pp_size": 1,
    "transfer_mode": "push",
    "kvferry_incarnation": "bench",
}


def _json_answer(body: object) -> bytes:
    raw = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(raw) + raw


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


_USAGE = {"prompt_tokens": 500, "completion_tokens": 1, "total_tokens": 501}
_CHOICE = {"index": 0, "text": " token", "logprobs": None, "finish_reason": "length"}
PREFILLED = _json_answer(
    {"id": "cmpl-p", "object": "text_completion", "model": "bench", "choices": [_CHOICE], "usage": _USAGE}
    | {"kv_transfer_params": _PARAMS}
)
MODELS = _json_answer(
    {"object": "list", "data": [{"id": "bench", "object": "model", "max_model_len": 32768}]}
)
WELL = _json_answer({"version": "0.32.0"})
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
TOKEN = _framed(b"data: " + json.dumps(_CHUNK, separators=(",", ":")).encode() + b"\n\n")
END = _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Steps:
    """Streams that go on together: one timer for all of a pace."""

    def __init__(self) -> None:
        self._streams: dict[float, dict[asyncio.Transport, int]] = defaultdict(dict)

    def add(self, transport: asyncio.Transport, tokens: int, seconds: float) -> None:
        """Send so many more tokens, one every so many seconds."""
        streams = self._streams[seconds]
        if not streams:
            asyncio.get_running_loop().call_later(seconds, self._step, seconds)
        streams[transport] = tokens

    def _step(self, seconds: float) -> None:
        streams = self._streams[seconds]
        for transport, left in list(streams.items()):
            if transport.is_closing():
                # Its client has left. uvloop's transports do not take a write any more.
                del streams[transport]
            elif left > 1:
                transport.write(TOKEN)
                streams[transport] = left - 1
            else:
                transport.write(TOKEN + END)
                del streams[transport]
        if streams:
            asyncio.get_running_loop().call_later(seconds, self._step, seconds)


class Engine(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, role: str, steps: Steps) -> None:
        self._prefills = role == "prefill"
        self._steps = steps
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while (end := self._rest.find(HEAD_END)) >= 0:
            head = self._rest[:end]
            length = _LENGTH.search(head)
            whole = end + len(HEAD_END) + (int(length[1]) if length else 0)
            if len(self._rest) < whole:
                return
            body, self._rest = self._rest[end + len(HEAD_END) : whole], self._rest[whole:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if not head.startswith(b"POST"):
            self._transport.write(MODELS if b"/v1/models" in head.partition(b"\r\n")[0] else WELL)
        elif self._prefills or b'"do_remote_decode":true' in body.replace(b" ", b""):
            self._transport.write(PREFILLED)
        else:
            asked = _TOKENS.search(body)
            pace = _PACE.search(body)
            tokens = int(asked[1]) if asked else 1
            if pace and int(pace[1]) and tokens > 1:
                self._transport.write(STREAM_HEAD + TOKEN)
                self._steps.add(self._transport, tokens - 1, int(pace[1]) / 1000)
            else:
                self._transport.write(STREAM_HEAD + TOKEN * tokens + END)


async def _serve(role: str, port: int) -> None:
    steps = Steps()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(role, steps), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(arguments.role, arguments.port))


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: what measures should cost less than what is measured."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


if __name__ == "__main__":
    main()
