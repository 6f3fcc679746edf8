"""Faults of the agent: links, mailboxes, posts, and the layout's descriptors that it posts."""

from __future__ import annotations

from tests.mutants.edits import Edit, Mutant

LOOP = "kvferry.agent.loop"
PEERS = "kvferry.agent.peers"
POSTS = "kvferry.agent.posting"

AGENT_SIDE: tuple[Mutant, ...] = (
    Mutant(
        "incarnation_ignored",
        "6",
        "a rank has the same name before and after a restart",
        (
            Edit(
                "kvferry.ids:peer_name",
                old="kvferry/{engine}/{incarnation}/pp",
                new="kvferry/{engine}/pp",
            ),
        ),
    ),
    Mutant(
        "broken_link_taken_for_death",
        "2",
        "a peer whose connection has broken is taken for dead",
        (
            Edit(
                f"{PEERS}:Peers.lose",
                old="self.consumer.handle_link_broken(peer",
                new="self.consumer.handle_peer_dead(peer",
            ),
        ),
    ),
    Mutant(
        "other_rank_taken_for_incarnation",
        "2",
        "a peer is dead when its engine has any rank of another name",
        (
            Edit(
                f"{PEERS}:Peers._judge_by",
                old="if all(entry.peer != peer for entry in directory.ranks):",
                new="if any(entry.peer != peer for entry in directory.ranks):",
            ),
        ),
    ),
    Mutant(
        "no_answer_taken_for_death",
        "2",
        "a peer whose engine does not answer is taken for dead",
        (
            Edit(
                f"{PEERS}:Peers.judge",
                old="isinstance(answer, PeerGoneError)",
                new="isinstance(answer, Exception)",
            ),
        ),
    ),
    Mutant(
        "mailbox_overflow_dropped_silently",
        "6",
        "a command that finds the mailbox full is dropped, and its sender is told that it was taken",
        (
            Edit(
                "kvferry.agent.desk:Desk.submit",
                old="            return False\n",
                new="            return True\n",
            ),
        ),
    ),
    Mutant(
        "gated_commands_overtaken",
        "3",
        "commands overtake one that waits for the device",
        (
            Edit(
                f"{LOOP}:Loop._take_commands",
                old="            elif self._gated:\n",
                new="            elif False:\n",
            ),
        ),
    ),
    Mutant(
        "gate_not_waited_for",
        "5",
        "a frontier is believed before the device has computed it",
        (
            Edit(
                f"{LOOP}:Loop._take_commands", old="self._gated and self._gated[0].ready()", new="self._gated"
            ),
        ),
    ),
    Mutant(
        "failed_slice_taken_for_done",
        "5",
        "a slice that ended in an error counts as written",
        (
            Edit(
                f"{POSTS}:Posts._look",
                old="if state is PostState.DONE:",
                new="if state in (PostState.DONE, PostState.FAILED):",
            ),
        ),
    ),
    Mutant(
        "other_slices_forgotten",
        "6",
        "when a slice has ended, the others in flight to the same peer are forgotten",
        (
            Edit(
                f"{POSTS}:Posts._look",
                old="        del self._flights[number]\n",
                new="        for other, its in list(self._flights.items()):\n"
                "            if its.peer == flight.peer:\n"
                "                del self._flights[other]\n",
            ),
        ),
    ),
    Mutant(
        "blocks_paired_in_disorder",
        "5",
        "source blocks are put in order, and the target blocks that belong to them are not",
        (
            Edit(
                "kvferry.layout.descriptors:expand",
                old="source, target = _taken(source, order), _taken(target, order)",
                new="source = _taken(source, order)",
            ),
        ),
    ),
    Mutant(
        "runs_merged_by_one_side",
        "5",
        "runs are joined that follow each other at the source, wherever they lie at the target",
        (
            Edit(
                "kvferry.layout.runs:merge",
                old="    touches &= target[:-1] + length[:-1] == target[1:]\n",
                new="",
            ),
        ),
    ),
)
