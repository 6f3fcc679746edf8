"""An engine's scheduler, as vLLM's goes about requests, blocks and connectors.

Running requests come first, then waiting ones; a request that finds no block preempts the youngest. Tokens
count as computed from the plan on, outputs as placeholders until their step has come back. What becomes of
transfers is decided by the production host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from kvferry.handoff import DecodeParams
from kvferry.host.events import Ended, Event, PreemptAnswer, Quarantined, Safe
from kvferry.host.orders import Scheduled
from kvferry.host.outcomes import Outcomes
from kvferry.host.scheduler_consumer import SchedulerConsumer
from kvferry.host.scheduler_producer import SchedulerProducer
from kvferry.host.starvation import Starvation
from kvferry.host.wanted import whole_prompt
from kvferry.simulator.engine.facts import Pace
from kvferry.simulator.engine.requests import Request, Status
from kvferry.simulator.engine.steps import Joint, Step, Work
from kvferry.simulator.engine.tables import Tables
from kvferry.simulator.engine.turns import Turns


@dataclass(frozen=True, slots=True)
class Host:
    """The production host's scheduler side.

    `skip` counts a transfer that ended before any rank heard of it, `count` the end of one on a rank.
    """

    producer: SchedulerProducer
    consumer: SchedulerConsumer
    outcomes: Outcomes
    starvation: Starvation
    clock: Callable[[], float]
    received_stop: Callable[[int], int]
    skip: Callable[[Request, str], None]
    count: Callable[[Ended], None]
    turns: Turns

    def hear(self, event: Event) -> None:
        """A rank has reported something."""
        if isinstance(event, Ended) and event.held:
            self.turns.rank_ended(event)
        elif isinstance(event, Ended):
            self.count(event)
            if event.sending:
                self.producer.rank_ended(event.rank, event.request)
        elif isinstance(event, Quarantined):
            self.consumer.quarantined(event)
        elif isinstance(event, Safe):
            self.consumer.safe(event)
        elif isinstance(event, PreemptAnswer):
            self.producer.answered(event)

    def scheduled(self, step: Step) -> Iterable[Scheduled]:
        """What a step computes of the producer's requests."""
        for work in step.work:
            if self.producer.is_ours(work.request.name):
                yield Scheduled(work.request.name, work.stop, work.fresh, work.replaced)


