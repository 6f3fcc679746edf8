"""Faults that a breaker planted and that no history found, until histories of their kind were played."""

from __future__ import annotations

from tests.mutants.edits import Edit, Mutant

BREAKER: tuple[Mutant, ...] = (
    Mutant(
        "no_drift_margin",
        "1",
        "a consumer takes its own clock for the producer's when it counts how long a permission lasts",
        (Edit("kvferry.protocol.fences:fail", old=" * (1 + CLOCK_DRIFT_MAX)", new=""),),
    ),
    Mutant(
        "granted_before_forgotten",
        "2",
        "what was permitted over a link that is lost counts as never permitted",
        (Edit("kvferry.protocol.fences:join", old="before = row.granted_before", new="before: dict = {}"),),
    ),
    Mutant(
        "save_ignores_failed_forward",
        "5",
        "the KV of a forward pass that raised is published",
        (
            Edit(
                "kvferry.host.worker:FerryWorker.save",
                old="        if not succeeded:\n            return\n",
                new="",
            ),
        ),
    ),
    Mutant(
        "close_says_nothing",
        "6",
        "a rank that is closed tells no consumer",
        (
            Edit(
                "kvferry.protocol.producer:ProducerCore.handle_close",
                old="            settle.fail_open(self.state, row, CLOSED)\n",
                new="",
            ),
        ),
    ),
    Mutant(
        "agent_death_is_fence",
        "2",
        "what an agent that has stopped was receiving counts as safe",
        (Edit("kvferry.agent.desk:Desk.fail_everything", old="fenced=False", new="fenced=True"),),
    ),
    Mutant(
        "parts_lose_last",
        "6",
        "the last part of a message that travels in parts is not sent",
        (
            Edit(
                "kvferry.protocol.codec:Encoder.encode",
                old="for index, piece in enumerate(pieces)\n",
                new="for index, piece in enumerate(pieces[:-1])\n",
            ),
        ),
    ),
    Mutant(
        "refusal_is_fence",
        "2",
        "a consumer takes every refusal for a proof that nothing is written to it",
        (
            Edit(
                "kvferry.agent.peers:Peers.refused",
                old="        self.disconnect(peer, refusal.reason)\n",
                new="""        self._tear_down(peer)
        self.producer.handle_peer_lost(peer, refusal.reason, self.clock())
        died_at = self.clock() - self.links.limits.orphan_seconds
        self.consumer.handle_peer_dead(peer, refusal.reason, died_at)
""",
            ),
        ),
    ),
    Mutant(
        "denial_not_remembered",
        "2",
        "a registration that was refused is taken when it is read again",
        (
            Edit(
                "kvferry.protocol.producer_peer:_deny",
                old="    _remember(state, answers, _key(peer, message), answer)\n",
                new="",
            ),
        ),
    ),
    Mutant(
        "idle_ignores_needed",
        "6",
        "a link is given up as idle though transfers wait for it",
        (Edit("kvferry.agent.peers:Peers.rest", old="if peer not in needed", new="if True"),),
    ),
    Mutant(
        "needed_forgets_consumer",
        "6",
        "a consumer gives a link up as idle though it waits for its producer",
        (
            Edit(
                "kvferry.agent.peers:_needed",
                old="producer.peers() | consumer.peers()",
                new="producer.peers()",
            ),
        ),
    ),
    Mutant(
        "needed_forgets_producer",
        "6",
        "a producer gives a link up as idle though it owes its consumer something",
        (
            Edit(
                "kvferry.agent.peers:_needed",
                old="producer.peers() | consumer.peers()",
                new="consumer.peers()",
            ),
        ),
    ),
    Mutant(
        "remembered_hello_ignored",
        "6",
        "who speaks after its link was given up has to introduce itself again, and does not know",
        (
            Edit(
                "kvferry.agent.peers:Peers.ready",
                old="        if hello is not None:\n",
                new="        if False:\n",
            ),
        ),
    ),
    Mutant(
        "what_was_forgotten_is_new",
        "2",
        "what was answered, and had to be forgotten, is admitted as if it had never been here",
        (
            Edit(
                "kvferry.protocol.producer_peer:_was_forgotten",
                old="if not state.may_be_forgotten(message.transfer, _key(peer, message)):",
                new="if True:",
            ),
        ),
    ),
)
