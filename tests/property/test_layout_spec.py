"""What strangers send as a cache description."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import PeerError
from kvferry.layout.describe import describe
from kvferry.layout.spec import decode_spec, encode_spec, validate
from tests.support.caches import cache_of

SPEC = cache_of(
    *describe("BLHNC", layers=2, blocks=3, heads=2, block_tokens=4, content_bytes=8, address=1 << 40),
    facts={"attention_backend": "CPU"},
)
DATA = encode_spec(SPEC)

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where everything in a nest of dictionaries and lists is."""
    if isinstance(value, dict):
        entries = list(value.items())
    else:
        entries = list(enumerate(value)) if isinstance(value, list) else []
    return [path] * bool(path) + [found for key, inner in entries for found in paths(inner, (*path, key))]


def replaced(path: tuple[Any, ...], value: Any) -> Any:
    """The description with one part exchanged."""
    body = msgspec.msgpack.decode(DATA)
    at = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return body


def survives(data: bytes) -> None:
    """Either a valid description or a `PeerError`; nothing else leaves the decoder."""
    with suppress(PeerError):
        validate(decode_spec(data))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_description_or_a_peer_error(data: bytes) -> None:
    """S03 S04"""
    survives(data)


@given(st.integers(0, len(DATA) - 1), st.binary(min_size=1, max_size=4), st.integers(0, 4))
def test_damaged_bytes_are_a_description_or_a_peer_error(place: int, damage: bytes, removed: int) -> None:
    survives(DATA[:place] + damage + DATA[place + removed :])


@given(st.sampled_from(paths(msgspec.msgpack.decode(DATA))), anything)
def test_any_part_may_be_anything(path: tuple[Any, ...], value: Any) -> None:
    """S01: whatever a field holds, it is refused or harmless."""
    survives(msgspec.msgpack.encode(replaced(path, value)))


@pytest.mark.parametrize("path", paths(msgspec.msgpack.decode(DATA)), ids=str)
def test_a_part_of_no_type_at_all_is_refused_by_name(path: tuple[Any, ...]) -> None:
    with pytest.raises(PeerError) as caught:
        decode_spec(msgspec.msgpack.encode(replaced(path, None)))
    named = [key for key in path if isinstance(key, str)]
    assert named[0] in str(caught.value)
