"""A stand-in for an engine or the router under `kvferry soak`; run as a program.

An engine answers every prompt with tokens that follow from it, and tells the metrics that the soak reads. The
router passes requests on to one decode engine. With `--plant` one of them does something that a soak must
find, from its `--after`th request on (an engine that serves none counts questions for its metrics).
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import itertools
import json
import os
import threading
from typing import Any

METRICS = """
kvferry_transfer_bytes_total{{mode="push"}} 1000
kvferry_transfers_total{{outcome="completed"}} {completed}
kvferry_transfers_in_flight{{state="held"}} {held}
"""


class Stub:
    """What is told on the command line, and what has been asked."""

    def __init__(self, plant: str, after: int, decode: int | None) -> None:
        self.plant, self.after, self.decode = plant, after, decode
        self.requests, self.scrapes = itertools.count(1), itertools.count(1)
        self.completed = 0

    def is_planted(self, plant: str, number: int) -> bool:
        """Whether this one is to be done wrong."""
        return self.plant == plant and number >= self.after


class _Handler(http.server.BaseHTTPRequestHandler):
    stub: Stub

    def do_GET(self) -> None:
        """Health and metrics."""
        stub = self.stub
        if self.path == "/metrics":
            if stub.is_planted("exit", next(stub.scrapes)):
                os._exit(3)
            held = int(stub.is_planted("leak", stub.completed))
            self._say(200, METRICS.format(completed=stub.completed, held=held))
        else:
            self._say(200, json.dumps({"ready": True, "prefill": 1, "decode": 1}))

    def do_POST(self) -> None:
        """A completion."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        stub, number = self.stub, next(self.stub.requests)
        if stub.is_planted("hang", number):
            threading.Event().wait()
        elif stub.is_planted("silence", number):
            self.connection.close()
        elif stub.is_planted("refusal", number):
            self._say(400, '{"error": {"message": "no"}}')
        elif stub.is_planted("failure", number):
            self._say(500, '{"error": {"message": "broken"}}')
        elif stub.decode is not None:
            self._pass_on(body)
        else:
            stub.completed += not stub.is_planted("nothing pushed", number)
            self._answer(json.loads(body), wrong=stub.is_planted("wrong answer", number))

    def _pass_on(self, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.stub.decode)
        try:
            connection.request("POST", self.path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            self._say(answer.status, answer.read().decode())
        except (OSError, http.client.HTTPException) as error:
            self._say(502, json.dumps({"error": {"message": repr(error)}}))
        finally:
            connection.close()

    def _answer(self, body: dict[str, Any], *, wrong: bool) -> None:
        first = sum(body["prompt"]) + wrong
        ids = [(first + step) % 1000 for step in range(body["max_tokens"])]
        choices = [{"index": index, "text": "", "token_ids": ids} for index in range(body.get("n", 1))]
        text = json.dumps({"choices": choices})
        self._say(200, f"data: {text}\n\ndata: [DONE]\n\n" if body.get("stream") else text)

    def _say(self, status: int, text: str) -> None:
        payload = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *arguments: object) -> None:
        """Stay silent: the log belongs to the test."""


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--decode", type=int, help="be a router over the engine on this port")
    parser.add_argument("--plant", default="")
    parser.add_argument("--after", type=int, default=1)
    arguments = parser.parse_args()
    _Handler.stub = Stub(arguments.plant, arguments.after, arguments.decode)
    http.server.ThreadingHTTPServer(("127.0.0.1", arguments.port), _Handler).serve_forever()


if __name__ == "__main__":
    main()
