"""Faults of the consumer core: fences, permissions, and what is made of what producers say."""

from __future__ import annotations

from tests.mutants.edits import Edit, Mutant

FENCES = "kvferry.protocol.fences"
HOST = "kvferry.protocol.consumer_host"
PEER = "kvferry.protocol.consumer_peer"
STATE = "kvferry.protocol.receptions"

CONSUMER_SIDE: tuple[Mutant, ...] = (
    Mutant(
        "free_without_fence",
        "2",
        "a cancelled reception gives its blocks back at once, without the producer's answer",
        (
            Edit(
                f"{FENCES}:_cancel_parts",
                old="if part.state is PartState.UNTOLD or part.granted_at is None:",
                new="if part.state is not PartState.WRITTEN:",
            ),
        ),
    ),
    Mutant(
        "silence_taken_for_fence",
        "2",
        "a producer that says nothing is taken for one that writes nothing",
        (
            Edit(
                f"{FENCES}:check",
                old="_report(state, row, fenced=False)",
                new="_report(state, row, fenced=True)",
            ),
        ),
    ),
    Mutant(
        "double_free",
        "7",
        "when a quarantine ends, the blocks are reported safe and then reported failed and free once more",
        (
            Edit(
                f"{FENCES}:check",
                old="""        else:
            _report(state, row, fenced=True)
""",
                new="""        _report(state, row, fenced=True)
""",
            ),
        ),
    ),
    Mutant(
        "completions_counted",
        "5",
        "the good prefix is the number of tokens that have arrived, not what is there without a gap",
        (
            Edit(
                f"{STATE}:Part.good_until",
                old="self.landed.reach(start)",
                new="start + sum(self.landed._stops) - sum(self.landed._starts)",
            ),
        ),
    ),
    Mutant(
        "written_by_any_slice",
        "5",
        "each slice that lands counts as the whole",
        (
            Edit(
                f"{PEER}:landed",
                old="part.landed.add(max(message.start, row.start), min(message.stop, row.stop))",
                new="""part.landed.add(max(message.start, row.start), min(message.stop, row.stop))
        if row.state is ReceptionState.WAITING and part.state is PartState.TOLD and len(part.landed) > 1:
            part.state = PART.next(part.state, PartEvent.WRITTEN)
            fences.check(state, row, now)""",
            ),
        ),
    ),
    Mutant(
        "late_message_accepted",
        "2",
        "what a producer says of an earlier reception under the same ids is taken for the present one's",
        (
            Edit(
                f"{PEER}:_find",
                old="if row is None or part is None or row.attempt != message.attempt:",
                new="if row is None or part is None:",
            ),
        ),
    ),
    Mutant(
        "attempt_not_counted",
        "5",
        "every reception has the same number, so that the producer cannot tell them apart either",
        (Edit(f"{STATE}:ConsumerState.open_row", old="self.attempts += 1", new="self.attempts = 1"),),
    ),
    Mutant(
        "never_granted_part_waited_for",
        "6",
        "a producer rank that was never permitted anything is waited for until it answers, however long",
        (
            Edit(
                f"{FENCES}:_cancel_parts",
                old="if part.state is PartState.UNTOLD or part.granted_at is None:",
                new="if part.state is PartState.UNTOLD:",
            ),
            Edit(
                f"{FENCES}:fail",
                old="    if granted:\n",
                new='    if not granted:\n        state.lapse_timers.set(row.key, float("inf"))\n    else:\n',
            ),
        ),
    ),
    Mutant(
        "lapse_without_retry_bound",
        "2",
        "blocks are free when the permission ends, not when the last write that it allowed must have ended",
        (
            Edit(
                f"{FENCES}:fail",
                old="(state.limits.write_seconds + state.retry_bound_seconds)",
                new="state.limits.write_seconds",
            ),
        ),
    ),
    Mutant(
        "renewal_does_not_extend_quarantine",
        "2",
        "the quarantine is counted from the registration, not from the last renewal of the permission",
        (Edit(f"{FENCES}:fail", old="max(granted) + bound", new="row.waiting_since + bound"),),
    ),
    Mutant(
        "renewal_not_noted",
        "2",
        "a renewal permits the producer to write, and the consumer does not remember having sent it",
        (
            Edit(
                f"{PEER}:renew",
                old='            if row.mode == "push":\n                fences.grant(state, part, now)\n',
                new="",
            ),
            Edit(
                f"{PEER}:status",
                old="fences.grant(state, part, now) is not None",
                new="state.usable_mark(name, now) is not None",
            ),
        ),
    ),
    Mutant(
        "renewal_timer_armed_once",
        "6",
        "what waits for a peer is renewed once and never again",
        (
            Edit(
                f"{PEER}:renew",
                old="now + state.limits.renew_seconds)",
                new='float("inf"))',
            ),
        ),
    ),
    Mutant(
        "silence_never_noticed",
        "6",
        "a producer may say nothing for as long as it likes",
        (
            Edit(
                f"{FENCES}:is_unanswered",
                old="return now - part.heard_at >= state.limits.silence_seconds",
                new="return False",
            ),
            Edit(f"{PEER}:silent", old="    if due > now:\n", new="    if True:\n"),
        ),
    ),
    Mutant(
        "link_dead_but_not_lapsed",
        "6",
        "the end of the last permission ends nothing: a dead producer's blocks stay in quarantine",
        (
            Edit(
                f"{FENCES}:lapse",
                old="        part.state = PART.next(part.state, PartEvent.LOST)\n    check(state, row, now)",
                new='    state.lapse_timers.set(row.key, float("inf"))',
            ),
        ),
    ),
    Mutant(
        "links_never_forgotten",
        "6",
        "the links of a producer that has died are handed to the next request, and to all after it",
        (
            Edit(
                f"{PEER}:forget_links",
                old="            del state.sources[source]\n",
                new="            pass\n",
            ),
        ),
    ),
    Mutant(
        "full_table_says_nothing",
        "6",
        "a reception that finds the table full is dropped without a result",
        (
            Edit(
                f"{HOST}:receive",
                old="""            state.results.append(
                ReceiveFailed(command.transfer, command.consumer, TABLE_FULL, command.start, fenced=True)
            )
            return
""",
                new="            return\n",
            ),
        ),
    ),
    Mutant(
        "nothing_relinquished",
        "6",
        "engines that wait for each other's memory wait for ever",
        (
            Edit(f"{HOST}:relinquish", old="    if any(", new="    if False and any("),
            Edit("kvferry.protocol.producer_host:reclaim", old="    if all(", new="    if False and all("),
        ),
    ),
    Mutant(
        "unresolved_tells_the_first",
        "6",
        "when a producer cannot be reached, only the first of the requests that wait for it hears of it",
        (
            Edit(
                f"{HOST}:unresolved",
                old="for key in sorted(known.waiting):",
                new="for key in sorted(known.waiting)[:1]:",
            ),
        ),
    ),
    Mutant(
        "resolved_joins_the_first",
        "6",
        "when a producer is linked, only the first of the requests that wait for it joins",
        (
            Edit(
                f"{HOST}:resolved",
                old="for key in sorted(waiting):",
                new="for key in sorted(waiting)[:1]:",
            ),
        ),
    ),
)
