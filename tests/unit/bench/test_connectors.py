"""What can be compared."""

from __future__ import annotations

import pytest

from kvferry.bench.connectors import BASELINE, CONNECTORS, NAMES, parse_connectors
from kvferry.bench.dispatch import FerryPull, FerryPush, Style, VllmPull, VllmPush
from kvferry.errors import UsageError

STYLE = Style(model="m")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ferry-push", FerryPush),
        ("ferry-pull", FerryPull),
        ("vllm-push", VllmPush),
        ("vllm-pull", VllmPull),
    ],
)
def test_each_connector_is_sent_its_requests_in_its_way(name: str, kind: type) -> None:
    make = CONNECTORS[name].dispatch
    assert isinstance(make("http://p", "http://d", STYLE), kind)


def test_the_baseline_asks_the_decode_engine_alone() -> None:
    make = CONNECTORS[BASELINE].dispatch
    assert vars_of(make("http://p", "http://d", STYLE)) == "http://d"
    assert not CONNECTORS[BASELINE].needs_prefill


def vars_of(dispatch: object) -> object:
    return getattr(dispatch, "url", None)


def test_names_are_read_in_the_order_that_is_given() -> None:
    assert parse_connectors("vllm-pull, ferry-push") == ("vllm-pull", "ferry-push")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ferry-push,nixl", "must be some of .* not nixl"),
        ("", "not nothing"),
        (BASELINE, f"not {BASELINE}"),
        ("vllm-push,vllm-push", "names one twice"),
    ],
)
def test_names_that_make_no_sense_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_connectors(text)


def test_synchronous_posting_is_the_same_connector_with_another_setting() -> None:
    for name in ("vllm-push", "vllm-pull"):
        usual, synchronous = CONNECTORS[name], CONNECTORS[f"{name}-sync"]
        assert usual.kv_connector == synchronous.kv_connector
        assert (dict(usual.extra), dict(synchronous.extra)) == ({}, {"num_threads": 0})
        assert name in NAMES
