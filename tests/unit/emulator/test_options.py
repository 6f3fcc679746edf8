"""The emulator's options: defaults, overrides, and errors that name the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.emulator.options import LAYOUTS, _Keys, read_options
from kvferry.emulator.presets import DEFAULT, PRESETS, Link
from kvferry.errors import UsageError


def read(**given: Any) -> Any:
    return read_options({"emulator": given}, environment={})


@pytest.mark.parametrize("config", [None, {}, {"emulator": {}}, {"something_else": 1}])
def test_without_options_the_default_preset_counts(config: object) -> None:
    options = read_options(config, environment={})
    assert options.preset == DEFAULT
    assert options.costs == PRESETS[DEFAULT].costs
    assert options.layouts == LAYOUTS
    assert options.verify == "stamps"


def test_single_costs_replace_those_of_the_preset() -> None:
    options = read(preset="llama-3.1-8b-h100", costs={"decode_seconds": 0.25})
    assert options.costs.decode_seconds == 0.25
    assert options.costs.prefill_tokens_per_second == (
        PRESETS["llama-3.1-8b-h100"].costs.prefill_tokens_per_second
    )


def test_a_link_can_be_added_and_a_presets_changed() -> None:
    assert read().link is None
    assert read(link={"bytes_per_second": 5.0}).link == Link(bytes_per_second=5.0)
    slow = PRESETS["slow-link"].link
    assert slow is not None
    changed = read(preset="slow-link", link={"latency_seconds": 1.0}).link
    assert changed == Link(latency_seconds=1.0, bytes_per_second=slow.bytes_per_second)


def test_layouts_keep_their_order() -> None:
    assert read(layouts=["BLHNC", "LBHNC"]).layouts == ("BLHNC", "LBHNC")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"preset": "h300"}, "preset"),
        ({"unknown": 1}, "unknown"),
        ({"seed": "one"}, "seed"),
        ({"costs": {"decode": 1.0}}, "costs has no field 'decode'"),
        ({"costs": {"decode_seconds": -1.0}}, "decode_seconds"),
        ({"link": {"latency_seconds": 1.0}}, "link.*bytes_per_second"),
        ({"link": {"bytes_per_second": 0.0}}, "link.bytes_per_second"),
        ({"layouts": ["HND"]}, "layouts"),
        ({"layouts": []}, "layouts"),
        ({"verify": "some"}, "verify"),
        ({"fragmentation": "much"}, "fragmentation"),
        ({"content_scale": 0}, "content_scale"),
        ({"journal_rows_max": 0}, "journal_rows_max"),
        ({"test_corrupt_block": 1}, "test_corrupt_block.*KVFERRY_TESTING"),
        ({"test_ignore_events": True}, "test_ignore_events.*KVFERRY_TESTING"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=f"--additional-config, emulator: .*{named}"):
        read(**given)


def test_the_planted_fault_needs_the_testing_variable_and_a_sensible_block() -> None:
    testing = {"KVFERRY_TESTING": "1"}
    config = {"emulator": {"test_corrupt_block": 3}}
    assert read_options(config, environment=testing).corrupt_block == 3
    assert read_options({"emulator": {"test_ignore_events": True}}, environment=testing).ignores_events
    with pytest.raises(UsageError, match="test_corrupt_block"):
        read_options({"emulator": {"test_corrupt_block": -1}}, environment=testing)


def test_the_docs_list_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs" / "emulator.md").read_text(encoding="utf-8")
    _, _, options = page.partition("\n## Options\n")
    table = re.findall(r"^\| `(\w+)` \|([^|]*)\|", options.partition("\n## ")[0], flags=re.MULTILINE)
    fields = {field.name: field.default for field in msgspec.structs.fields(_Keys)}
    assert sorted(name for name, _ in table) == sorted(fields)
    for name, shown in table:
        if fields[name] is not None:
            assert shown.strip(" `") == str(fields[name]), name


def test_the_docs_list_every_preset() -> None:
    page = (Path(__file__).parents[3] / "docs" / "emulator.md").read_text(encoding="utf-8")
    _, _, costs = page.partition("\n## Cost model\n")
    assert re.findall(r"^\| `([^`]+)`", costs.partition("\n## ")[0], flags=re.MULTILINE) == list(PRESETS)
