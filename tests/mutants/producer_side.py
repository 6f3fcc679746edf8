"""Faults of the producer core: what is posted when, what peers and the host are told, and when it ends."""

from __future__ import annotations

from tests.mutants.edits import Edit, Mutant

HOST = "kvferry.protocol.producer_host"
PEER = "kvferry.protocol.producer_peer"
PUMP = "kvferry.protocol.pump"
SETTLE = "kvferry.protocol.settle"
SOURCES = "kvferry.protocol.sources"
CORE = "kvferry.protocol.producer"

POSTING: tuple[Mutant, ...] = (
    Mutant(
        "alignment_from_the_front",
        "5",
        "a consumer that asks from token 8 on is sent what begins at token 0",
        (
            Edit(
                f"{PUMP}:_post",
                old="source_blocks=_source_blocks(state, row, delivery, posted),",
                new="source_blocks=_source_blocks(state, row, delivery, Posted("
                "posted.start - delivery.start, posted.stop - delivery.start, 0)),",
            ),
        ),
    ),
    Mutant(
        "written_before_the_last_slice",
        "5",
        "the slice that says `Written` is posted while others are still in flight",
        (
            Edit(f"{SOURCES}:Delivery.next_range", old="until == self.stop and self.in_flight", new="False"),
            Edit(
                f"{PUMP}:_post",
                old='    assert not (last and delivery.in_flight), "the last slice is posted alone"\n',
                new="",
            ),
        ),
    ),
    Mutant(
        "written_at_the_frontier",
        "5",
        "the slice that reaches the frontier says that everything is written",
        (
            Edit(
                f"{PUMP}:_post",
                old="""    last = posted.stop == delivery.stop
    assert not (last and delivery.in_flight), "the last slice is posted alone"
""",
                new="    last = posted.stop == delivery.stop or (\n"
                "        posted.stop == row.frontier and not delivery.in_flight\n"
                "    )\n",
            ),
        ),
    ),
    Mutant(
        "overlapping_writes_after_preemption",
        "4",
        "a prefill that starts again after a preemption is sent again from its start, over what is in flight",
        (
            Edit(
                f"{HOST}:advance",
                old="    if command.first_block == 0:\n        row.paused = False\n",
                new="    if command.first_block == 0:\n"
                "        row.paused = False\n"
                "        for delivery in row.open_deliveries():\n"
                "            delivery.next_token = delivery.start\n",
            ),
        ),
    ),
    Mutant(
        "preemption_does_not_pause",
        "3",
        "slices go on being posted from the blocks that a preemption has taken away",
        (Edit(f"{HOST}:preempt", old="        row.paused = True\n", new=""),),
    ),
    Mutant(
        "resumed_blocks_not_replaced",
        "3",
        "a resumed request's blocks are put behind those that it had before the preemption",
        (Edit(f"{HOST}:advance", old="        del blocks[first:]\n", new=""),),
    ),
    Mutant(
        "partial_blocks_posted",
        "4",
        "a block is posted when it is half computed, and again when it is full",
        (
            Edit(
                f"{SOURCES}:Delivery.next_range",
                old="frontier - frontier % grain",
                new="frontier",
            ),
        ),
    ),
    Mutant(
        "permission_never_checked",
        "1",
        "slices are posted whether or not the consumer's permission runs",
        (Edit(f"{PUMP}:_postable", old="not now < delivery.permission_until or ", new=""),),
    ),
    Mutant(
        "mark_ignored",
        "1",
        "a permission is counted from when it is read, however long it has been under way",
        (
            Edit(
                f"{PEER}:_permit",
                old="message.mark + seconds",
                new="now + seconds",
            ),
        ),
    ),
    Mutant(
        "registration_repeated_starts_over",
        "4",
        "a repeated registration is sent everything again, over what is in flight",
        (
            Edit(
                f"{PEER}:register",
                old="fresh = delivery.state is DeliveryState.ANNOUNCED",
                new="fresh = delivery.state in (DeliveryState.ANNOUNCED, DeliveryState.REGISTERED)",
            ),
        ),
    ),
    Mutant(
        "retry_forgets_the_slice",
        "5",
        "a slice whose post was refused is not posted again",
        (
            Edit(
                f"{PUMP}:_retry_later",
                old="    delivery.retries.append(Posted(posted.start, posted.stop, posted.attempt + 1))\n",
                new="",
            ),
        ),
    ),
    Mutant(
        "last_slice_before_the_retry",
        "5",
        "slices that failed are posted again last, even after the one that says `Written`",
        (
            Edit(
                f"{SOURCES}:Delivery.next_range",
                old="        if self.retries:\n",
                new="        if self.retries and self.next_token >= limit:\n",
            ),
        ),
    ),
    Mutant(
        "lost_wake_up",
        "6",
        "a renewed permission wakes nobody: what had none before stays asleep",
        (Edit(f"{PEER}:renew", old="        pump.wake(state, delivery)\n", new=""),),
    ),
    Mutant(
        "slice_deadline_never_armed",
        "6",
        "a slice that never ends is waited for for ever",
        (
            Edit(
                f"{PUMP}:_post",
                old="    state.slice_timers.set(number, now + state.limits.slice_seconds)\n",
                new="",
            ),
        ),
    ),
    Mutant(
        "renewal_does_not_extend_permission",
        "6",
        "a renewal leaves the permission as it was",
        (Edit(f"{PEER}:renew", old="        _permit(state, delivery, message, now)\n", new=""),),
    ),
)

