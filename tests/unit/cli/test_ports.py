"""Free ports and taken ones."""

from __future__ import annotations

import socket

import pytest

from kvferry.cli.ports import claim_port, free_ports
from kvferry.errors import UsageError


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_port_zero_is_replaced_by_a_free_one() -> None:
    assert claim_port("127.0.0.1", 0) > 0


def test_a_free_port_is_kept() -> None:
    (port,) = free_ports(1)
    assert claim_port("127.0.0.1", port) == port


def test_a_taken_port_is_an_error_that_names_it_and_the_way_out() -> None:
    """O01: a taken port is found before anything is started."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1 port {port}.*--port"):
            claim_port("127.0.0.1", port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_an_error(port: int) -> None:
    with pytest.raises(UsageError, match=f"--port must be a port from 0 to 65535, not {port}"):
        claim_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1 .*--host"):
        claim_port("192.0.2.1", 0)


def test_ipv6_loopback() -> None:
    """O04: an IPv6 address is bound as such."""
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        assert claim_port("::1", 0) > 0
    except UsageError:
        pytest.skip("this machine has no IPv6 loopback")
