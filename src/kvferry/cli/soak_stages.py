"""Bringing a fleet under load to a stage, as its metrics show it, so that a fault can strike there."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvferry.cli.engines import Endpoints
from kvferry.cli.requests import fetch
from kvferry.cli.soak_client import Reply
from kvferry.cli.soak_load import Load
from kvferry.cli.soak_plan import Ask, Mix, RoundPlan, Stage, Target
from kvferry.errors import KvferryError
from kvferry.handoff import DecodeParams, PrefillParams, SourceParams
from kvferry.ids import EngineId, Incarnation, TransferId

SCRAPE_SECONDS_MAX = 30.0
"""An engine answers between two steps, and on two busy cores a step can take seconds."""
POLL_SECONDS = 0.02
STAGE_SECONDS_MAX = 120.0
ATTEMPTS = 8
"""Within that time."""
HALF_SHARES = 0.2, 0.9
"""Of a prompt: how much of it is pushed where it counts as half."""
VICTIMS_AT_HALF = 2
"""One after the other: while the first is computed, the load comes back."""
FIRST_TOKENS = 2

_BYTES = "kvferry_transfer_bytes_total"
_TRANSFERS = "kvferry_transfers_total"
_IN_FLIGHT = "kvferry_transfers_in_flight"
_QUARANTINED = "kvferry_quarantined_blocks"
_USAGE = "vllm:kv_cache_usage_perc"
_RUNNING = "vllm:num_requests_running"
_NAMES = (_BYTES, _TRANSFERS, _IN_FLIGHT, _QUARANTINED, _USAGE, _RUNNING)


class StageError(KvferryError):
    """The stage did not show; the message says which and what did."""


class StageMissedError(StageError):
    """A stage did not show: on a busy machine some last for less than it takes to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What an engine's metrics show at one moment."""

    receiving: int = 0
    sending: int = 0
    held: int = 0
    running: int = 0
    bytes: int = 0
    """KV bytes pushed or received since the engine's start."""
    completed: int = 0
    """Transfers since the engine's start."""
    quarantined: int = 0
    usage: float = 0.0
    """Share of the cache's blocks that are in use."""

    @property
    def is_empty(self) -> bool:
        """Whether all blocks are free and no transfer is in a table."""
        return not (self.receiving or self.sending or self.held or self.quarantined or self.usage)

    @property
    def text(self) -> str:
        """What is not as at the start."""
        return (
            f"receiving {self.receiving}, sending {self.sending}, held {self.held}, quarantined "
            f"{self.quarantined}, cache used {self.usage:.4f}"
        )


def read_gauges(url: str) -> Gauges:
    """Ask the engine at `url`."""
    return parse_gauges(fetch(url, "/metrics", seconds=SCRAPE_SECONDS_MAX))


def parse_gauges(text: str) -> Gauges:
    """Read a Prometheus exposition."""
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(_NAMES)) + "\n"
    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            key = sample.name, sample.labels.get("state", "") or sample.labels.get("outcome", "")
            values[key] = values.get(key, 0.0) + sample.value
    return Gauges(
        receiving=int(values.get((_IN_FLIGHT, "receiving"), 0)),
        sending=int(values.get((_IN_FLIGHT, "sending"), 0)),
        held=int(values.get((_IN_FLIGHT, "held"), 0)),
        running=int(values.get((_RUNNING, ""), 0)),
        bytes=int(values.get((_BYTES, ""), 0)),
        completed=int(values.get((_TRANSFERS, "completed"), 0)),
        quarantined=int(values.get((_QUARANTINED, ""), 0)),
        usage=values.get((_USAGE, ""), 0.0),
    )


@dataclass(slots=True)
class Victim:
    """What a stage leaves behind: the engine to strike, and the leg that is still to be sent, if any."""

    server: str
    late_server: str = ""
    send_late: Callable[[], Future[Any]] | None = None
    open: list[Future[Any]] = field(default_factory=list)

    def send_other_leg(self) -> None:
        """Send the leg that was held back. Can be called again."""
        if self.send_late is not None:
            self.open.append(self.send_late())
            self.send_late = None


