"""One fleet of real engines for all tests of a run; whoever kills a part of it starts it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli.tinymodel import Shape, write_model
from tests.support.live import Live, live, make_deployment, one_more_router


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's directory."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_model(directory, Shape())
    return directory


@pytest.fixture(scope="session")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One prefill engine, one decode engine, the router, and a reference engine."""
    with live(make_deployment(model, tmp_path_factory.mktemp("logs"))) as running:
        yield running


@pytest.fixture(scope="session")
def pull_router(engines: Live) -> Iterator[str]:
    """Another router over the same engines: it has everything pulled."""
    with one_more_router(engines, "router-pull", "--transfer-mode", "pull") as url:
        yield url
