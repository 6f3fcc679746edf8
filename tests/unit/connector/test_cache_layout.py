"""Which order of the KV cache vLLM is asked for, and what happens when it gives another one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.connector import cache_layout, compat
from kvferry.connector.cache_layout import PREFERRED, asked, check_given
from kvferry.connector.connector import FerryConnector
from kvferry.errors import UsageError
from kvferry.host.settings import CACHE_LAYOUTS, read_settings
from kvferry.layout.describe import STRIDE_ORDERS


def config(extra, device="cuda"):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        device_config=SimpleNamespace(device_type=device),
    )


def test_orders_are_those_of_the_engine():
    assert set(STRIDE_ORDERS) == {layout.name for layout in KVCacheLayout}
    assert KVCacheLayout[PREFERRED].is_block_outermost


@pytest.mark.parametrize(
    ("extra", "device", "order"),
    [
        ({}, "cuda", "BLHNC"),
        ({}, "cpu", None),
        ({"cache_layout": "engine"}, "cuda", None),
        ({"cache_layout": "BHLNC"}, "cuda", "BHLNC"),
        ({"cache_layout": "LBHNC"}, "cpu", "LBHNC"),
    ],
)
def test_blocks_outermost_are_preferred_and_a_setting_forces_or_forbids(extra, device, order):
    """G02: one descriptor for a block of all layers."""
    assert FerryConnector.get_required_kvcache_layout(config(extra, device)) == order


def test_an_engine_without_the_choice_is_asked_for_nothing(monkeypatch):
    assert compat.has_cache_layouts()
    monkeypatch.setattr(cache_layout.compat, "has_cache_layouts", lambda: False)
    assert asked("BLHNC", "cuda") is None


def test_an_unknown_order_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="cache_layout must be one of blocks_outermost, engine, LBHNC, "):
        read_settings({"cache_layout": "NHD"}, environment={})


@pytest.mark.parametrize("setting", CACHE_LAYOUTS)
@pytest.mark.parametrize("given", ["LBHNC", "BLHNC", None])
def test_a_named_order_is_what_the_engine_uses_or_it_does_not_start(setting, given):
    """V26: the message names the setting."""
    if setting in ("blocks_outermost", "engine", given):
        check_given(setting, given)
        return
    with pytest.raises(UsageError, match=f"cache_layout is {setting} and the engine "):
        check_given(setting, given)
