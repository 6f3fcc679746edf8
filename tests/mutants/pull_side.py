"""Faults of pull: of who reads, and of who is read."""

from __future__ import annotations

from tests.mutants.edits import Edit, Mutant

LOANS = "kvferry.protocol.loans"
READS = "kvferry.protocol.reads"
FAREWELLS = "kvferry.protocol.farewells"
HOST = "kvferry.protocol.producer_host"
PEER = "kvferry.protocol.consumer_peer"

PULL_SIDE: tuple[Mutant, ...] = (
    Mutant(
        "read_after_promise",
        "3",
        "a reader goes on posting READs when the promise that the source is kept has run out",
        (
            Edit(
                f"{READS}:_readable",
                old="if not now < part.keep_until or now < reading.retry_at:",
                new="if now < reading.retry_at:",
            ),
        ),
    ),
    Mutant(
        "late_read_is_used",
        "5",
        "what a READ has brought is used although its end was seen after the source's lease",
        (Edit(f"{READS}:done", old="if now < ended.part.keep_until:", new="if True:"),),
    ),
    Mutant(
        "promise_counts_from_its_arrival",
        "3",
        "a reader counts a promise from when it comes in, and not from when it asked",
        (Edit(f"{READS}:extend", old="asked + keep_seconds", new="now + keep_seconds"),),
    ),
    Mutant(
        "source_freed_before_fetched",
        "3",
        "a producer that calls its blocks back does not wait for their readers",
        (
            Edit(
                "kvferry.protocol.settle:settle",
                old="if delivery.state is DeliveryState.RECALLED and row.expired:",
                new="if delivery.state is DeliveryState.RECALLED:",
            ),
        ),
    ),
    Mutant(
        "promises_more_than_the_lease",
        "3",
        "a producer promises a reader to keep the source for longer than it does",
        (
            Edit(
                f"{LOANS}:offer",
                old="keep_seconds=row.lease_until - delivery.asked_at,",
                new="keep_seconds=2 * (row.lease_until - delivery.asked_at),",
            ),
        ),
    ),
    Mutant(
        "fetched_before_the_last_slice",
        "2",
        "a reader has done when its last READ is posted",
        (
            Edit(
                f"{READS}:_check_end",
                old="""    if reading is None or reading.in_flight:
        return
    if part.state is PartState.OFFERED and part.landed.reach(row.start) >= reading.stop:
""",
                new="""    if reading is None:
        return
    if part.state is PartState.OFFERED and reading.next_token >= row.stop:
""",
            ),
        ),
    ),
    Mutant(
        "read_prefix_counted",
        "5",
        "a reader has done when nothing is in flight and its last slice has come, whatever lies before",
        (
            Edit(
                f"{READS}:_check_end",
                old="part.landed.reach(row.start) >= reading.stop",
                new="part.landed.reach(max(row.stop - 1, row.start)) >= row.stop",
            ),
        ),
    ),
    Mutant(
        "late_offer_accepted",
        "3",
        "an offer of an earlier reception under the same ids is taken for this one's",
        (
            Edit(
                f"{PEER}:offer",
                old="    found = _find(state, name, message, now)\n    if found is not None:\n"
                "        reads.offered(state, *found, message, now)\n",
                new="    row = state.rows.get((message.transfer, message.consumer))\n"
                "    part = None if row is None else (row.parts or {}).get(name)\n"
                "    if row is not None and part is not None and part.state.value != 'untold':\n"
                "        reads.offered(state, row, part, message, now)\n",
            ),
        ),
    ),
    Mutant(
        "silent_with_a_read_in_flight",
        "2",
        "a reader that gives up says at once that it is silent",
        (
            Edit(
                f"{FAREWELLS}:stop",
                old="elif part.reading is not None and not part.reading.in_flight:",
                new="elif part.reading is not None:",
            ),
        ),
    ),
    Mutant(
        "offered_from_the_front",
        "5",
        "a producer offers its first blocks, however many of them the reader has already",
        (
            Edit(
                f"{LOANS}:_offered",
                old="blocks[first:past]",
                new="blocks[: past - first]",
            ),
        ),
    ),
    Mutant(
        "failure_not_heard",
        "6",
        "a reader that is told to stop stops, and waits for ever",
        (
            Edit(
                f"{PEER}:failed",
                old="if part.state in (PartState.FAILED, PartState.DRAINING):",
                new="if part.state is PartState.FAILED:",
            ),
        ),
    ),
    Mutant(
        "offer_waits_for_a_renewal",
        "6",
        "who has asked before prefill ends is offered nothing until it asks again",
        (Edit(f"{HOST}:finish", old="    loans.offer_all(state, row)\n", new=""),),
    ),
    Mutant(
        "read_twice",
        "4",
        "a READ that is tried again is posted twice",
        (
            Edit(
                f"{READS}:_try_again",
                old="    reading.retry_at =",
                new="    reading.retries.append(Posted(posted.start, posted.stop, posted.attempt + 1))\n"
                "    reading.retry_at =",
            ),
        ),
    ),
    Mutant(
        "failed_read_forgotten",
        "6",
        "a READ that was refused for the moment is not tried again",
        (
            Edit(
                f"{READS}:_try_again",
                old="    reading.retries.append(Posted(posted.start, posted.stop, posted.attempt + 1))\n",
                new="",
            ),
        ),
    ),
    Mutant(
        "lent_is_taken_back",
        "6",
        "an engine that needs memory takes leases back from those who read",
        (
            Edit(
                f"{HOST}:reclaim",
                old="_WANTED | loans.READS",
                new="_WANTED",
            ),
        ),
    ),
)
