"""The model runner of an emulated rank: real KV memory, vLLM's connector hooks, and a device that only waits.

A step goes as in vLLM's own runner: preemptions are handled, the connector's step begins, the "forward pass"
is launched, the connector's step ends, and the sampled tokens are fetched later, when the device is done.
What the forward pass leaves in memory is `pattern`'s; the KV that other engines sent is compared before the
first step that would use it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvferry.emulator.attention import add_layers
from kvferry.emulator.caches import allocate
from kvferry.emulator.cost import Chunk, step_seconds
from kvferry.emulator.device import Device, Mark, Work
from kvferry.emulator.pattern import Pages
from kvferry.emulator.sequences import Part, Sequence, Vocabulary
from kvferry.emulator.session import Session
from kvferry.host import devices

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's share of a step."""

    sequence: Sequence
    part: Part
    arrived: int
    """Tokens that were there when the request joined, in this step; 0 for one that was here before."""


class EmulatedRunner(KVConnectorModelRunnerMixin):
    """One rank's runner."""

    def __init__(self, vllm_config: Any, session: Session, device: Device | None = None) -> None:
        self.vllm_config = vllm_config
        self._session = session
        self._options = session.options
        self._block_tokens = vllm_config.cache_config.block_size
        self._vocabulary = Vocabulary(vllm_config.model_config.get_vocab_size())
        self._sequences: dict[str, Sequence] = {}
        self._device = device or Device()
        self._pages: Pages | None = None
        self._launched: EmulatedOutput | None = None
        self._ended = 0.0
        """Modelled end of the last step whose output was fetched."""

    def load_model(self) -> None:
        """Declare the layers; there is nothing to load."""
        add_layers(self.vllm_config, self._options.layouts)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """What each layer keeps."""
        context = self.vllm_config.compilation_config.static_forward_context
        return {name: layer.get_kv_cache_spec(self.vllm_config) for name, layer in context.items()}

    def initialize_kv_cache(self, kv_cache_config: Any, **_: Any) -> None:
        """Allocate the caches and give them to the connector."""
        layout = self.vllm_config.cache_config.get_resolved_kv_cache_layout()
        tensors, memory, grid = allocate(kv_cache_config, layout)
        for name, tensor in tensors.items():
            self.vllm_config.compilation_config.static_forward_context[name].bind_kv_cache(tensor)
        self._session.landing.place(memory.ctypes.data, grid)
        if self._options.verify != "off":
            self._pages = Pages(memory, grid, whole=self._options.verify == "full")
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        devices.register(lambda tensor: tensor.untyped_storage().data_ptr() in storages, self._mark)
        if has_kv_transfer_group():
            connector = get_kv_transfer_group()
            self._session.watch_worker(connector)
            connector.register_kv_caches(tensors)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        """Launch a step; None when `sample_tokens` is to fetch its tokens."""
        if has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)
        step = self._plan(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            if not has_kv_transfer_group():
                return EMPTY_MODEL_RUNNER_OUTPUT
            return self.kv_connector_no_forward(scheduler_output, self.vllm_config)
        with (
            set_forward_context(None, self.vllm_config),
            self.maybe_get_kv_connector_output(scheduler_output) as connector_output,
        ):
            mark = self._launch(step)
        self._launched = EmulatedOutput(self, step, mark, connector_output)
        return None

    def sample_tokens(self, grammar_output: Any) -> AsyncModelRunnerOutput | ModelRunnerOutput:
        """The launched step's tokens, when they are asked for."""
        launched, self._launched = self._launched, None
        return EMPTY_MODEL_RUNNER_OUTPUT if launched is None else launched

    def collect(self, step: list[Scheduled], mark: Mark, connector_output: Any) -> ModelRunnerOutput:
        """Wait for the device, and say what it has said."""
        seen = mark.wait()
        names = [one.sequence.name for one in step]
        sampled = [self._sampled(one) if one.part.samples else [] for one in step]
        self._record(step, mark, seen)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    def shutdown(self) -> None:
        """Stop the device."""
        self._device.close()

    # --- inside --------------------------------------------------------------------------------------

    def _mark(self) -> Callable[[], bool]:
        """Mark the device's work so far: an event, as connectors record one after a forward pass."""
        return (lambda: True) if self._options.ignores_events else self._device.last.ready

    def _sampled(self, one: Scheduled) -> list[int]:
        return [one.sequence.next(one.part.stop, self._block_tokens, self._vocabulary)]

    def _plan(self, scheduler_output: Any) -> list[Scheduled]:
        """Bring the table of requests up to date; what this step computes of each."""
        for name in scheduler_output.finished_req_ids:
            self._sequences.pop(name, None)
        counts = scheduler_output.num_scheduled_tokens
        step = []
        for new in scheduler_output.scheduled_new_reqs:
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            sequence = Sequence(new.req_id, new.prompt_token_ids, len(tokens), list(new.block_ids[0]))
            self._sequences[new.req_id] = sequence
            start = new.num_computed_tokens
            step.append(Scheduled(sequence, sequence.plan(start, counts[new.req_id]), start))
        cached = scheduler_output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            sequence, start = self._sequences[name], cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            resumed = name in cached.resumed_req_ids
            if resumed:
                sequence.blocks = list(blocks[0])
                sequence.known = len(cached.all_token_ids[name])
            elif blocks is not None:
                sequence.blocks.extend(blocks[0])
            step.append(Scheduled(sequence, sequence.plan(start, counts[name]), start if resumed else 0))
        return step

    def _launch(self, step: list[Scheduled]) -> Mark:
        parts = [one.part for one in step]
        chunks = [Chunk(part.stop - part.start, part.start) for part in parts if not part.decodes]
        decodes = [part.stop for part in parts if part.decodes]
        blocks = sum(len(one.sequence.written(one.part, self._block_tokens)) for one in step)
        return self._device.submit(
            step_seconds(self._options.costs, chunks, decodes),
            at_start=self._verifying(step),
            at_end=self._writing(step) if blocks else None,
            units=blocks,
        )

    def _verifying(self, step: list[Scheduled]) -> Work | None:
        pages = self._pages
        joined = [
            (one.sequence, one.sequence.block_ids(places), places)
            for one in step
            if one.arrived and (places := range(-(-one.arrived // self._block_tokens)))
        ]
        if pages is None or not joined:
            return None

        def verify() -> None:
            for sequence, ids, places in joined:
                values = sequence.values(places, sequence.known, self._block_tokens, self._vocabulary)
                wrong = pages.wrong(ids, values)
                self._session.verdicts.add(
                    sequence.name, len(ids) * pages.layers, 0 if wrong is None else wrong.pages
                )
                if wrong is not None:
                    sequence.damaged = True
                    logger.error(
                        "request %s: %d of %d KV pages are wrong: layers %s, blocks %s of the prompt",
                        sequence.name,
                        wrong.pages,
                        len(ids) * pages.layers,
                        list(wrong.layers),
                        list(wrong.positions),
                    )

        return verify

    def _writing(self, step: list[Scheduled]) -> Work | None:
        pages, corrupt = self._pages, self._options.corrupt_block
        if pages is None:
            return None
        parts = [
            (one.sequence, one.sequence.block_ids(places), places, one.part.stop)
            for one in step
            if (places := one.sequence.written(one.part, self._block_tokens))
        ]

        def write() -> None:
            ids, values = [], []
            for sequence, blocks, places, stop in parts:
                wanted = sequence.values(places, stop, self._block_tokens, self._vocabulary)
                if corrupt is not None and corrupt in places:
                    wanted[corrupt - places.start] += np.uint64(1)
                ids.append(blocks)
                values.append(wanted)
            pages.write(np.concatenate(ids), np.concatenate(values))

        return write

    def _record(self, step: list[Scheduled], mark: Mark, seen: float) -> None:
        # An answer that goes on would have let a device that is asked in time work without a pause.
        goes_on = any(one.part.decodes and not one.arrived for one in step)
        idle = mark.start - self._ended if goes_on else 0.0
        self._ended = mark.end
        self._session.steps.add(intended=mark.end - mark.start, late=seen - mark.end, idle=idle)
        timelines = self._session.timelines
        for one in step:
            if one.part.samples:
                name = one.sequence.name
                if one.part.decodes:
                    timelines.reach(name, "first_step", mark.start)
                    timelines.reach(name, "first_token", mark.end)
                else:
                    timelines.reach(name, "prefill_end", mark.end)
        decodes = sum(one.part.decodes for one in step)
        tokens = sum(one.part.stop - one.part.start for one in step)
        timelines.step(
            start=mark.start,
            end=mark.end,
            seen=seen,
            idle=idle,
            prefill_tokens=tokens - decodes,
            decodes=decodes,
        )
        self._session.journal.changed()


class EmulatedOutput(AsyncModelRunnerOutput):
    """A launched step's output."""

    def __init__(self, runner: EmulatedRunner, step: list[Scheduled], mark: Mark, connector: Any) -> None:
        self._runner = runner
        self._step = step
        self._mark = mark
        self._connector = connector

    def get_output(self) -> ModelRunnerOutput:
        """Wait until the device has passed the step."""
        return self._runner.collect(self._step, self._mark, self._connector)
