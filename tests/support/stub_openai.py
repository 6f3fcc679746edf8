"""An OpenAI-compatible server in a thread: answers follow from the prompt, metrics are set by the test."""

from __future__ import annotations

import http.server
import json
import threading
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

Body = dict[str, Any]


class StubOpenAI:
    """A context manager; `url` is where it answers. `damage` changes every token that it says by so much."""

    def __init__(self, *, damage: int = 0, on_request: Callable[[Body], None] = lambda body: None) -> None:
        self.damage = damage
        self.on_request = on_request
        self.metrics = ""
        self.status = 200
        self.break_stream_with: Body | None = None
        self.bodies: list[Body] = []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StubOpenAI:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, body: Body) -> Body:
        """The whole answer to a body."""
        prompts = _prompts(body)
        answers = [prompt for prompt in prompts for _ in range(body.get("n", 1))]
        choices: list[Body] = []
        made = 0
        for index, prompt in enumerate(answers):
            first = zlib.crc32(json.dumps(prompt).encode()) % 1000 + self.damage
            tokens = [first + offset for offset in range(3)]
            text = " ".join(map(str, tokens))
            said = {"message": {"content": text}} if "messages" in body else {"text": text}
            choices.append({"index": index, "token_ids": tokens, "finish_reason": "length", **said})
            made += len(tokens)
        counted = sum(len(prompt) for prompt in prompts)
        return {"choices": choices, "usage": {"prompt_tokens": counted, "completion_tokens": made}}


def _prompts(body: Body) -> list[Any]:
    if "messages" in body:
        return ["".join(message["content"] for message in body["messages"])]
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) and isinstance(prompt[0], list) else [prompt]


def _stream(whole: Body) -> list[Body]:
    """The answer as events: an empty one first, one per token, and the usage last."""
    events: list[Body] = [{"choices": [{"index": 0, "text": ""}]}]
    for choice in whole["choices"]:
        words = (choice.get("text") or choice["message"]["content"]).split(" ")
        for position, (word, token) in enumerate(zip(words, choice["token_ids"], strict=True)):
            piece = word if position == 0 else " " + word
            said = {"delta": {"content": piece}} if "message" in choice else {"text": piece}
            reason = "length" if position == len(words) - 1 else None
            events.append(
                {
                    "choices": [
                        {"index": choice["index"], "token_ids": [token], "finish_reason": reason, **said}
                    ]
                }
            )
    return [*events, {"choices": [], "usage": whole["usage"]}]


def _handler(stub: StubOpenAI) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(stub.metrics)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.bodies.append(body)
            stub.on_request(body)
            whole = stub.answer(body)
            if not body.get("stream"):
                self._send(json.dumps(whole))
                return
            events = _stream(whole)
            if stub.break_stream_with is not None:
                events = [*events[:2], stub.break_stream_with]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self._send(": a comment\n\n" + "".join(lines) + "data: [DONE]\n\n")

        def _send(self, text: str) -> None:
            self.send_response(stub.status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Stay silent."""

    return Handler