class Stages:
    """Knows how each stage is reached."""

    def __init__(self, endpoints: Endpoints, load: Load, mix: Mix, token_bytes: float) -> None:
        """`token_bytes`: KV bytes of one token."""
        self._endpoints = endpoints
        self._load = load
        self._mix = mix
        self._token_bytes = token_bytes
        self._deadline = 0.0
        """Of the stage that is being reached."""
        self._reach = {
            Stage.WAITING: self._waiting,
            Stage.HALF: self._half,
            Stage.HELD: self._held,
            Stage.DECODING: self._decoding,
            Stage.IDLE: self._idle,
        }

    def reach(self, plan: RoundPlan) -> Victim:
        """Return as soon as the metrics show the stage.

        Raises:
            StageMissedError: they did not, in several attempts.
            StageError: an engine refused what a stage needs.
            RequestError: an engine does not tell its metrics.
        """
        began = time.monotonic()
        self._deadline = began + STAGE_SECONDS_MAX
        attempts = 0
        while attempts < ATTEMPTS and time.monotonic() < self._deadline:
            victim = self._reach[plan.stage](plan)
            if victim is not None:
                return victim
            attempts += 1
        seconds = time.monotonic() - began
        raise StageMissedError(
            f"stage {plan.stage.value} did not show in {attempts} attempts and {seconds:.0f} s"
        )

    def in_passing(self, plan: RoundPlan) -> Victim:
        """An engine to strike at whatever stage it is, with a long request under way."""
        asked = self._load.ask(self._mix.long(), Reply(), "victim")
        index = self._mix.pick(len(self._urls(plan.target)))
        return Victim(f"{plan.target.value}-{index}", open=[asked])

    def _waiting(self, plan: RoundPlan) -> Victim | None:
        """Only the decode leg is sent: P cannot have written anything."""
        legs = self._legs()
        victim = self._split_victim(plan, legs)
        asked = self._load.decode_leg(legs.decode_url, legs.ask, legs.decode_params, Reply())
        victim.open.append(asked)
        victim.late_server = legs.prefill_name
        victim.send_late = lambda: self._load.prefill_leg(legs.prefill_url, legs.ask, legs.prefill_params)
        shown = 0

        def waits() -> bool:
            # Twice in a row, because the two sides are not read at the same moment.
            nonlocal shown
            known = sum(gauges.sending + gauges.held for gauges in self._all(Target.PREFILL))
            wanted = sum(gauges.receiving for gauges in self._all(Target.DECODE))
            shown = shown + 1 if wanted > known else 0
            return shown == 2

        return victim if self._shows(waits, asked) else None

    def _half(self, plan: RoundPlan) -> Victim | None:
        """Long prompts go where no other is computed; the load joins behind them.

        So what is pushed from then on is theirs, and tells how far the one that is computed has come.
        """
        self._load.shut()
        try:
            if not self._shows(self._nothing_is_pushed):
                return None
            before = [gauges.bytes for gauges in self._all(Target.PREFILL)]
            asks = [self._mix.long() for _ in range(VICTIMS_AT_HALF)]
            asked = [self._load.ask(ask, Reply(), "victim") for ask in asks]
            self._shows(lambda: any(gauges.sending for gauges in self._all(Target.PREFILL)), *asked)
        finally:
            self._load.open()
        prompt_bytes = len(asks[0].prompt) * self._token_bytes
        struck: list[int] = []

        def is_half_pushed() -> bool:
            for index, (gauges, start) in enumerate(zip(self._all(Target.PREFILL), before, strict=True)):
                share = (gauges.bytes - start) / prompt_bytes % 1.0
                if gauges.sending and HALF_SHARES[0] <= share <= HALF_SHARES[1]:
                    struck.append(index)
            return bool(struck)

        if not self._shows(is_half_pushed, *asked):
            return None
        if plan.target is Target.PREFILL:
            return Victim(f"prefill-{struck[0]}", open=list(asked))
        receiving = [gauges.receiving for gauges in self._all(Target.DECODE)]
        return Victim(f"decode-{receiving.index(max(receiving))}", open=list(asked))

    def _nothing_is_pushed(self) -> bool:
        sending = sum(gauges.sending for gauges in self._all(Target.PREFILL))
        return not sending and not sum(gauges.receiving for gauges in self._all(Target.DECODE))

    def _held(self, plan: RoundPlan) -> Victim | None:
        """Only the prefill leg is sent."""
        legs = self._legs()
        victim = self._split_victim(plan, legs)
        answered = self._load.prefill_leg(legs.prefill_url, legs.ask, legs.prefill_params)
        reply = self._load.wait(answered)
        if not reply.whole:
            raise StageError(f"{legs.prefill_name} refused a prefill: {reply.error or reply.broken}")
        victim.late_server = legs.decode_name
        victim.send_late = lambda: self._load.decode_leg(
            legs.decode_url, legs.ask, legs.decode_params, Reply()
        )
        return victim if self._shows(lambda: read_gauges(legs.prefill_url).held) else None

    def _decoding(self, plan: RoundPlan) -> Victim | None:
        reply = Reply()
        asked = self._load.ask(self._mix.talkative(), reply, "victim")

        def decodes() -> bool:
            running = (gauges.running for gauges in self._all(Target.DECODE))
            return reply.heard >= FIRST_TOKENS and any(running)

        if not self._shows(decodes, asked):
            return None
        running = [gauges.running for gauges in self._all(plan.target)]
        return Victim(f"{plan.target.value}-{running.index(max(running))}", open=[asked])

    def _idle(self, plan: RoundPlan) -> Victim | None:
        self._load.shut()
        if not self._shows(lambda: self._load.is_idle() and self.left_over() == ""):
            return None
        return Victim(f"{plan.target.value}-{self._mix.pick(len(self._urls(plan.target)))}")

    def left_over(self) -> str:
        """What is not empty on which engine; nothing when all is as at the start."""
        found = []
        for target in Target:
            for index, gauges in enumerate(self._all(target)):
                if not gauges.is_empty:
                    found.append(f"{target.value}-{index}: {gauges.text}")
        return "; ".join(found)

    def completed(self) -> int:
        """Transfers that the decode engines have received, each since its start."""
        return sum(gauges.completed for gauges in self._all(Target.DECODE))

    def _all(self, target: Target) -> list[Gauges]:
        return [read_gauges(url) for url in self._urls(target)]

    def _urls(self, target: Target) -> Sequence[str]:
        return self._endpoints.prefill if target is Target.PREFILL else self._endpoints.decode

    def _shows(self, condition: Callable[[], object], *asked: Future[Any]) -> bool:
        """Whether the condition comes true before all the requests are over and before the time is."""
        while time.monotonic() < self._deadline:
            if condition():
                return not asked or not all(one.done() for one in asked)
            if asked and all(one.done() for one in asked):
                return False
            time.sleep(POLL_SECONDS)
        return False

    def _split_victim(self, plan: RoundPlan, legs: _Legs) -> Victim:
        return Victim(legs.prefill_name if plan.target is Target.PREFILL else legs.decode_name)

    def _workers(self) -> list[dict[str, Any]]:
        text = fetch(self._endpoints.router, "/workers", seconds=SCRAPE_SECONDS_MAX)
        return list(json.loads(text)["workers"])

    def _legs(self) -> _Legs:
        endpoints = self._endpoints
        prefill, decode = self._mix.pick(len(endpoints.prefill)), self._mix.pick(len(endpoints.decode))
        url = endpoints.prefill[prefill]
        # A busy engine may miss health checks, and the router then forgets it for a moment.
        self._shows(lambda: source_of(self._workers(), url) is not None)
        source = source_of(self._workers(), url)
        if source is None:
            raise StageError(f"the router does not know who the prefill engine at {url} is")
        return _Legs(
            prefill_name=f"prefill-{prefill}",
            decode_name=f"decode-{decode}",
            prefill_url=url,
            decode_url=endpoints.decode[decode],
            source=source,
            ask=self._mix.middling(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Legs:
    """One transfer whose two legs are sent by the soak itself, at different times."""

    prefill_name: str
    decode_name: str
    prefill_url: str
    decode_url: str
    source: SourceParams
    ask: Ask
    transfer: TransferId = field(default_factory=lambda: TransferId(secrets.token_hex(16)))

    @property
    def prefill_params(self) -> dict[str, Any]:
        return PrefillParams(transfer=self.transfer, mode="push").to_params()

    @property
    def decode_params(self) -> dict[str, Any]:
        return DecodeParams(source=self.source, transfer=self.transfer, mode="push").to_params()


def source_of(workers: Iterable[dict[str, Any]], url: str) -> SourceParams | None:
    """Where the KV of the prefill engine at `url` can be had, by the router's `/workers`; None: unknown."""
    engine = next((worker.get("engine") for worker in workers if worker["url"] == url), None)
    if engine is None:
        return None
    return SourceParams(
        engine=EngineId(engine["id"]),
        host=engine["host"],
        port=engine["port"],
        tp=engine["tp"],
        pp=engine["pp"],
        incarnation=None if engine["incarnation"] is None else Incarnation(engine["incarnation"]),
    )
