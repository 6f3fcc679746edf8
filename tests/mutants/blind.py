"""Ten faults planted without having looked at the simulator or its checkers.

Whoever wrote them knew the code of the cores and of the agent, and the promises that they make; not how
anybody looks for a breach. They are not changed because a checker misses one.
"""

from __future__ import annotations

from typing import Final

from tests.mutants.edits import Edit, Mutant

_PREEMPT_SKIPS_STOPPING = Mutant(
    name="preempt_waits_only_for_standing_registrations",
    promise="3",
    what="A preemption is answered without waiting for slices of deliveries that were cancelled or had "
    "failed before it and still drain, so the engine reuses source blocks that a write reads: a "
    "consumer cancels, or one slice fails for good, while another slice is in flight, and the prefill "
    "is preempted before that ends.",
    changes=(
        Edit(
            "kvferry.protocol.producer_host:preempt",
            "            waiting.update(delivery.in_flight)\n",
            "            if delivery.state is DeliveryState.REGISTERED:\n"
            "                waiting.update(delivery.in_flight)\n",
        ),
    ),
    blind=True,
)

_FAILED_COUNTS_POSTED = Mutant(
    name="failed_vouches_for_what_was_posted",
    promise="5",
    what="`Failed` names everything that was ever posted as good, the slice that never landed included, so "
    "the consumer decodes from blocks that nobody has written: a slice is refused or breaks, and the "
    "delivery fails (retries used up, abandoned or expired meanwhile).",
    changes=(
        Edit(
            "kvferry.protocol.sources:Delivery.good_until",
            "return self.landed.reach(self.start)",
            "return self.next_token",
        ),
    ),
    blind=True,
)

_PERMISSION_CHECKED_ONCE = Mutant(
    name="permission_checked_at_the_first_slice",
    promise="2",
    what="The write permission is checked only before the first slice of a delivery, so a producer whose "
    "consumer is not heard any more goes on posting for as long as it computes, into blocks that have "
    "left quarantine.",
    changes=(
        Edit(
            "kvferry.protocol.pump:_postable",
            "    if not now < delivery.permission_until or now < delivery.retry_at:\n",
            "    if delivery.first_post_at is None and not now < delivery.permission_until:\n"
            "        return None\n"
            "    if now < delivery.retry_at:\n",
        ),
    ),
    blind=True,
)

_EARLY_CANCEL_FORGOTTEN = Mutant(
    name="cancel_of_an_unknown_transfer_leaves_no_trace",
    promise="2",
    what="A `Cancel` of a transfer that the producer does not know yet is answered and not remembered, so a "
    "`Register` that it has overtaken (or a late copy of one) counts as new, and once the prefill leg "
    "is there the producer writes into blocks that the consumer gave back on the strength of "
    "`Cancelled`.",
    changes=(
        Edit(
            "kvferry.protocol.producer_peer:cancel",
            "    delivery = delivery_of(state, peer, message, now)\n",
            "    if message.transfer not in state.rows:\n"
            "        state.outputs.append(Send(peer, fence))\n"
            "        return\n"
            "    delivery = delivery_of(state, peer, message, now)\n",
        ),
    ),
    blind=True,
)

_OVERDUE_RETRIED = Mutant(
    name="overdue_slice_is_posted_again",
    promise="4",
    what="A slice that has not ended within `slice_seconds` is taken for failed and tried again although the "
    "transport still has it in flight: two writes to the same bytes at once, and fences, drains and "
    "releases that do not wait for the older one, when a transfer stalls or is very late.",
    changes=(
        Edit(
            "kvferry.protocol.producer:ProducerCore.handle_timeout",
            "            pump.slice_overdue(state, number)\n",
            '            text = f"a slice has not ended after {state.limits.slice_seconds:g} s"\n'
            "            pump.slice_ended(state, number, now, text, retry=True)\n",
        ),
    ),
    blind=True,
)

_OTHERS_RESOLUTION = Mutant(
    name="someone_elses_lookup_counts_as_ours",
    promise="6",
    what="A reception whose producer is being looked up for another request is not added to those that wait "
    "for the answer, so it waits for ever and keeps its blocks: it was announced, its link broke or "
    "fell silent, another request resolves the same producer anew, and memory is allocated (or the "
    "request aborted) before the answer is there; or it was never announced and comes while the first "
    "lookup runs.",
    changes=(
        Edit(
            "kvferry.protocol.consumer_host:_is_looked_for",
            "return links is not None and row.key in links.waiting",
            "return links is not None and links.links is None",
        ),
    ),
    blind=True,
)

_ATTEMPT_IGNORED = Mutant(
    name="late_answer_counts_for_the_next_attempt",
    promise="5",
    what="What a producer says of an ended reception is taken as said of the next one under the same "
    "transfer and consumer: a doubled or late `Written` completes it over blocks that hold nothing, a "
    "late `Cancelled` or `Failed` frees them under the writes of the new attempt.",
    changes=(
        Edit(
            "kvferry.protocol.consumer_peer:_find",
            "    if row is None or part is None or row.attempt != message.attempt:\n",
            "    if row is None or part is None:\n",
        ),
    ),
    blind=True,
)

_WITHDRAWN_STAYS = Mutant(
    name="withdrawn_row_outlives_a_failed_handshake",
    promise="7",
    what="A request that was withdrawn while its producer was being looked up stays in the consumer's table "
    "for ever when the lookup fails: table and agent never come to rest, and each such abort takes a "
    "row of `transfers_max`.",
    changes=(
        Edit(
            "kvferry.protocol.consumer_host:unresolved",
            "        elif row.withdrawn:\n            fences.drop(state, row)\n",
            "",
        ),
    ),
    blind=True,
)

_NO_ANSWER_IS_DEATH = Mutant(
    name="unanswered_inquiry_counts_as_death",
    promise="2",
    what="After a connection has broken, any failure to read the producer's directory, a time-out included, "
    "counts as proof of the producer's death, so blocks are freed under a living producer that still "
    "writes: the consumer's connection breaks while its side channel is not reachable, and the "
    "producer's own still stands.",
    changes=(
        Edit(
            "kvferry.agent.peers:Peers.judge",
            "elif isinstance(answer, PeerGoneError):",
            "elif isinstance(answer, KvferryError):",
        ),
    ),
    blind=True,
)

_PREEMPT_OVERTAKES = Mutant(
    name="preemption_passes_a_gated_advance",
    promise="1",
    what="A preemption does not wait behind commands that wait for a device event: it is answered, then the "
    "event of a request's first chunk completes, and its `Advance` ends the pause that the preemption "
    "began and has slices posted from blocks which the engine has taken away.",
    changes=(
        Edit(
            "kvferry.agent.loop:Loop._take_commands",
            "            elif self._gated:\n",
            '            elif self._gated and not hasattr(item, "ticket"):\n',
        ),
    ),
    blind=True,
)

BLIND: Final = (
    _PERMISSION_CHECKED_ONCE,
    _FAILED_COUNTS_POSTED,
    _WITHDRAWN_STAYS,
    _OVERDUE_RETRIED,
    _NO_ANSWER_IS_DEATH,
    _ATTEMPT_IGNORED,
    _PREEMPT_SKIPS_STOPPING,
    _PREEMPT_OVERTAKES,
    _EARLY_CANCEL_FORGOTTEN,
    _OTHERS_RESOLUTION,
)
"""From crude to subtle."""
