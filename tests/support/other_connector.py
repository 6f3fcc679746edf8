"""A second KV connector, to stand beside ours under vLLM's wrapper: it keeps requests' blocks for a while.

It moves nothing. What it would have stored is noted at the moment when its worker side is told to save.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class OtherMetadata(KVConnectorMetadata):  # type: ignore[misc] # mypy skips vLLM
    """Requests that a step computes tokens of."""

    requests: list[str] = field(default_factory=list)


class OtherConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # mypy skips vLLM
    """Saves asynchronously: keeps blocks until `saved` names the request."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.stored: list[str] = []
        """Requests in the order in which their KV was stored, one entry per step."""
        self.saved: set[str] = set()
        """Requests that the test lets go."""

    # --- scheduler side ------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Holds nothing."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> OtherMetadata:
        """What is computed in the step."""
        return OtherMetadata(list(scheduler_output.num_scheduled_tokens))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks."""
        return True, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks."""
        return True, None

    # --- worker side ---------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Store what the step has computed."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, OtherMetadata)
        self.stored += metadata.requests

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Those that the test lets go, once."""
        saved, self.saved = self.saved, set()
        return KVConnectorTransferResults(finished_sending=saved)
