"""Free ports and taken ones."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvferry.cli import ports as module
from kvferry.cli.ports import claim_port, free_ports
from kvferry.errors import UsageError


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_no_outgoing_connection_of_this_machine_takes_a_free_port() -> None:
    """A server was once refused its port: a connection of another program had got it in between."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if last - first > 50_000:
        pytest.skip("this machine keeps no ports for servers")
    for port in [*free_ports(50), claim_port("127.0.0.1", 0)]:
        assert not first <= port <= last


def test_where_all_ports_are_for_connections_the_kernel_finds_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = tmp_path / "ip_local_port_range"
    everything.write_text("1024\t65535\n")
    monkeypatch.setattr(module, "_EPHEMERAL", everything)
    ports = free_ports(3)
    assert len(set(ports)) == 3
    assert claim_port("127.0.0.1", ports[0]) == ports[0]


def test_a_port_that_is_taken_is_never_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ports that are left for servers one is taken."""
    (first, second) = sorted(free_ports(2))
    monkeypatch.setattr(module, "_candidates", lambda ephemeral: [first, second])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first))
        listener.listen()
        assert {free_ports(1)[0] for _ in range(8)} == {second}
        assert first not in free_ports(2)


def test_a_machine_that_does_not_tell_its_ranges_has_those_of_linux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EPHEMERAL", tmp_path / "absent")
    assert not 32_768 <= free_ports(1)[0] <= 60_999


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
