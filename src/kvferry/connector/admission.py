"""Refusing malformed `kv_transfer_params` in the API server's process, where HTTP 400 can still be answered.

vLLM offers no hook there, so `install` wraps the one method through which every request passes on its way
to an engine. Where that method is missing or refuses to be wrapped, nothing is installed: the scheduler
side then counts such a request and lets it run locally. No request that does not carry the params, and no
engine with another connector, is touched.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from kvferry.connector import compat
from kvferry.errors import HandoffError
from kvferry.host.requests import read_params
from kvferry.host.settings import read_modes

CONNECTORS = frozenset({"FerryConnector"})
_MARK = "_kvferry_admission"

logger = logging.getLogger(__name__)


def install() -> bool:
    """Wrap vLLM's input processor. Idempotent; False when this vLLM has none that we know."""
    try:
        from vllm.v1.engine.input_processor import InputProcessor  # noqa: PLC0415
    except ImportError:
        InputProcessor = None
    method = getattr(InputProcessor, "process_inputs", None)
    if method is None or "params" not in inspect.signature(method).parameters:
        logger.warning(
            "malformed kv_transfer_params will run locally instead of being answered with an error"
        )
        return False
    if not hasattr(method, _MARK):
        InputProcessor.process_inputs = _checked(method)
    return True


def check_request(config: Any, params: Any) -> None:
    """Refuse what this engine cannot honour.

    Raises:
        VLLMValidationError: names the key; vLLM's servers answer it with 400.
    """
    transfer = getattr(config, "kv_transfer_config", None)
    if transfer is None or transfer.kv_connector not in CONNECTORS:
        return
    extra = getattr(params, "extra_args", None) or {}
    given = extra.get("kv_transfer_params")
    if not given:
        return
    try:
        read_params(
            given,
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
            modes=read_modes(transfer.kv_connector_extra_config),
        )
    except HandoffError as error:
        raise compat.refusal(str(error), error.field) from error


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "params" in kwargs:
            params = kwargs["params"]
        else:
            params = signature.bind_partial(self, *args, **kwargs).arguments.get("params")
        check_request(self.vllm_config, params)
        return method(self, *args, **kwargs)

    setattr(process_inputs, _MARK, True)
    return process_inputs
