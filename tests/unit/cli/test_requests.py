"""The demo's client: answers put together, and failures in the server's words."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from kvferry.cli.ports import free_ports
from kvferry.cli.requests import RequestError, ask, fetch
from tests.support.stub_openai import StubOpenAI

SECONDS = 10.0
PROMPT = {"prompt": [5, 6, 7]}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def stub() -> Iterator[StubOpenAI]:
    with StubOpenAI() as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)], ids=["text", "chat"]
)
def test_a_streamed_answer_equals_the_whole_one(stub: StubOpenAI, path: str, body: dict[str, object]) -> None:
    whole = ask(stub.url, path, body, seconds=SECONDS)
    streamed = ask(stub.url, path, body | {"stream": True}, seconds=SECONDS)
    assert len(whole.tokens[0]) == 3
    assert whole.texts == streamed.texts
    assert whole.tokens == streamed.tokens
    assert whole.finish_reasons == streamed.finish_reasons == ("length",)
    assert whole.prompt_tokens == streamed.prompt_tokens > 0
    assert whole.first_token_seconds is None
    assert streamed.first_token_seconds is not None
    assert streamed.first_token_seconds > 0


def test_every_choice_is_kept_in_order(stub: StubOpenAI) -> None:
    answer = ask(stub.url, "/v1/completions", {"prompt": [[1], [2], [1]]}, seconds=SECONDS)
    assert len(answer.texts) == 3
    assert answer.tokens[0] == answer.tokens[2] != answer.tokens[1]


def test_another_status_is_an_error_with_the_servers_words(stub: StubOpenAI) -> None:
    stub.status = 503
    with pytest.raises(RequestError, match=r"/v1/completions answered 503: .*choices"):
        ask(stub.url, "/v1/completions", PROMPT, seconds=SECONDS)
    stub.metrics = "x" * 1000
    with pytest.raises(RequestError, match=r"answered 503: x{500}\.\.\.$"):
        fetch(stub.url, "/metrics", seconds=SECONDS)


def test_an_error_event_in_a_stream_is_an_error(stub: StubOpenAI) -> None:
    """V02: a stream that breaks off is never a shorter answer."""
    stub.break_stream_with = {"error": {"message": "the KV is lost"}}
    with pytest.raises(RequestError, match=r"broke off: .*the KV is lost"):
        ask(stub.url, "/v1/completions", PROMPT | {"stream": True}, seconds=SECONDS)


def test_nobody_listening_is_an_error_that_names_the_url() -> None:
    (port,) = free_ports(1)
    with pytest.raises(RequestError, match=rf"http://127\.0\.0\.1:{port} gave no whole answer.*refused"):
        fetch(f"http://127.0.0.1:{port}", "/health", seconds=SECONDS)


def test_a_server_that_closes_early_is_an_error() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def close_the_first() -> None:
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.close()

        thread = threading.Thread(target=close_the_first)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RequestError, match="gave no whole answer"):
            ask(url, "/v1/completions", PROMPT, seconds=SECONDS)
        thread.join()


def test_a_silent_server_is_an_error_within_the_bound() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(RequestError, match="timed out"):
            fetch(f"http://127.0.0.1:{listener.getsockname()[1]}", "/health", seconds=0.05)
