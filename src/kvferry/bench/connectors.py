"""The connectors that can be compared: which one an engine loads, and how its requests are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvferry.bench.dispatch import Direct, Dispatch, FerryPull, FerryPush, Style, VllmPull, VllmPush
from kvferry.errors import UsageError

Kind = Literal["ours", "stock", "baseline"]
Maker = Callable[[str, str, Style], Dispatch]
"""From the URLs of the prefill and the decode engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """One side of a comparison. `extra` goes into both engines' `kv_connector_extra_config`."""

    name: str
    label: str
    kind: Kind
    kv_connector: str
    dispatch: Maker
    extra: Mapping[str, object] = field(default_factory=dict)
    needs_prefill: bool = True


def _decode_alone(prefill: str, decode: str, style: Style) -> Dispatch:
    del prefill
    return Direct(decode, style)


_SYNCHRONOUS = {"num_threads": 0}
PUSH, PULL = "ferry-push", "ferry-pull"
STOCK_PULL = ("vllm-pull", "vllm-pull-sync")
PULLING = (PULL, *STOCK_PULL)
"""Those whose decode engine fetches."""
BASELINE = "decode-alone"
_ALL = (
    Connector(
        name=PUSH,
        label="kvferry push",
        kind="ours",
        kv_connector="FerryConnector",
        dispatch=FerryPush,
    ),
    Connector(
        name=PULL,
        label="kvferry pull",
        kind="ours",
        kv_connector="FerryConnector",
        dispatch=FerryPull,
    ),
    Connector(
        name="vllm-push",
        label="vLLM push",
        kind="stock",
        kv_connector="NixlPushConnector",
        dispatch=VllmPush,
    ),
    Connector(
        name="vllm-pull", label="vLLM pull", kind="stock", kv_connector="NixlConnector", dispatch=VllmPull
    ),
    Connector(
        name="vllm-push-sync",
        label="vLLM push, synchronous posting",
        kind="stock",
        kv_connector="NixlPushConnector",
        dispatch=VllmPush,
        extra=_SYNCHRONOUS,
    ),
    Connector(
        name="vllm-pull-sync",
        label="vLLM pull, synchronous posting",
        kind="stock",
        kv_connector="NixlConnector",
        dispatch=VllmPull,
        extra=_SYNCHRONOUS,
    ),
    Connector(
        name=BASELINE,
        label="decode alone, no transfer",
        kind="baseline",
        kv_connector="",
        dispatch=_decode_alone,
        needs_prefill=False,
    ),
)
CONNECTORS = {connector.name: connector for connector in _ALL}
NAMES = tuple(name for name in CONNECTORS if name != BASELINE)
"""What `--connectors` takes; the baseline is added where it is wanted."""


def parse_connectors(text: str) -> tuple[str, ...]:
    """Read `ferry-push,vllm-push`.

    Raises:
        UsageError: one is unknown or named twice.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise UsageError(
            f"--connectors must be some of {','.join(NAMES)}, not {','.join(unknown) or 'nothing'}"
        )
    if len(set(names)) != len(names):
        raise UsageError("--connectors names one twice; name each once")
    return names
