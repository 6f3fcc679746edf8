"""The scheduler side: vLLM's hooks in the engine core's process, in that process's one thread."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from kvferry.connector import stats
from kvferry.connector.metadata import NO_ORDERS, FerryMetadata, Handshake, WorkerReport
from kvferry.connector.stats import FerryStats
from kvferry.errors import HandoffError
from kvferry.handoff import HOLDS_KEY, DecodeParams, HeldParams, PrefillParams, SourceParams, parse_held_of
from kvferry.host.events import Ended, Event, PreemptAnswer, Quarantined, RequestId, Safe
from kvferry.host.facts import EngineFacts
from kvferry.host.histories import wanted_history
from kvferry.host.holding import Holding, HoldLimits
from kvferry.host.metrics import HISTORIES
from kvferry.host.misfits import Misfits
from kvferry.host.orders import Scheduled
from kvferry.host.outcomes import Outcomes
from kvferry.host.pins import BlockPool, Pins
from kvferry.host.prefixes import TokenRequest
from kvferry.host.requests import EngineRequest, is_probe, is_release, read_params
from kvferry.host.scheduler_consumer import SchedulerConsumer
from kvferry.host.scheduler_producer import HandedOver, SchedulerProducer
from kvferry.host.settings import Settings
from kvferry.host.starvation import Starvation
from kvferry.host.wanted import whole_prompt
from kvferry.ids import BlockId, TransferId

logger = logging.getLogger(__name__)

_GAUGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (stats.IN_FLIGHT, ("sending",)),
    (stats.IN_FLIGHT, ("held",)),
    (stats.IN_FLIGHT, ("receiving",)),
    (stats.QUARANTINED, ()),
    (stats.HELD_BLOCKS, ()),
    (stats.READY, ()),
)


class Directory(Protocol):
    """The side channel's server, as far as the connector uses it."""

    @property
    def port(self) -> int:
        """Where it listens."""
        ...

    def close(self) -> None:
        """Stop. Idempotent."""
        ...


class OpenDirectory(Protocol):
    """Starts a directory that answers with these ranks."""

    def __call__(self, settings: Settings, handshakes: list[Handshake]) -> Directory:
        """Raises UsageError when the port is taken."""
        ...


