"""The entry point that vLLM calls in every process."""

from __future__ import annotations

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvferry.connector import admission, compat, plugin
from kvferry.connector.connector import FerryConnector
from kvferry.errors import UsageError


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory._registry.pop(plugin.NAME, None)


def test_the_name_is_all_that_a_user_writes():
    plugin.register()
    config = KVTransferConfig(kv_connector="FerryConnector", kv_role="kv_producer")
    assert KVConnectorFactory.get_connector_class(config) is FerryConnector


def test_registering_twice_is_harmless():
    plugin.register()
    plugin.register()
    assert plugin.NAME in KVConnectorFactory._registry


def test_an_old_vllm_is_warned_of_and_not_broken(monkeypatch, caplog):
    """The plugin is called in every vLLM of the machine, whether it uses the connector or not."""
    monkeypatch.setattr(compat, "engine_version", lambda: "0.28.0")
    with caplog.at_level("WARNING", logger="kvferry.connector.plugin"):
        plugin.logger.propagate = True
        plugin.register()
    assert plugin.NAME not in KVConnectorFactory._registry


def test_admission_is_installed_once(monkeypatch):
    from vllm.v1.engine.input_processor import InputProcessor

    monkeypatch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs)
    assert admission.install()
    wrapped = InputProcessor.process_inputs
    assert admission.install()
    assert InputProcessor.process_inputs is wrapped


def test_an_unknown_input_processor_is_left_alone(monkeypatch):
    from vllm.v1.engine.input_processor import InputProcessor

    def process_inputs(self, something_else):
        return something_else

    monkeypatch.setattr(InputProcessor, "process_inputs", process_inputs)
    assert admission.install() is False
    assert InputProcessor.process_inputs is process_inputs


class _Processor:
    """What the wrapper sees of vLLM's input processor."""

    def __init__(self, connector="FerryConnector", role="kv_both"):
        self.vllm_config = type("Config", (), {})()
        self.vllm_config.kv_transfer_config = KVTransferConfig(kv_connector=connector, kv_role=role)

    def process_inputs(self, request_id, prompt, params, supported_tasks=()):
        return request_id, params


class _Params:
    def __init__(self, given):
        self.extra_args = {"kv_transfer_params": given} if given is not None else None


BAD = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_host": "h", "remote_port": 10**9}


@pytest.mark.parametrize("how", ["position", "keyword"])
def test_malformed_params_are_refused_before_an_engine_sees_them(how):
    """S01: a ValueError there is a 400 to the client, and it names the key."""
    process = admission._checked(_Processor.process_inputs)
    args, kwargs = (
        (("r", "p", _Params(BAD)), {}) if how == "position" else (("r", "p"), {"params": _Params(BAD)})
    )
    with pytest.raises(ValueError, match="remote_port"):
        process(_Processor(), *args, **kwargs)


@pytest.mark.parametrize(
    ("processor", "given"),
    [
        (_Processor("NixlConnector"), BAD),
        (_Processor(), None),
        (_Processor(), {"do_remote_decode": True}),
    ],
)
def test_all_else_passes_untouched(processor, given):
    params = _Params(given)
    assert admission._checked(_Processor.process_inputs)(processor, "r", "p", params) == ("r", params)


def test_the_wrong_role_is_refused():
    with pytest.raises(ValueError, match="do_remote_decode"):
        admission._checked(_Processor.process_inputs)(
            _Processor(role="kv_consumer"), "r", "p", _Params({"do_remote_decode": True})
        )


def test_loading_the_connector_on_an_old_vllm_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(compat, "engine_version", lambda: "0.13.0")
    with pytest.raises(UsageError, match="CVE-2026-22807"):
        compat.check_version()