@dataclass(slots=True, eq=False)
class Scheduler:
    """Requests of one life of an engine.

    `ending` hears of each just before it loses its blocks, by its end or by a preemption.
    """

    pace: Pace
    tables: Tables
    host: Host
    ending: Callable[[Request], None]
    requests: dict[str, Request] = field(default_factory=dict)
    _waiting: list[Request] = field(default_factory=list)
    _holding: list[Request] = field(default_factory=list)
    """Waiting requests that have blocks."""
    _running: list[Request] = field(default_factory=list)
    _received: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _finished: list[str] = field(default_factory=list)
    _forced: list[Request] = field(default_factory=list)
    stuck: bool = False
    """The last plan computed nothing although a request of its own could run, given memory."""
    _preempted: list[Request] = field(default_factory=list)
    """By the plan that is being made."""

    # --- requests ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request arrives. One whose transfer id is in use runs for itself."""
        if isinstance(request.params, DecodeParams):
            stop = self.host.received_stop(request.num_prompt_tokens)
            wanted = whole_prompt(request, request.params, stop)
            if not self.host.consumer.announce(request, wanted):
                self.host.skip(request, "in_use")
            else:
                self.host.turns.arrived(request, request.params)
        elif self.host.producer.expect(request, request.params):
            history = self.host.turns.wanted(request)
            if history is not None:
                self.host.consumer.announce(request, history)
        self.tables.add(request)
        self.requests[request.name] = request
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """The client has gone; nothing happens when the request has ended."""
        if not request.status.ended:
            self._finish(request, Status.FINISHED_ABORTED)

    def force_preemption(self, request: Request) -> bool:
        """Preempt a request at the next plan; False when it does not run."""
        if request not in self._running or request in self._forced:
            return False
        self._forced.append(request)
        return True

    @property
    def awake(self) -> bool:
        """Whether the engine goes on stepping."""
        host = self.host
        # A real engine is not stepped for what it keeps; this one is, so that the end of it is seen.
        busy = host.producer.needs_steps or host.consumer.needs_steps or len(host.turns.holding)
        return bool(self.requests or self._finished or busy)

    def remains(self) -> list[str]:
        """What has not come to its end."""
        host = self.host
        counts = (
            (self.tables.deferred_count, "deferred blocks"),
            (len(host.producer), "prefill transfers"),
            (len(host.consumer), "decode transfers"),
            (int(host.producer.needs_steps), "producer's wish to go on"),
            (int(host.consumer.needs_steps), "consumer's wish to go on"),
            (len(host.turns.holding), "kept turns"),
            (host.outcomes.open_count, "outcomes that lack a rank"),
        )
        return [
            *(f"request {name} {request.status.value}" for name, request in self.requests.items()),
            *(f"{count} {what}" for count, what in counts if count),
        ]

    # --- plan --------------------------------------------------------------------------------------

    def plan(self) -> Step:
        """The next step; it may be empty."""
        step = Step(self.tables.planned)
        self._preempted.clear()
        forced, self._forced = self._forced, []
        for request in forced:
            if request in self._running and self.tables.can_free(request):
                self._running.remove(request)
                self._preempt(request)
        budget = self._plan_running(step)
        if not self._preempted:
            budget = self._plan_waiting(step, budget)
        self._give_up_if_stuck(step)
        step.orders.commands = self.host.consumer.take_commands()
        preempted = [request.name for request in self._preempted]
        self.host.producer.plan(self.host.scheduled(step), preempted, step.orders)
        self.host.turns.holding.plan(step.orders)
        step.finished, self._finished = self._finished, []
        tokens = self.pace.token_budget - budget
        step.seconds = self.pace.step_seconds + tokens * self.pace.token_seconds if step.work else 1e-3
        if step.work:
            self.tables.planned += 1
        return step

    def _give_up_if_stuck(self, step: Step) -> None:
        host = self.host
        self.stuck = host.consumer.wants_to_run and not step.work
        if host.starvation.is_due(host.clock(), stuck=self.stuck) and not host.consumer.relinquish():
            host.producer.reclaim()

    def _plan_running(self, step: Step) -> int:
        budget = self.pace.token_budget
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            index += 1
            if request.outputs + request.placeholders >= request.outputs_max:
                continue
            tokens = min(request.length + request.placeholders - request.computed, budget)
            if tokens <= 0:
                continue
            fresh = self.tables.grow(request, request.computed + tokens)
            while fresh is None and self._make_room(request):
                fresh = self.tables.grow(request, request.computed + tokens)
            if fresh is None:
                break
            self._schedule(step, request, tokens, fresh, replaced=False)
            budget -= tokens
        return budget

    def _make_room(self, request: Request) -> bool:
        """Preempt the youngest; False when that cannot help `request`."""
        if self.host.producer.has_pending_frees() or self.host.turns.holding.is_giving_back():
            return False
        victim = self._running[-1]
        if not self.tables.can_free(victim):
            return False
        self._running.pop()
        self._preempt(victim)
        return victim is not request

    def _preempt(self, request: Request) -> None:
        self.ending(request)
        self.tables.free(request)
        request.status = Status.PREEMPTED
        request.decoding = False
        request.computed = request.placeholders = 0
        request.stale = request.in_flight
        self._waiting.insert(0, request)
        self._preempted.append(request)

    def _plan_waiting(self, step: Step, budget: int) -> int:
        for request in [*self._holding, *self._waiting]:
            if budget <= 0 or len(self._running) >= self.pace.running_max:
                break
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                if request.name not in self._received:
                    continue
                self._promote(request)
            if request.stale:
                continue
            taken = self._start(step, request, budget)
            if taken is None:
                continue
            if taken < 0:
                break
            budget -= taken
        return budget

    def _start(self, step: Step, request: Request, budget: int) -> int | None:
        """Start a waiting request: the tokens that it takes, None to skip it, -1 when blocks are short."""
        hits: list[list[int]] = []
        external = 0
        local = request.computed
        if not request.computed:
            local, hits = self.tables.hits(request)
            self.host.turns.holding.make_way(self.tables.blocks(request.length) - sum(map(len, hits)))
            wanted = self.host.consumer.wanted_tokens(request, local)
            if wanted is None:
                return None
            external = wanted
        tokens = 0 if external else min(request.length - local, budget)
        if not self.tables.allocate(request, hits, local + external, tokens):
            return -1
        if not self.host.consumer.allocated(request, request.blocks, external):
            self.host.skip(request, "prefix_hit")
        (self._waiting if request in self._waiting else self._holding).remove(request)
        request.computed = local + external
        if external:
            request.status = Status.WAITING_FOR_REMOTE_KVS
            self._holding.append(request)
            return 0
        request.status = Status.RUNNING
        self._running.append(request)
        fresh = [list(blocks) for blocks in request.blocks]
        self._schedule(step, request, tokens, fresh, replaced=True)
        return tokens

    def _schedule(
        self, step: Step, request: Request, tokens: int, fresh: list[list[int]], *, replaced: bool
    ) -> None:
        start, stop = request.computed, request.computed + tokens
        samples = stop >= request.length + request.placeholders
        tables = [np.array(blocks, dtype=np.intp) for blocks in request.blocks]
        step.work.append(Work(request, start, stop, tables, fresh, replaced, samples))
        self.tables.cache(request, min(stop, request.length))
        request.computed = stop
        request.in_flight += tokens
        request.last_step = step.number
        if samples:
            request.placeholders += 1

    def _promote(self, request: Request) -> None:
        """The KV that a request waited for has come, or has failed to."""
        self._received.discard(request.name)
        request.status = Status.WAITING
        if request.name in self._failed and not request.computed:
            self.tables.free(request)
            self._holding.remove(request)
            self._waiting.insert(0, request)
        else:
            self.tables.cache(request, request.computed)
        self._failed.discard(request.name)
        if request.computed == request.length:
            request.computed -= 1

    # --- update ------------------------------------------------------------------------------------

    def update(self, step: Step, result: Joint) -> None:
        """A step has come back from every rank; `result` is what they report together."""
        self.tables.step_back(step)
        self._note_failures(result)
        for work in step.work:
            self._note_output(work)
        for event in result.events:
            self.host.hear(event)
        self._note_ends(result)

    def _note_failures(self, result: Joint) -> None:
        for name in result.failed:
            request = self.requests.get(name)
            if request is not None and request.status is Status.WAITING_FOR_REMOTE_KVS:
                request.computed = 0
                self._failed.add(name)
        for request in self._holding if result.bad_blocks else ():
            if request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            # Only where a cache has a single group may single blocks be bad.
            table = request.blocks[0][: self.tables.blocks(request.computed)]
            first = next((index for index, block in enumerate(table) if block in result.bad_blocks), None)
            if first is not None:
                request.computed = first * self.tables.groups[0].block_tokens
                self._failed.add(request.name)

    def _note_output(self, work: Work) -> None:
        request = work.request
        tokens = work.stop - work.start
        request.in_flight -= tokens
        stale = request.stale > 0
        if stale:
            request.stale -= tokens
        if request.status.ended or not work.samples:
            return
        request.outputs += 1
        if not stale:
            request.placeholders -= 1
        if request.outputs >= request.outputs_max:
            normal = Status.FINISHED_STOPPED if request.stops else Status.FINISHED_LENGTH_CAPPED
            self._finish(request, normal)

    def _note_ends(self, result: Joint) -> None:
        if result.receiving:
            self.host.consumer.received(result.receiving)
        if result.sending:
            self.host.producer.released(result.sending)
        for name in result.receiving:
            request = self.requests[name]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self._received.add(name)
            else:
                assert request.status.ended, f"{name} is reported received while it is {request.status.value}"
                self._forget(request)
        for name in result.sending:
            assert self.requests[name].status.ended, f"{name} is reported sent before its end"
            self._forget(self.requests[name])

    def _finish(self, request: Request, status: Status) -> None:
        for queue in (self._running, self._waiting, self._holding):
            if request in queue:
                queue.remove(request)
        receiving = request.status is Status.WAITING_FOR_REMOTE_KVS
        delayed = receiving and request.name not in self._received
        self._received.discard(request.name)
        self._failed.discard(request.name)
        request.status = status
        self.host.turns.ended(request)
        self.ending(request)
        if not self.host.consumer.finish(request):
            self.host.skip(request, "not_admitted")
        keep, _ = self.host.producer.finish(request)
        self._finished.append(request.name)
        if not (delayed or keep):
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self.tables.free(request)
        del self.requests[request.name]
