"""An emulated rank without an engine: vLLM's configuration, its scheduler, and the runner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.emulator.device import Device
from kvferry.emulator.runner import EmulatedOutput, EmulatedRunner
from kvferry.emulator.scheduler import EmulatedScheduler
from kvferry.emulator.session import session_of
from tests.support.vllm_engine import BLOCK_TOKENS, LAYERS, Shape, kv_cache_config, vllm_config, write_config

FAST = {"prefill_tokens_per_second": 1e9, "decode_seconds": 0.0}


class Rank:
    """One engine's scheduler and runner, two steps at a time under way as in an engine."""

    def __init__(
        self, directory: Path, number: int, emulator: dict[str, Any], device: Device | None, **shape: Any
    ) -> None:
        sizes = Shape(depth=2, step_tokens=64, **shape)
        model = directory / "model"
        model.mkdir(exist_ok=True)
        config = vllm_config(write_config(model), sizes)
        config.kv_transfer_config = None
        config.instance_id = f"rank-{number}"
        config.additional_config = {
            "emulator": {
                "costs": {**FAST, "attention_seconds_per_pair": 0.0, "step_seconds": 0.0},
                "layouts": ["LBHNC"],
                **emulator,
            }
        }
        config.cache_config.kv_cache_layout = "LBHNC"
        caches = kv_cache_config(sizes)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.config = config
        self.session = session_of(config)
        self.runner = EmulatedRunner(config, self.session, device)
        self.runner.load_model()
        self.runner.initialize_kv_cache(caches)
        self.scheduler = EmulatedScheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.said: dict[str, list[int]] = {}
        self.preemptions = 0
        self._under_way: deque[tuple[Any, Any]] = deque()

    @property
    def tensors(self) -> list[Any]:
        """Each layer's cache."""
        context = self.config.compilation_config.static_forward_context
        return [context[name].kv_cache for name in LAYERS]

    def add(self, name: str, prompt: list[int], max_tokens: int = 1) -> Request:
        """A request."""
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        request.sampling_params.update_from_generation_config({}, 2)
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """Plan and launch a step; fetch the output of the oldest one when two are under way."""
        planned = self.scheduler.schedule()
        self.preemptions += len(planned.preempted_req_ids or ())
        with set_current_vllm_config(self.config):
            output = self.runner.execute_model(planned)
            if output is None:
                output = self.runner.sample_tokens(None)
        self._under_way.append((planned, output))
        if len(self._under_way) == 2:
            self.fetch()
        return planned

    def fetch(self) -> None:
        """Process the output of the oldest step."""
        planned, output = self._under_way.popleft()
        if not isinstance(output, ModelRunnerOutput):
            output = output.get_output()
        for outputs in self.scheduler.update_from_output(planned, output).values():
            for one in outputs.outputs:
                self.said.setdefault(one.request_id, []).extend(one.new_token_ids)

    def run(self) -> None:
        """Step until no request is left."""
        while self.scheduler.has_unfinished_requests():
            self.step()
        while self._under_way:
            self.fetch()

    def abort(self, name: str) -> None:
        """The client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def take_as_received(self, name: str) -> None:
        """Give a waiting request blocks for its prompt, as one gets whose KV comes from elsewhere."""
        request = self.scheduler.requests[name]
        self.scheduler.kv_cache_manager.allocate_slots(request, request.num_prompt_tokens)
        request.num_computed_tokens = request.num_prompt_tokens - 1
        self.scheduler.waiting.remove_request(request)

    def first_step(self, name: str) -> None:
        """The step in which a request whose KV came from elsewhere computes its last token."""
        planned = SchedulerOutput.make_empty()
        request = self.scheduler.requests[name]
        planned.scheduled_new_reqs = [NewRequestData.from_request(request, (self.blocks_of(name),))]
        planned.num_scheduled_tokens = {name: 1}
        planned.total_num_scheduled_tokens = 1
        with set_current_vllm_config(self.config):
            assert self.runner.execute_model(planned) is None
            launched = self.runner.sample_tokens(None)
        assert isinstance(launched, EmulatedOutput)
        self.said[name] = launched.get_output().sampled_token_ids[0]

    def blocks_of(self, name: str) -> list[int]:
        """The request's block ids."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def verdicts(self) -> tuple[int, int]:
        """Pages compared, and how many of them were wrong."""
        verdicts = self.session.verdicts.to_dict()
        return verdicts["verified_pages"], verdicts["mismatches"]

    def close(self) -> None:
        """Stop the device and the journal."""
        self.runner.shutdown()
        self.session.close()


MakeRank = Callable[..., Rank]
