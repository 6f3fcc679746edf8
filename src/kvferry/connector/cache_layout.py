"""The order of an engine's KV cache in memory: what vLLM is asked for, and whether it was given.

vLLM takes one order from its connector and uses it where the attention backend offers it; with a warning it
uses the backend's own where not. Posting costs by descriptor, so orders with blocks outermost are worth
asking for: a block of all layers is one descriptor then.
"""

from __future__ import annotations

from kvferry.connector import compat
from kvferry.errors import UsageError
from kvferry.host.settings import BLOCKS_OUTERMOST, OF_THE_ENGINE
from kvferry.layout.describe import STRIDE_ORDERS

PREFERRED = "BLHNC"
"""Of the orders with blocks outermost the one that most attention backends offer."""


def asked(setting: str, device_type: str) -> str | None:
    """The order to ask vLLM for; None for none."""
    if setting == OF_THE_ENGINE or not compat.has_cache_layouts():
        return None
    if setting == BLOCKS_OUTERMOST:
        # The attention of the CPU has one order only, and a warning at each start would say nothing else.
        return None if device_type == "cpu" else PREFERRED
    return setting


def check_given(setting: str, given: str | None) -> None:
    """Whether an order that was named is the one that the engine uses.

    Raises:
        UsageError: it is another one, or this vLLM has no choice.
    """
    if setting in STRIDE_ORDERS and given != setting:
        found = f"uses {given}" if given else "lets nobody choose"
        raise UsageError(
            f"kv_connector_extra_config.cache_layout is {setting} and the engine {found}; its log says what "
            f"the attention backend offers. {BLOCKS_OUTERMOST} asks and takes what there is"
        )
