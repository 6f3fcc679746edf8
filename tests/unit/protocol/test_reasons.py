"""Reasons: a bounded code, then detail."""

from __future__ import annotations

from kvferry.protocol import reasons
from kvferry.protocol.reasons import CODES, DETAIL_CHARACTERS_MAX, because, code_of, coded


def test_every_code_is_in_the_set() -> None:
    named = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    assert named == CODES


def test_a_reason_is_a_code_and_a_detail_of_bounded_length() -> None:
    assert because("geometry") == "geometry"
    assert because("geometry", "block size") == "geometry: block size"
    assert len(because("geometry", "x" * 10_000)) == len("geometry: ") + DETAIL_CHARACTERS_MAX


def test_the_code_of_a_stranger_is_other() -> None:
    assert code_of("geometry: block size") == "geometry"
    assert code_of("novelty: of a newer peer") == "other"
    assert code_of("") == "other"


def test_a_code_is_put_in_front_only_once() -> None:
    assert coded("handshake", "geometry: block size") == "geometry: block size"
    assert coded("handshake", "no answer") == "handshake: no answer"
    assert coded("peer_lost", coded("peer_lost", "reset")) == "peer_lost: reset"
