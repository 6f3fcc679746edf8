"""The entry point that vLLM calls in every process."""

from __future__ import annotations

import logging

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.exceptions import VLLMValidationError

from kvferry.connector import admission, compat, plugin
from kvferry.connector.connector import FerryConnector
from kvferry.errors import UsageError


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory._registry.pop(plugin.NAME, None)
    ours = logging.getLogger("kvferry")
    monkeypatch.setattr(ours, "parent", ours.parent)


def test_the_name_is_all_that_a_user_writes():
    plugin.register()
    config = KVTransferConfig(kv_connector="FerryConnector", kv_role="kv_producer")
    assert KVConnectorFactory.get_connector_class(config) is FerryConnector


def test_registering_twice_is_harmless():
    plugin.register()
    plugin.register()
    assert plugin.NAME in KVConnectorFactory._registry


def test_an_old_vllm_is_warned_of_and_not_broken(monkeypatch):
    """The plugin is called in every vLLM of the machine, whether it uses the connector or not."""
    lines = []
    monkeypatch.setattr(compat, "engine_version", lambda: "0.28.0")
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *args: lines.append(text % args))
    plugin.register()
    assert plugin.NAME not in KVConnectorFactory._registry
    assert "0.29" in lines[0]


def test_our_lines_go_where_vllms_go():
    plugin.register()
    parent = logging.getLogger("kvferry.connector.scheduler").parent
    while parent is not None and parent.name != "vllm":
        parent = parent.parent
    assert parent is logging.getLogger("vllm")


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
    """S01: vLLM's own validation error is a 400 to the client, and it names the key."""
    process = admission._checked(_Processor.process_inputs)
    args, kwargs = (
        (("r", "p", _Params(BAD)), {}) if how == "position" else (("r", "p"), {"params": _Params(BAD)})
    )
    with pytest.raises(VLLMValidationError, match="remote_port") as caught:
        process(_Processor(), *args, **kwargs)
    assert caught.value.parameter == "remote_port"


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
    with pytest.raises(VLLMValidationError, match="do_remote_decode"):
        admission._checked(_Processor.process_inputs)(
            _Processor(role="kv_consumer"), "r", "p", _Params({"do_remote_decode": True})
        )


def test_loading_the_connector_on_an_old_vllm_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(compat, "engine_version", lambda: "0.13.0")
    with pytest.raises(UsageError, match="CVE-2026-22807"):
        compat.check_version()
