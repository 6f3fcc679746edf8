from __future__ import annotations

import pytest

from kvferry.agent.addresses import bare_host, format_address, is_loopback, parse_address
from kvferry.errors import UsageError


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("10.0.0.1", "10.0.0.1:5600"),
        ("prefill-0.pods.local", "prefill-0.pods.local:5600"),
        ("::1", "[::1]:5600"),
        ("fe80::1%eth0", "[fe80::1%eth0]:5600"),
        ("2001:db8::7", "[2001:db8::7]:5600"),
    ],
)
def test_addresses_survive_the_trip(host, text):
    """O04: IPv6 gets brackets, scopes included, and both forms are read."""
    assert format_address(host, 5600) == text
    assert parse_address(text) == (host, 5600)
    assert format_address(f"[{host}]" if ":" in host else host, 5600) == text


def test_a_default_port_serves_addresses_without_one():
    """O04: a bare IPv6 address is not mistaken for a host with a port."""
    assert parse_address("fe80::1%eth0", 7) == ("fe80::1%eth0", 7)
    assert parse_address("::1", 7) == ("::1", 7)
    assert parse_address("[::1]", 7) == ("::1", 7)
    assert parse_address("host", 7) == ("host", 7)


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", "host:x", "host:65536", "host:-1", "::1", "[::1", "[::1]5600", "[::1]:", "[host]:5",
     "a b:5", "host:٣", "[::g]:5", "[fe80::1%]:5", "[fe80::1%e/0]:5", "tcp://x:5", "x;y:5"],
)  # fmt: skip
def test_impossible_addresses_are_refused_by_name(text):
    with pytest.raises(UsageError, match="address"):
        parse_address(text)


def test_the_setting_is_named():
    with pytest.raises(UsageError, match="advertise_host 'a b'"):
        bare_host("a b", "advertise_host")
    with pytest.raises(UsageError, match="port 70000"):
        format_address("host", 70000)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True),
     ("10.0.0.1", False), ("fe80::1%lo", False), ("host", False), ("0.0.0.0", False)],
)  # fmt: skip
def test_loopback_is_known(host, loopback):
    """O03: what only this host can reach is recognised."""
    assert is_loopback(host) is loopback
