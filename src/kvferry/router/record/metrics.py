"""The router's Prometheus metrics: names of the design, label values bounded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvferry.router.record.counts import Count
from kvferry.router.record.histograms import Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class RouterMetrics:
    """One registry per router, so that two routers in one process do not share counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._count(
            "kvferry_router_requests_total",
            "Client requests by path (push, pull, local: the decode engine prefilled, none), outcome and"
            " cause.",
            ("path", "outcome", "cause"),
        )
        self.ttft = self._histogram(
            "kvferry_router_ttft_seconds", "From the client's request to its first byte, streams only."
        )
        self.itl = Histogram(
            "kvferry_router_itl_seconds",
            "Between two pieces of a stream.",
            (),
            _BETWEEN_TOKENS,
            self.registry,
        )
        self.e2e = self._histogram(
            "kvferry_router_e2e_seconds",
            "From a client's request to the end of its answer, by outcome.",
            "outcome",
        )
        self.stage = self._histogram(
            "kvferry_router_stage_seconds",
            "Where requests' time went: queue (arrival to the first leg), prefill, hand_over (from its end to"
            " the decode engine's first answer), first_token (arrival to the client's first byte).",
            "stage",
        )
        self.leg = self._histogram(
            "kvferry_router_leg_seconds",
            "From a leg's start to a stage of it: first (its first event), answer (the whole of it).",
            "leg",
            "stage",
        )
        self.prefill_answer = self.leg.labels("prefill", "answer")
        self.decode_answer = self.leg.labels("decode", "answer")
        self.decode_first = self.leg.labels("decode", "first")
        self._choosing()
        self.log_lines_dropped = self._counter(
            "kvferry_router_log_lines_dropped_total", "Lines of the access log that could not be written.", ()
        )
        self._dispatching()

    def _choosing(self) -> None:
        self.retries = self._counter(
            "kvferry_router_retries_total",
            "Legs that were sent anew, by the leg that failed and why.",
            ("leg", "reason"),
        )
        self.transfers = self._count(
            "kvferry_router_transfers_total",
            "Dispatches of a prompt to both roles, by mode and why it was chosen.",
            ("mode", "reason"),
        )
        self.turns = self._count(
            "kvferry_router_turns_total",
            "Prompts by whether they continue one that is known: new, kept (same decode engine), moved.",
            ("outcome",),
        )
        self.histories = self._counter(
            "kvferry_router_histories_total",
            "What decode engines kept for a next turn that has come: sent to its prefill engine, or expired.",
            ("outcome",),
        )
        self.worker_up = Gauge(
            "kvferry_router_worker_up",
            "1 when requests can be sent to the engine; for a prefill engine its coordinates are known, too.",
            ("role", "worker"),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kvferry_router_requests_in_flight", "Client requests being served.", registry=self.registry
        )

    def _dispatching(self) -> None:
        self.retries_denied = self._counter(
            "kvferry_router_retries_denied_total",
            "Retries that the budget of all requests did not allow.",
            (),
        )
        self.held_block_seconds = self._count(
            "kvferry_router_decode_held_block_seconds_total",
            "Blocks of 16 tokens times seconds for which decode engines held room for prompts whose prefill"
            " had not ended; push only.",
            (),
        )
        self.queued = Gauge(
            "kvferry_router_requests_queued",
            "Client requests that wait for their turn.",
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _count(self, name: str, text: str, labels: tuple[str, ...]) -> Count:
        return Count(name, text, labels, self.registry)

    def count_request(self, path: str, outcome: str, cause: str) -> None:
        """Count a client request that has ended."""
        self.requests.labels(path, outcome, cause).inc()

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(name, text, labels, _LATENCY, self.registry)

    def exposition(self) -> bytes:
        """The text that `/metrics` answers with."""
        return generate_latest(self.registry)
