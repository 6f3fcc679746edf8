"""What there is to be seen of a transfer that a composite fault is aimed at."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvferry.ids import ConsumerId
from kvferry.protocol.limits import Limits
from kvferry.protocol.sources import Delivery
from kvferry.protocol.states import DeliveryState
from kvferry.simulator.engine.engine import Engine
from kvferry.simulator.engine.rank import RankProcess
from kvferry.simulator.faults.levers import Levers
from kvferry.simulator.world.router import Dispatch, Leg

BUDGETS = 2
"""Prefills of fewer steps than so many are over before they can be preempted."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One transfer, and one pair of its ranks."""

    levers: Levers
    random: Random
    dispatch: Dispatch
    index: int | None
    """Which of its consumers."""
    producer: Engine
    writer: RankProcess
    target: RankProcess

    @property
    def decode(self) -> Leg:
        """The newest decode leg of the consumer."""
        return next(leg for leg in reversed(self.dispatch.decodes) if leg.index == self.index)

    @property
    def limits(self) -> Limits:
        """The consumer's."""
        return self.decode.engine.facts.limits

    @property
    def is_long(self) -> bool:
        """Whether prefill takes long enough to be preempted."""
        return self.dispatch.item.prompt.tokens > BUDGETS * self.producer.facts.pace.token_budget

    @property
    def bound_seconds(self) -> float:
        """After so long without a word from the producer the consumer has its blocks back."""
        return self.limits.write_seconds + self.levers.world.shape.fabric.retry_bound_seconds

    def is_written(self) -> bool:
        """Whether a write for the request is under way."""
        return _in_flight(self, DeliveryState.REGISTERED, DeliveryState.STOPPING)

    def is_asked(self) -> bool:
        """Whether the consumer has asked to read, and prefill has not ended."""
        return any(one.state is DeliveryState.ASKED for one in self.deliveries)

    def is_lent(self) -> bool:
        """Whether it was offered what it reads."""
        return any(one.state is DeliveryState.LENT for one in self.deliveries)

    def is_read(self) -> bool:
        """Whether a read for the request is under way."""
        state = self.target.loop.consumer.state
        return any(key[0] == self.dispatch.transfer for key, _ in state.reads.values())

    def is_stopping(self) -> bool:
        """Whether it is, though the request has been given up."""
        return _in_flight(self, DeliveryState.STOPPING)

    def is_permitted(self) -> bool:
        """Whether the producer's rank may write for the request."""
        now = self.writer.clock()
        return any(not one.ended and one.permission_until > now for one in self.deliveries)

    @property
    def has_company(self) -> bool:
        """Whether there are others that can crowd it out."""
        dispatches = self.levers.world.router.dispatches.values()
        return any(
            one is not self.dispatch and one.item.producer == self.dispatch.item.producer
            for one in dispatches
        )

    @property
    def is_remembered(self) -> bool:
        """Whether the producer's rank knows of the transfer."""
        state = self.writer.loop.producer.state
        return self.dispatch.transfer in state.rows or self.dispatch.transfer in state.tombstones

    def is_ended(self) -> bool:
        """Whether the decode leg's engine has forgotten it."""
        return self.decode.engine.has_forgotten(self.decode.request)

    @property
    def deliveries(self) -> list[Delivery]:
        """What the producer's rank knows of the request."""
        row = self.writer.loop.producer.state.rows.get(self.dispatch.transfer)
        consumer = ConsumerId(self.decode.request)
        return [one for one in row.deliveries.values() if one.consumer == consumer] if row else []

    def is_last_chunk(self) -> bool:
        """Whether the prefill leg's last chunk is being computed."""
        leg = next((one for one in reversed(self.dispatch.prefills) if not one.ended), None)
        request = None if leg is None else self.producer.request(leg.request)
        return request is not None and request.computed >= request.length


def _in_flight(subject: Subject, *states: DeliveryState) -> bool:
    return any(one.in_flight and one.state in states for one in subject.deliveries)
