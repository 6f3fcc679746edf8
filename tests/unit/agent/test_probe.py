"""Whether anybody listens at an address, over real sockets of the loopback interface."""

from __future__ import annotations

import queue
import socket
import threading
from typing import Any

import pytest

from kvferry.agent.probe import THREADS_MAX, Prober, is_refused
from kvferry.cli.ports import free_ports

HOST = "127.0.0.1"
WAIT_SECONDS = 15.0
"""Only a broken run waits for so long."""


def free_port() -> int:
    return free_ports(1)[0]


def test_a_refusal_is_told_from_an_open_port() -> None:
    port = free_port()
    assert is_refused(HOST, port)
    with socket.create_server((HOST, port)):
        assert not is_refused(HOST, port)


def test_what_listens_and_accepts_nothing_does_not_refuse() -> None:
    """P47: a frozen process; its kernel takes the connection, or nothing does until the time is over."""
    with socket.create_server((HOST, 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex((HOST, port))
        assert not is_refused(HOST, port, 0.1)
        for one in waiting:
            one.close()


@pytest.mark.parametrize(
    ("host", "port"), [("255.255.255.255", 1), ("a b", 1), (HOST, -1), ("a\0b", 1), ("x" * 100, 1)]
)
def test_an_address_that_cannot_be_tried_proves_nothing(host: str, port: int) -> None:
    assert not is_refused(host, port)


def test_a_host_refuses_only_when_each_of_its_addresses_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: one of two addresses is without a route, so nobody knows whether the engine listens there."""
    addresses = [HOST, "255.255.255.255"]

    def names(host: str, port: int, *rest: Any) -> list[Any]:
        del host, rest
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr("socket.getaddrinfo", names)
    port = free_port()
    assert not is_refused("engine", port)
    addresses.reverse()
    assert not is_refused("engine", port)
    addresses[:] = [HOST, "127.0.0.2"]
    assert is_refused("engine", port)


def test_answers_come_from_threads_of_the_prober_each_once() -> None:
    prober = Prober()
    answers: queue.Queue[tuple[bool, int]] = queue.Queue()
    port = free_port()
    for _ in range(3 * THREADS_MAX):
        prober.ask(HOST, port, lambda refused: answers.put((refused, threading.get_ident())))
    found = [answers.get(timeout=WAIT_SECONDS) for _ in range(3 * THREADS_MAX)]
    assert {refused for refused, _ in found} == {True}
    assert threading.get_ident() not in {thread for _, thread in found}
    assert len({thread for _, thread in found}) <= THREADS_MAX
    prober.close()
    assert answers.empty()


@pytest.mark.parametrize("used", [False, True])
def test_after_the_end_nothing_is_tried_and_everybody_is_answered(used: bool) -> None:
    """P66: the answer is that there is no proof; no thread is started for it."""
    prober = Prober()
    answers: queue.Queue[bool] = queue.Queue()
    port = free_port()
    if used:
        prober.ask(HOST, port, answers.put)
        assert answers.get(timeout=WAIT_SECONDS)
    prober.close()
    prober.close()
    prober.ask(HOST, port, answers.put)
    assert answers.get_nowait() is False
