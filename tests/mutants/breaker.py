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
        "refusal_lies_silent",
        "2",
        "a rank that refuses a consumer says that it writes nothing to it, whatever is in flight",
        (
            Edit(
                "kvferry.agent.peers:Peers._refuse",
                old="silent = not self.is_linked(peer) and not self.producer.writes_to(peer)",
                new="silent = True",
            ),
        ),
    ),
    Mutant(
        "unsilent_refusal_is_fence",
        "2",
        "a consumer takes every refusal for a proof that nothing is written to it",
        (Edit("kvferry.agent.peers:Peers.refused", old="if refusal.silent:", new="if True:"),),
    ),
    Mutant(
        "denial_not_remembered",
        "2",
        "a registration that was refused is taken when it is read again",
        (
            Edit(
                "kvferry.protocol.producer_peer:_deny",
                old="    _remember(state, answers, _key(peer, message), answer, now)\n",
                new="",
            ),
        ),
    ),
)
