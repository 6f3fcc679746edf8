"""An engine that answers chats as vLLM does: text, tool calls, log probabilities, several choices.

What it says follows from the request alone, so that the same request gets the same answer whoever passed it
on. Chats are stateless here; everything else about engines is `fake_engine`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from tests.support.fake_engine import FakeEngine, Received, Step

Body = dict[str, Any]

TOOL_ARGUMENTS = '{"city": "Oslo", "days": 3}'
JSON_ANSWER = '{"name": "Ada", "age": 36}'
_USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}


class ChatEngine(FakeEngine):
    """A decode engine for the OpenAI client."""

    async def _take(self, step: Step, received: Received, request: web.Request) -> web.StreamResponse:
        if received.path != "/v1/chat/completions" or step != Step():
            return await super()._take(step, received, request)
        body = received.body
        base = {
            "id": f"chatcmpl-{received.headers.get('X-Request-Id')}",
            "created": 1,
            "model": body["model"],
        }
        if not body.get("stream"):
            choices = [_choice(body, index) for index in range(body.get("n") or 1)]
            return web.json_response(
                base
                | {
                    "object": "chat.completion",
                    "choices": choices,
                    "usage": _USAGE,
                    "kv_transfer_params": None,
                }
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in _chunks(body):
            data = json.dumps(base | {"object": "chat.completion.chunk"} | chunk)
            await response.write(b"data: " + data.encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _words(body: Body, index: int) -> list[str]:
    asked = body["messages"][-1]["content"]
    if (body.get("response_format") or {}).get("type") == "json_schema":
        return [JSON_ANSWER]
    return [f"You said {asked!r}", f" ({index})", "."]


def _choice(body: Body, index: int) -> Body:
    message: Body = {"role": "assistant", "content": "".join(_words(body, index))}
    reason = "stop"
    if body.get("tools"):
        function = {"name": body["tools"][0]["function"]["name"], "arguments": TOOL_ARGUMENTS}
        message = {"role": "assistant", "content": None}
        message["tool_calls"] = [{"id": f"call-{index}", "type": "function", "function": function}]
        reason = "tool_calls"
    logprobs = (
        {"content": [_logprob(body, word) for word in _words(body, index)]} if body.get("logprobs") else None
    )
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _chunks(body: Body) -> Iterator[Body]:
    for index in range(body.get("n") or 1):
        yield _delta(index, {"role": "assistant", "content": ""})
        if body.get("tools"):
            name = body["tools"][0]["function"]["name"]
            for position, part in enumerate([TOOL_ARGUMENTS[:9], TOOL_ARGUMENTS[9:]]):
                function: Body = {"arguments": part}
                call: Body = {"index": 0, "function": function}
                if position == 0:
                    call |= {"id": f"call-{index}", "type": "function"}
                    function["name"] = name
                yield _delta(index, {"tool_calls": [call]})
            yield _delta(index, {}, finish="tool_calls")
            continue
        for word in _words(body, index):
            logprobs = {"content": [_logprob(body, word)]} if body.get("logprobs") else None
            yield _delta(index, {"content": word}, logprobs)
        yield _delta(index, {}, finish="stop")
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {"choices": [], "usage": _USAGE}


def _delta(index: int, delta: Body, logprobs: Body | None = None, finish: str | None = None) -> Body:
    return {"choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]}


def _logprob(body: Body, word: str) -> Body:
    told = {"token": word, "logprob": -0.5, "bytes": list(word.encode())}
    alternatives = [{**told, "logprob": -0.5 - place} for place in range(body.get("top_logprobs") or 0)]
    return told | {"top_logprobs": alternatives}
