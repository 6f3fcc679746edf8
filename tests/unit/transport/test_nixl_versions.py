from __future__ import annotations

import logging

import pytest

from kvferry.errors import UsageError
from kvferry.transport.nixl_versions import VERSION_ADVISED, check_version


@pytest.mark.parametrize(
    "version", ["1.4.0", "1.4.1", "1.5.1", "1.5.99", "1.5", "1.5.1+cu13", VERSION_ADVISED]
)
def test_supported_versions_pass(version):
    check_version(version, allow_untested=False)


@pytest.mark.parametrize("version", ["0.10.0", "0.10.1", "1.3.0", "1.3.1", "1.6.0", "2.0", "10.5.1", "dev"])
def test_other_versions_are_refused_with_a_hint_and_an_override(version, caplog):
    """A18, A19: outside of the range start fails and says what to install; the override works."""
    with pytest.raises(UsageError, match=rf"NIXL {version} .*install nixl==1\.5\.1.*allow_untested"):
        check_version(version, allow_untested=False)
    with caplog.at_level(logging.WARNING):
        check_version(version, allow_untested=True)
    assert f"NIXL {version} is not in the range" in caplog.text
