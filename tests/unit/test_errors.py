"""The tree of errors: who is caught by what, and what each message says."""

from __future__ import annotations

import pickle

import pytest

from kvferry import errors
from kvferry.errors import (
    GeometryError,
    HandoffError,
    KvferryError,
    LeaseExpiredError,
    PeerError,
    PeerGoneError,
    PeerLostError,
    TransportError,
    UsageError,
)


def test_everything_that_is_raised_on_purpose_has_one_base() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(found) == 9
    assert all(issubclass(error, KvferryError) for error in found)


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (HandoffError, {UsageError}),
        (PeerLostError, {TransportError}),
        (PeerGoneError, {TransportError}),
        (UsageError, {KvferryError}),
        (PeerError, {KvferryError}),
        (TransportError, {KvferryError}),
        (GeometryError, {KvferryError}),
        (LeaseExpiredError, {KvferryError}),
    ],
)
def test_the_tree(error: type[KvferryError], bases: set[type]) -> None:
    assert set(error.__bases__) == bases


def test_a_handoff_error_names_its_key() -> None:
    error = HandoffError("remote_port", "is missing")
    assert (error.field, error.problem) == ("remote_port", "is missing")
    assert str(error) == "kv_transfer_params.remote_port: is missing"


def test_a_transport_error_says_whether_to_try_again() -> None:
    assert not TransportError("no").retryable
    assert TransportError("busy", retryable=True).retryable
    assert not PeerLostError("gone").retryable


def test_a_geometry_error_shows_both_sides_and_the_fix() -> None:
    error = GeometryError("block_tokens", 16, 32)
    assert str(error) == "block_tokens differs: ours is 16, theirs is 32"
    assert (error.field, error.ours, error.theirs) == ("block_tokens", 16, 32)
    fixed = GeometryError("dtype", "a", "b", "set --dtype")
    assert str(fixed) == "dtype differs: ours is 'a', theirs is 'b'; set --dtype"


def test_errors_of_plain_text_cross_processes() -> None:
    error = pickle.loads(pickle.dumps(UsageError("pass a port")))
    assert (type(error), str(error)) == (UsageError, "pass a port")