ENDINGS: tuple[Mutant, ...] = (
    Mutant(
        "source_freed_while_read",
        "3",
        "when a request is abandoned, its writes in flight are forgotten and its blocks released",
        (
            Edit(
                f"{HOST}:_give_up",
                old="    settle.fail_open(state, row, reason)\n",
                new="    settle.fail_open(state, row, reason)\n"
                "    for delivery in row.deliveries.values():\n"
                "        for number in delivery.in_flight:\n"
                "            del state.slices[number]\n"
                "            state.slice_timers.cancel(number)\n"
                "            settle.answer_tickets(state, number)\n"
                "            if delivery.peer in state.lanes:\n"
                "                state.lanes[delivery.peer].in_flight -= 1\n"
                "        delivery.in_flight.clear()\n",
            ),
        ),
    ),
    Mutant(
        "drained_without_waiting",
        "3",
        "a preemption is answered at once, whatever still reads the blocks",
        (Edit(f"{HOST}:preempt", old="    if waiting:\n", new="    if False:\n"),),
    ),
    Mutant(
        "drained_while_stopping",
        "3",
        "a preemption does not wait for the slices of deliveries that are being stopped",
        (
            Edit(
                f"{HOST}:preempt",
                old="            waiting.update(delivery.in_flight)\n",
                new="            if delivery.state is DeliveryState.REGISTERED:\n"
                "                waiting.update(delivery.in_flight)\n",
            ),
        ),
    ),
    Mutant(
        "drained_by_the_first_slice",
        "3",
        "a preemption waits for one of the slices that read its blocks, not for all",
        (
            Edit(
                f"{SETTLE}:answer_tickets",
                old="        waiting.discard(number)\n        if not waiting:\n",
                new="        if number in waiting:\n",
            ),
        ),
    ),
    Mutant(
        "cancel_answered_too_early",
        "2",
        "a consumer that cancels gets its fence while slices are in flight to it",
        (
            Edit(
                f"{PEER}:cancel",
                old="    settle.stop(\n",
                new="    state.outputs.append(Send(peer, fence))\n    settle.stop(\n",
            ),
        ),
    ),
    Mutant(
        "failure_told_too_early",
        "2",
        "a consumer is told of a failure, which is a fence, while slices are in flight to it",
        (
            Edit(
                f"{SETTLE}:stop",
                old="    if lane is not None:\n",
                new="    if event is DeliveryEvent.STOP and delivery.in_flight and lane is not None:\n"
                "        failed = Failed(\n"
                "            transfer=delivery.transfer,\n"
                "            consumer=delivery.consumer,\n"
                "            attempt=delivery.attempt,\n"
                "            reason=reason,\n"
                "            valid_until=delivery.good_until,\n"
                "        )\n"
                "        state.outputs.append(Send(delivery.peer, failed))\n"
                "    if lane is not None:\n",
            ),
        ),
    ),
    Mutant(
        "failure_not_told_to_one",
        "6",
        "when a transfer fails, one of its consumers is not told",
        (
            Edit(
                f"{SETTLE}:fail_open",
                old="for delivery in row.open_deliveries():",
                new="for delivery in row.open_deliveries()[:1]:",
            ),
        ),
    ),
    Mutant(
        "late_registration_accepted",
        "6",
        "who registers for a transfer that has been given up, or whose lease has ended, is not told so",
        (
            Edit(
                f"{PEER}:delivery_of",
                old="        if row.abandon_reason or row.expired:\n",
                new="        if False:\n",
            ),
        ),
    ),
    Mutant(
        "valid_until_of_what_was_posted",
        "5",
        "a failure calls good what was posted, not what has landed",
        (
            Edit(
                f"{SETTLE}:_drained",
                old="valid_until=delivery.good_until,",
                new="valid_until=delivery.next_token,",
            ),
        ),
    ),
    Mutant(
        "valid_until_counted",
        "5",
        "a failure calls as many tokens good as have landed, gaps or not",
        (
            Edit(
                f"{SOURCES}:Delivery.good_until",
                old="self.landed.reach(self.start)",
                new="self.start + sum(self.landed._stops) - sum(self.landed._starts)",
            ),
        ),
    ),
    Mutant(
        "earlier_answers_forgotten",
        "1",
        "when an id is used again, what its consumers were told before is forgotten",
        (Edit(f"{HOST}:expect", old="        row.past = tombstone.answers\n", new="        pass\n"),),
    ),
    Mutant(
        "reaper_stops_at_first_live_lease",
        "6",
        "whoever looks for leases that have ended stops at the first one that has not",
        (
            Edit(
                f"{CORE}:ProducerCore.handle_timeout",
                old="        for kind, transfer in state.timers.pop_due(now):\n",
                new="        due = list(itertools.takewhile(\n"
                "            lambda key: state.timers._due[key][0] <= now, list(state.timers._due)\n"
                "        ))\n"
                "        for kind, transfer in due:\n"
                "            state.timers.cancel((kind, transfer))\n",
            ),
        ),
    ),
    Mutant(
        "renewal_does_not_extend_lease",
        "6",
        "a lease ends so many seconds after the prefill, whatever its consumer says",
        (
            Edit(
                f"{PEER}:keep_lease",
                old="    if row.state is SourceState.HELD:\n",
                new="    if False:\n",
            ),
        ),
    ),
    Mutant(
        "too_short_not_told",
        "6",
        "a consumer that asks for more tokens than the prompt has waits for them",
        (
            Edit(
                f"{HOST}:check_length",
                old="delivery.state in _WANTED and (problem := _lacking(state, row, delivery))",
                new="False",
            ),
        ),
    ),
    Mutant(
        "served_by_one_consumer",
        "6",
        "a transfer of two consumers ends when one of them has been served",
        (Edit(f"{SETTLE}:_may_end", old="row.served() >= row.consumers", new="row.served() >= 1"),),
    ),
    Mutant(
        "incomplete_prefill_held",
        "6",
        "a prefill that ended before its last chunk, or without its blocks, is held like a complete one",
        (
            Edit(
                f"{HOST}:finish",
                old="if row.paused or row.frontier < row.tokens:",
                new="if False:",
            ),
            Edit(
                "kvferry.host.scheduler_producer:SchedulerProducer.finish",
                old="complete = sending.frontier >= request.num_prompt_tokens",
                new="complete = True",
            ),
        ),
    ),
    Mutant(
        "refused_expectation_never_released",
        "7",
        "a request that found the table full never gets its blocks back",
        (
            Edit(
                f"{HOST}:_end_again",
                old="    state.results.append(Released(transfer, TABLE_FULL))\n",
                new="",
            ),
        ),
    ),
)
