"""One configuration directory and an engine maker for the connector's tests."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from tests.support.scripted_agent import ScriptedAgent
from tests.support.vllm_engine import Engine, Shape, write_config


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine_of(model_directory):
    """Make an engine of a shape; its agents are scripted."""

    def make(**shape):
        shape = Shape(**shape)
        agents = [ScriptedAgent() for _ in range(shape.ranks)]
        engine = Engine(model_directory, agents, shape)
        engine.agents = agents
        engine.agent = agents[0]
        return engine

    return make
