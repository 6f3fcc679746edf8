"""The real `openai` client, through the router and at an engine alone: it must not see a difference."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest

from kvferry.router.ground.settings import RouterSettings
from kvferry.router.server import RouterServer
from tests.support.chat_engine import JSON_ANSWER, TOOL_ARGUMENTS, ChatEngine
from tests.support.fake_engine import FakeEngine, failing, source

Ask = Callable[[openai.AsyncOpenAI], Awaitable[Any]]

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 世界"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}


class Both:
    """A client of the router and one of its decode engine."""

    def __init__(self, prefill: FakeEngine, decode: ChatEngine, router: RouterServer) -> None:
        self.prefill = prefill
        self.decode = decode
        self.through, self.alone = (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
            for url in (router.url, decode.url)
        )

    async def same(self, ask: Ask) -> Any:
        """What is told through the router, which is what the engine alone tells."""
        through, alone = await ask(self.through), await ask(self.alone)
        assert _plain(through) == _plain(alone)
        return through


@asynccontextmanager
async def both() -> AsyncIterator[Both]:
    async with AsyncExitStack() as stack:
        prefill, decode = FakeEngine(source("engine-p", port=5600)), ChatEngine()
        for engine in (prefill, decode):
            await stack.enter_async_context(engine)
        settings = RouterSettings(
            prefill=(prefill.url,), decode=(decode.url,), health_interval_seconds=3600.0
        )
        router = await stack.enter_async_context(RouterServer(settings))
        for worker in router.pool.workers():
            await router.monitor.check(worker)
        pair = Both(prefill, decode, router)
        stack.push_async_callback(pair.through.close)
        stack.push_async_callback(pair.alone.close)
        yield pair


def _plain(answer: Any) -> Any:
    """Without ids and what belongs to one engine's answer alone."""
    if isinstance(answer, list):
        return [_plain(part) for part in answer]
    told = answer.model_dump(exclude={"id"})
    told.pop("kv_transfer_params", None)
    return told


async def collected(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


async def test_a_chat_and_its_usage() -> None:
    async with both() as pair:
        told = await pair.same(lambda client: client.chat.completions.create(model="tiny", messages=MESSAGES))
        assert told.choices[0].message.content == "You said 'Grüße, 世界' (0)."
        assert told.usage.prompt_tokens == 12
        leg = pair.prefill.requests[0].body
        assert (leg["max_tokens"], leg["stream"], leg["messages"]) == (1, False, MESSAGES)


async def test_a_streamed_chat_with_usage_at_its_end() -> None:
    async with both() as pair:

        async def ask(client: openai.AsyncOpenAI) -> list[Any]:
            return await collected(
                await client.chat.completions.create(
                    model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
                )
            )

        chunks = await pair.same(ask)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]).startswith("You said")
        assert chunks[-1].usage.total_tokens == 15


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls(stream: bool) -> None:
    async with both() as pair:

        async def ask(client: openai.AsyncOpenAI) -> Any:
            if not stream:
                return await client.chat.completions.create(
                    model="tiny",
                    messages=MESSAGES,
                    tools=TOOLS,
                    tool_choice="auto",
                    parallel_tool_calls=False,
                )
            async with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as events:
                return await events.get_final_completion()

        told = await pair.same(ask)
        (call,) = told.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", TOOL_ARGUMENTS)
        assert pair.prefill.requests[0].body["tools"] == pair.decode.requests[0].body["tools"]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_three_choices(stream: bool) -> None:
    async with both() as pair:

        async def ask(client: openai.AsyncOpenAI) -> Any:
            answer = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, n=3, logprobs=True, top_logprobs=2, stream=stream, seed=1
            )
            return await collected(answer) if stream else answer

        told = await pair.same(ask)
        choices = [choice for chunk in told for choice in chunk.choices] if stream else told.choices
        assert {choice.index for choice in choices} == {0, 1, 2}
        assert any(
            choice.logprobs and len(choice.logprobs.content[0].top_logprobs) == 2 for choice in choices
        )
        leg = pair.prefill.requests[0].body
        assert leg["n"] == 1
        assert not {"logprobs", "top_logprobs", "seed"} & set(leg)
        assert pair.decode.requests[0].params["consumers"] == 3


async def test_structured_output() -> None:
    async with both() as pair:
        told = await pair.same(
            lambda client: client.chat.completions.create(
                model="tiny", messages=MESSAGES, response_format=SCHEMA, max_completion_tokens=50
            )
        )
        assert told.choices[0].message.content == JSON_ANSWER
        assert pair.prefill.requests[0].body["max_completion_tokens"] == 1
        assert pair.decode.requests[0].body["max_completion_tokens"] == 50


async def test_completions_of_several_prompts() -> None:
    async with both() as pair:
        told = await pair.through.completions.create(model="tiny", prompt=["one", "two"], n=2)
        assert [choice.index for choice in told.choices] == [0, 1, 2, 3]
        assert len(pair.prefill.requests) == 2


async def test_models_and_errors_are_the_clients_own_types() -> None:
    async with both() as pair:
        assert [model.id async for model in pair.through.models.list()] == ["tiny"]
        assert (await pair.through.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await pair.through.models.retrieve("nothing")
        pair.decode.plan(failing(400, "no such adapter"))
        with pytest.raises(openai.BadRequestError, match="no such adapter"):
            await pair.through.chat.completions.create(model="tiny", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as caught:
            await pair.through.chat.completions.create(model="tiny", messages=MESSAGES, n=0)
        assert caught.value.param == "n"
