"""The entry point that vLLM calls in every process: makes `FerryConnector` known by its name."""

from __future__ import annotations

import logging

from kvferry.connector import compat
from kvferry.errors import UsageError

NAME = "FerryConnector"
MODULE = "kvferry.connector.connector"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the connector with vLLM. Idempotent.

    A vLLM that is too old is only warned of here: it may not use the connector at all. Loading the
    connector refuses it.
    """
    _log_as_vllm_does()
    try:
        compat.check_version()
    except UsageError as error:
        logger.warning("FerryConnector cannot be used: %s", error)
        return
    version = compat.engine_version()
    if compat.is_untested(version):
        logger.warning("vLLM %s is newer than what FerryConnector has been tested with", version)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    from kvferry.connector import admission  # noqa: PLC0415

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    admission.install()


def _log_as_vllm_does() -> None:
    """vLLM configures its own loggers only, and late: ours become their children."""
    logging.getLogger("kvferry").parent = logging.getLogger("vllm")
