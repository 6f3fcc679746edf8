"""Which versions of vLLM can be emulated, and what differs between them."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvferry.emulator.compat import check_version, transfer_reports
from kvferry.errors import UsageError


@pytest.mark.parametrize("version", [None, "0.29.0", "0.30.1", "0.32.0+cpu"])
def test_supported_versions_are_silent(version: str | None, caplog: pytest.LogCaptureFixture) -> None:
    check_version(version)
    assert caplog.records == []


@pytest.mark.parametrize("version", ["0.28.3", "0.9.2", "unknown"])
def test_an_older_version_is_refused_with_those_that_do(version: str) -> None:
    with pytest.raises(UsageError, match=r"vLLM 0\.29 to 0\.32, and this is") as refused:
        check_version(version)
    assert version in str(refused.value)


def test_a_newer_version_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_version("0.33.0")
    assert "0.29 to 0.32, and this is 0.33.0" in caplog.text


def test_reports_of_both_kinds_of_hooks_are_read() -> None:
    results = SimpleNamespace(finished_sending={"a"}, finished_recving=None, failed_recving={"c"})
    assert transfer_reports(results) == ({"a"}, set(), {"c"})
    assert transfer_reports((None, {"b"})) == (set(), {"b"}, set())