class FerryScheduler:
    """One engine's scheduler side."""

    def __init__(
        self,
        facts: EngineFacts,
        settings: Settings,
        open_directory: OpenDirectory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._clock = clock
        self._starvation = Starvation(settings.limits.starved_seconds)
        self._settings = settings
        self._open_directory = open_directory
        self._directory: Directory | None = None
        self._source: SourceParams | None = None
        self._pins = Pins()
        self._stats = FerryStats()
        self._gauges: tuple[int | None, ...] = (None,) * len(_GAUGES)
        """Their values of the last report."""
        self._stirred = True
        """Whether something has happened since the last report that may have changed a statistic."""
        self._outcomes = Outcomes(facts, self._stats)
        self._misfits = Misfits()
        self._probes: dict[RequestId, TransferId | None] = {}
        """Requests that only ask, and the decode leg that one asks about."""
        self.producer = SchedulerProducer(facts, self._pins)
        self.consumer = SchedulerConsumer(
            facts,
            self._pins,
            waiting_blocks_share=settings.waiting_blocks_share,
            quarantine_share=settings.quarantine_share,
            recompute_tokens=settings.kv_recompute_threshold,
        )
        self.holding = Holding(
            facts,
            self._pins,
            self._stats,
            HoldLimits(
                settings.decoder_kv_blocks_ttl,
                int(facts.block_count * settings.held_blocks_share),
                max(settings.kv_recompute_threshold, 1),
            ),
            clock,
            lambda: secrets.token_hex(16),
        )
        self._both_directions = _keeps_turns(facts, settings)

    def bind_pool(self, pool: BlockPool) -> None:
        """The engine's block pool exists now."""
        self._pins.bind(pool)

    def publish(self, handshakes: list[Handshake]) -> None:
        """Every rank has described itself: open the directory.

        Raises:
            UsageError: the side channel's port is taken.
        """
        self.close()
        self._directory = self._open_directory(self._settings, handshakes)
        self._source = SourceParams(
            engine=self._facts.engine,
            host=self._settings.advertise_host,
            port=self._directory.port,
            tp=self._facts.tp,
            pp=self._facts.pp,
            incarnation=handshakes[0].incarnation,
            mode=self._settings.modes.default,
        )

    def arrived(self, request: TokenRequest) -> None:
        """A new request. Params that cannot be honoured are counted, and the request runs locally."""
        if not request.kv_transfer_params:
            return
        self._stirred = True
        try:
            self._admit(request)
        except HandoffError as error:
            self._stats.count(stats.REFUSED_PARAMS, labels=(_label(error.field),))
            logger.warning("request %s is computed locally: %s", request.request_id, error)

    def _admit(self, request: TokenRequest) -> None:
        params = read_params(
            request.kv_transfer_params,
            produces=self._facts.produces,
            consumes=self._facts.consumes,
            modes=self._settings.modes,
        )
        if params is None:
            return
        if isinstance(params, PrefillParams) and self._only_asks(request, params):
            return
        if params.transfer is None:
            self._stats.count(stats.LEGACY_PAIRINGS)
        if isinstance(params, DecodeParams):
            stop = self._facts.received_stop(request.num_prompt_tokens)
            if not self.consumer.announce(request, whole_prompt(request, params, stop)):
                self._outcomes.skipped("in_use", params.mode or "push")
            elif self._both_directions:
                self.holding.note(request, params)
        elif not self.producer.expect(request, params):
            problem = "or the request's own id is in use by another request; mint one id per dispatch"
            raise HandoffError("transfer_id", problem)
        elif params.history is not None:
            self._look_back(request, params, params.history)

    def _only_asks(self, request: TokenRequest, params: PrefillParams) -> bool:
        """Whether a prefill request wants nothing computed; what it wants is done or will be told."""
        given = request.kv_transfer_params
        if is_probe(given):
            self._probes[request.request_id] = parse_held_of(given)
            return True
        if is_release(given):
            self._probes[request.request_id] = None
            if params.transfer is not None:
                self.producer.release(params.transfer)
            return True
        return False

    def _look_back(self, request: TokenRequest, params: PrefillParams, held: HeldParams) -> None:
        """A decode engine keeps the turn before: receive of it what is this prompt's beginning."""
        if not self._both_directions:
            self._stats.count(HISTORIES, labels=("off",))
            return
        wanted = wanted_history(request, held, params.mode or "push", self._facts)
        announced = self.consumer.announce(request, wanted)
        if not (wanted.stop and announced):
            self._stats.count(HISTORIES, labels=("in_use" if wanted.stop else "other_tokens",))

    def matched_tokens(self, request: TokenRequest, local_tokens: int) -> tuple[int | None, bool]:
        """vLLM's `get_num_new_matched_tokens`."""
        if self.holding.blocks:
            self.holding.make_way(self._facts.blocks(request.num_tokens) - self._facts.blocks(local_tokens))
        if not self.consumer:
            return 0, False
        wanted = self.consumer.wanted_tokens(request, local_tokens)
        return wanted, bool(wanted)

    def allocated(self, request: EngineRequest, blocks: Any, external_tokens: int) -> None:
        """vLLM's `update_state_after_alloc`; its blocks are read for a request whose KV shall come."""
        if not self.consumer.is_waiting(request.request_id):
            return
        self._stirred = True
        target = blocks.get_block_ids() if external_tokens > 0 else ()
        asked = self.consumer.allocated(request, target, external_tokens)
        wanted = self.consumer.wanted_by(request.request_id)
        if wanted is not None and wanted.is_history:
            self._stats.count(HISTORIES, labels=("asked" if asked else "computed",))
        elif wanted is not None and not asked:
            self._outcomes.skipped("prefix_hit", wanted.mode)

    def plan(self, step: Any) -> FerryMetadata:
        """vLLM's `build_connector_meta`."""
        # An engine that is not a consumer waits for its consumers, and nobody waits for it.
        if step.total_num_scheduled_tokens or not self.consumer.wants_to_run:
            self._starvation.is_over()
        elif self._starvation.is_due(self._clock(), stuck=True) and not self.consumer.relinquish():
            self.producer.reclaim()
        if not (self.consumer.has_commands or self.producer.has_orders or self.holding.has_orders):
            return NO_ORDERS
        metadata = FerryMetadata(commands=self.consumer.take_commands())
        computes_ours = self.producer.has_any_of(step.num_scheduled_tokens.keys())
        scheduled = _scheduled(step, self.producer.is_ours) if computes_ours else ()
        self.producer.plan(scheduled, step.preempted_req_ids or (), metadata)
        self.holding.plan(metadata)
        return NO_ORDERS if metadata.is_empty else metadata

    def finish(
        self, request: TokenRequest, blocks: tuple[list[BlockId], ...] = ()
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's `request_finished_all_groups`: whether to keep the blocks, and the answer's params."""
        self._stirred = True
        name = request.request_id
        if name in self._probes:
            return False, self._told(request, self._probes.pop(name))
        wanted = self.consumer.wanted_by(name)
        if not self.consumer.finish(request) and wanted is not None:
            if wanted.is_history:
                self._stats.count(HISTORIES, labels=("not_admitted",))
            else:
                self._outcomes.skipped("not_admitted", wanted.mode)
        keep, held = self.producer.finish(request)
        if held is not None:
            return keep, self._answer(request, held)
        keeps = self._both_directions and len(blocks) == 1
        kept = self.holding.finish(request, blocks[0], self._source) if keeps else None
        return keep, None if kept is None else _kept(request.request_id, kept)

    def _told(self, request: EngineRequest, origin: TransferId | None) -> dict[str, Any] | None:
        """The answer of a request that only asks: who we are, and what we keep of a decode leg's request."""
        answer = self._answer(request, None)
        if answer is None or origin is None:
            return answer
        kept = self.holding.kept_of(origin)
        told = {} if kept is None else _kept(request.request_id, kept)
        return answer | told | {HOLDS_KEY: self._both_directions}

    def _answer(self, request: EngineRequest, held: HandedOver | None) -> dict[str, Any] | None:
        """`held` is None for one who only wants to know who we are."""
        if self._source is None:
            return None
        params = self._source.to_params() | {
            "remote_request_id": request.request_id,
            # Consumers ask us for them; routers made for vLLM's own connectors pass the key on.
            "remote_block_ids": [],
        }
        if held is not None:
            params["transfer_id"] = held.transfer
            params["transfer_mode"] = held.mode
            params["remote_num_tokens"] = held.tokens
        return params

    def results(self, output: Any) -> None:
        """vLLM's `update_connector_output`: what all ranks have reported for one step."""
        report = output.kv_connector_worker_meta
        if not (report or output.finished_recving or output.finished_sending):
            return
        self._stirred = True
        if isinstance(report, WorkerReport):
            # Before the engine frees anything that the same step reports as ended.
            for event in report.events:
                self._handle(event)
        if output.finished_recving:
            self.consumer.received(output.finished_recving)
        if output.finished_sending:
            self.producer.released(output.finished_sending)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Ended) and event.held:
            self.holding.rank_ended(event)
        elif isinstance(event, Ended):
            self._outcomes.add(event)
            wanted = None if event.sending else self.consumer.wanted_by(event.request)
            if event.sending:
                self.producer.rank_ended(event.rank, event.request)
            elif wanted is not None:
                self._misfits.ended(wanted.source.engine, event, self._clock())
        elif isinstance(event, Quarantined):
            self.consumer.quarantined(event)
        elif isinstance(event, Safe):
            self.consumer.safe(event)
        elif isinstance(event, PreemptAnswer):
            self.producer.answered(event)

    def has_pending_frees(self) -> bool:
        """vLLM's `has_pending_block_frees`: asked when a running request finds no block."""
        return self.producer.has_pending_frees() or self.holding.is_giving_back()

    @property
    def needs_steps(self) -> bool:
        """vLLM's `has_pending_push_work`: the engine shall step until blocks that we hold have come back."""
        return self.producer.needs_steps or self.consumer.needs_steps or self.holding.needs_steps

    def take_stats(self) -> FerryStats | None:
        """What has changed since the last call."""
        if not self._stirred:
            return None
        self._stirred = False
        values = self._current_gauges()
        for (name, labels), value, before in zip(_GAUGES, values, self._gauges, strict=True):
            if value != before:
                self._stats.gauge(name, value, labels)
        self._gauges = values
        if self._stats.is_empty():
            return None
        taken = FerryStats(self._stats.data)
        self._stats.reset()
        return taken

    def _current_gauges(self) -> tuple[int, ...]:
        """In the order of `_GAUGES`."""
        held = self.producer.held_count
        return (
            len(self.producer) - held,
            held,
            self.consumer.receiving_count,
            self.producer.quarantined_blocks + self.consumer.quarantined_blocks,
            self.holding.blocks,
            int(self.consumer.ready and not self._misfits.count(self._clock())),
        )

    def close(self) -> None:
        """Stop the directory. Idempotent."""
        if self._directory is not None:
            self._directory.close()
            self._directory = None


def _kept(name: RequestId, kept: HeldParams) -> dict[str, Any]:
    """What is told of something kept, with the keys that routers for vLLM's own connectors pass on."""
    return kept.to_params() | {"remote_request_id": name, "remote_block_ids": []}


def _label(field: str) -> str:
    """A bounded metric label: the params' keys are ours, not the client's."""
    return "params" if field == "*" else field


def _keeps_turns(facts: EngineFacts, settings: Settings) -> bool:
    """Whether KV flows both ways here; says why not where that was asked for."""
    if settings.bidirectional_kv_xfer and not facts.keeps_turns:
        logger.warning(
            "bidirectional_kv_xfer is off: this model has sliding windows or several cache groups, and the "
            "next turn may need KV of a window that has moved on; prefill engines compute whole prompts"
        )
        return False
    return settings.bidirectional_kv_xfer and facts.produces and facts.consumes


def _scheduled(step: Any, is_ours: Callable[[RequestId], bool]) -> Iterator[Scheduled]:
    """What a `SchedulerOutput` computes of our requests: those that (re)start, then those that go on."""
    counts = step.num_scheduled_tokens
    for new in step.scheduled_new_reqs:
        name = new.req_id
        if is_ours(name):
            stop = new.num_computed_tokens + counts[name]
            yield Scheduled(name, stop, new.block_ids, replaced=True)
    cached = step.scheduled_cached_reqs
    for index, name in enumerate(cached.req_ids):
        if is_ours(name):
            yield Scheduled(
                name,
                cached.num_computed_tokens[index] + counts[name],
                cached.new_block_ids[index] or (),
                replaced=name in cached.resumed_req_ids,
            )
