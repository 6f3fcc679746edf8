"""A transfer's story: who takes part, what is on whose lane, and nothing of other transfers."""

from __future__ import annotations

import math

import pytest

from kvferry.errors import UsageError
from kvferry.ids import TransferId
from kvferry.protocol import commands as cmd
from kvferry.protocol import messages as msg
from kvferry.simulator.ground import events as ev
from kvferry.simulator.ground.outcome import Violation
from kvferry.simulator.show.story import NETWORK, ROUTER, Arrow, Kind, Stretch
from kvferry.simulator.show.timeline import Recorder, choose, story
from tests.support.sample_history import (
    CONSUMER,
    D_RANK,
    OTHER,
    OURS,
    P_RANK,
    RENEWALS,
    D,
    History,
    P,
    hanging,
    one_transfer,
)

GOOD, BAD = one_transfer(), one_transfer(fails=True)


def bars(told: object, kind: Kind) -> list[Stretch]:
    return [bar for bar in told.stretches if bar.kind is kind]


def spans(told: object, kind: Kind) -> list[tuple[str, float, float | None]]:
    return [
        (bar.lane, round(bar.start_seconds, 6), bar.stop_seconds and round(bar.stop_seconds, 6))
        for bar in bars(told, kind)
    ]


def arrows(told: object, label: str) -> list[Arrow]:
    return [arrow for arrow in told.arrows if arrow.label == label]


def at(events: list[ev.Observed], kind: type[ev.Observed], number: int = 0) -> float:
    return round([event.at_seconds for event in events if isinstance(event, kind)][number], 6)


def test_lanes_run_from_the_router_over_the_producer_and_the_network_to_the_consumer() -> None:
    titles = [lane.title for lane in story(GOOD, OURS).lanes]
    assert titles == ["router", "P0 host", "P0 rank 0", "network", "D0 rank 0", "D0 host"]


def test_every_rank_has_a_lane_and_a_restart_none_of_its_own() -> None:
    history = History()
    ranks = tuple(P_RANK.replace("tp0", f"tp{index}") for index in range(2))
    again = tuple(rank.replace("p-one", "p-two") for rank in ranks)
    history.add(ev.EngineStarted(0.0, P, ranks, 8))
    history.add(ev.EngineStarted(1.0, P, again, 8))
    history.command(ranks[0], cmd.Expect(OURS, 4))
    history.command(again[1], cmd.Expect(OURS, 4))
    told = story(history.events, OURS)
    assert [lane.title for lane in told.lanes] == ["router", "P0 host", "P0 rank 0", "P0 rank 1", "network"]
    assert {mark.lane for mark in told.marks if mark.label == "Expect"} == {"P0/0", "P0/1"}


def test_an_engine_that_is_both_is_drawn_once() -> None:
    history = History()
    history.add(ev.EngineStarted(0.0, P, (P_RANK,), 8))
    history.add(ev.LegSent(1.0, P, "r1", OURS, None))
    history.add(ev.LegSent(1.0, P, "r2", OURS, CONSUMER))
    titles = [lane.title for lane in story(history.events, OURS).lanes]
    assert titles == ["router", "P0 host", "P0 rank 0", "network"]


def test_what_is_held_lasts_from_the_first_command_to_the_release() -> None:
    told = story(GOOD, OURS)
    start, stop = at(GOOD, ev.Commanded), at(GOOD, ev.Reported)
    assert spans(told, Kind.LEASE) == [("P0/0", start, stop)]
    assert spans(told, Kind.REGISTRATION) == [("D0/0", at(GOOD, ev.Commanded, 1), at(GOOD, ev.Reported, 1))]
    assert spans(told, Kind.QUARANTINE) == []


def test_an_unfenced_failure_ends_in_quarantine() -> None:
    told = story(BAD, OURS)
    failed, safe = at(BAD, ev.Reported), at(BAD, ev.Reported, 1)
    assert spans(told, Kind.REGISTRATION) == [("D0/0", at(BAD, ev.Commanded, 1), failed)]
    assert spans(told, Kind.QUARANTINE) == [("D0/0", failed, safe)]


def test_slices_show_when_their_pieces_landed_and_how_they_ended() -> None:
    told = story(GOOD, OURS)
    first, second = bars(told, Kind.POST)
    assert {first.lane, second.lane} == {NETWORK}
    assert [round(tick, 6) for tick in first.ticks] == [at(GOOD, ev.Landed), at(GOOD, ev.Landed, 1)]
    assert (first.start_seconds, first.stop_seconds) == (
        pytest.approx(at(GOOD, ev.Posted)),
        pytest.approx(at(GOOD, ev.PostEnded)),
    )
    assert first.note == "post 1, P0/0 to D0/0: blocks [1-2] into [5-6]"
    assert [bar.label for bar in bars(story(BAD, OURS), Kind.BROKEN_POST)] == ["2"]


def test_a_post_into_blocks_that_were_registered_anew_is_not_ours() -> None:
    history = History()
    history.events = list(GOOD)
    history.at = GOOD[-1].at_seconds
    source = cmd.Source(P, "127.0.0.1", 1)
    history.command(D_RANK, cmd.Receive(OTHER, CONSUMER, source, 0, 8, (((5, 2),),)))
    history.add(ev.Posted(history.at, P_RANK, D_RANK, 9, (1, 2), (5, 6)))
    assert [bar.label for bar in bars(story(history.events, OURS), Kind.POST)] == ["1", "2"]
    assert [bar.label for bar in bars(story(history.events, OTHER), Kind.POST)] == ["9"]


def test_messages_are_arrows_from_where_they_left_to_where_they_arrived() -> None:
    told = story(GOOD, OURS)
    (register,) = arrows(told, "Register")
    assert (register.source, register.target, register.kind) == ("D0/0", "P0/0", Kind.ASKS)
    assert register.stop_seconds - register.start_seconds == pytest.approx(0.002)
    (written,) = arrows(told, "Written")
    assert (written.source, written.target, written.kind) == ("P0/0", "D0/0", Kind.ANSWERS)
    legs = [(arrow.source, arrow.target) for arrow in told.arrows if arrow.kind is Kind.REQUEST]
    assert legs == [(ROUTER, "P0"), (ROUTER, "D0")]


def test_a_lost_message_has_no_arrival_and_says_when() -> None:
    (failed,) = arrows(story(BAD, OURS), "Failed")
    assert failed.stop_seconds is None
    assert failed.lost_seconds > failed.start_seconds


def test_both_copies_of_a_doubled_message_are_shown() -> None:
    history = History()
    history.events = list(GOOD)
    number = next(event.number for event in GOOD if isinstance(event, ev.MessageSent))
    history.at = GOOD[-1].at_seconds
    history.arrive(P_RANK, D_RANK, number)
    before, after = len(story(GOOD, OURS).arrows), len(story(history.events, OURS).arrows)
    assert after == before + 1


def test_messages_of_others_are_left_out_and_batches_that_name_it_are_not() -> None:
    history = History()
    history.events = list(GOOD)
    history.at = GOOD[-1].at_seconds
    for number, transfer in enumerate((OTHER, OURS)):
        renew = msg.Renew(transfers=((transfer, CONSUMER, 1),), write_seconds=1.0)
        history.later(number).send(D_RANK, P_RANK, renew)
        history.send(D_RANK, P_RANK, msg.Cancel(transfer=transfer, consumer=CONSUMER, reason="x"))
    told = story(history.events, OURS)
    assert len(arrows(told, "Renew")) == len(arrows(told, "Cancel")) == 1


def test_a_permission_runs_from_the_mark_and_renewals_extend_it() -> None:
    marked = at(BAD, ev.MessageSent)
    told = story(BAD, OURS)
    arrived = at(BAD, ev.MessageEnded, 1)
    (bar,) = bars(told, Kind.PERMISSION)
    assert bar.lane == "P0/0"
    assert bar.start_seconds == pytest.approx(arrived)
    # Both grants carry the same mark, so the second one extends nothing.
    assert bar.stop_seconds == pytest.approx(marked + 10.0)
    assert len(bar.ticks) == 1


def test_without_a_mark_nothing_is_permitted() -> None:
    history = History()
    history.events = [event for event in GOOD if not isinstance(event, ev.MessageSent | ev.MessageEnded)]
    register = msg.Register(
        transfer=OURS, consumer=CONSUMER, start=0, stop=4, groups=(((5, 1),),), write_seconds=10.0
    )
    history.arrive(D_RANK, P_RANK, history.send(D_RANK, P_RANK, register))
    assert bars(story(history.events, OURS), Kind.PERMISSION) == []


def test_faults_that_hit_it_go_through_all_lanes_and_those_of_others_are_left_out() -> None:
    notes = [mark.note for mark in story(BAD, OURS).marks if mark.kind is Kind.FAULT]
    assert notes == ["error on one rank: post 2 breaks", "message_lost: Failed, P0/0 to D0/0"]
    assert [mark.note for mark in story(GOOD, OURS).marks if mark.kind is Kind.FAULT] == []


def test_a_fault_of_everybody_is_shown_and_does_not_stretch_the_picture() -> None:
    events = [*GOOD, ev.FaultInjected(900.0, "partition", "P0 to D0")]
    told = story(events, OURS)
    (mark,) = [mark for mark in told.marks if mark.kind is Kind.FAULT]
    assert (mark.lane, mark.ours) == (None, False)
    assert told.instants()[-1] < 900.0


def test_a_crash_ends_what_is_open_on_its_engine_only() -> None:
    cut = next(index for index, event in enumerate(GOOD) if isinstance(event, ev.PostEnded))
    events = [*GOOD[:cut], ev.EngineCrashed(2.5, D, (D_RANK,))]
    told = story(events, OURS)
    assert [bar[2] for bar in spans(told, Kind.REGISTRATION)] == [2.5]
    assert [bar[2] for bar in spans(told, Kind.LEASE)] == [None]
    assert {bar.lane: bar.stop_seconds for bar in bars(told, Kind.REQUEST)} == {"P0": None, "D0": 2.5}
    assert [(mark.lane, mark.label) for mark in told.marks if mark.kind is Kind.FAULT] == [("D0", "crash")]


def test_a_violation_is_part_of_the_story() -> None:
    what = "late write of transfer-1"
    told = story(BAD, OURS, [Violation(2, 3.5, what)])
    (mark,) = [mark for mark in told.marks if mark.kind is Kind.VIOLATION]
    assert (mark.lane, mark.at_seconds, mark.note, mark.ours) == (None, 3.5, f"promise 2: {what}", True)
    assert 3.5 in told.instants()


def test_what_is_missing_at_the_end_is_told_at_the_end() -> None:
    told = story(GOOD, OURS, [Violation(7, float("inf"), "3 blocks of p-transfer-1-9 never came back")])
    (mark,) = [mark for mark in told.marks if mark.kind is Kind.VIOLATION]
    assert mark.at_seconds == GOOD[-1].at_seconds


def test_violations_of_other_transfers_are_left_out_and_those_of_none_are_not() -> None:
    violations = [
        Violation(6, 2.01, "transfer-2 never ended"),
        Violation(6, 2.01, "transfer-10 never ended"),
        Violation(0, 2.01, "ValueError"),
    ]
    events = [*GOOD, ev.RequestEnded(2.2, P, "r9", LONGER, None, "x")]
    marks = [mark for mark in story(events, OURS, violations).marks if mark.kind is Kind.VIOLATION]
    assert [(mark.note, mark.ours) for mark in marks] == [("an error: ValueError", False)]


def test_the_recorder_keeps_everything_in_order() -> None:
    recorder = Recorder()
    for event in GOOD:
        recorder.observe(event)
    assert recorder.events == GOOD


# --- which transfer -------------------------------------------------------------------------------

LONGER = TransferId(f"{OURS}0")


def test_the_wanted_transfer_is_chosen() -> None:
    assert choose(GOOD, (), OTHER) == OTHER


def test_an_unknown_transfer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match="--transfer x is not in this history; it has transfer-1, transfer-2"
    ):
        choose(GOOD, (), "x")


def test_a_history_without_transfers_is_refused() -> None:
    with pytest.raises(UsageError, match="no transfer to draw"):
        choose([ev.Healed(1.0, 2.0)], ())


def test_the_transfer_that_a_violation_names_is_chosen() -> None:
    assert choose(GOOD, [Violation(2, 2.1, "late write of transfer-2")]) == OTHER
    assert choose(GOOD, [Violation(2, 2.1, "late write of transf~")]) in {OURS, OTHER}


def test_a_name_that_begins_like_another_does_not_win() -> None:
    events = [*GOOD, ev.RequestEnded(9.0, P, "r9", LONGER, None, "x")]
    assert choose(events, [Violation(2, 2.1, f"late write of {LONGER}")]) == LONGER


def test_otherwise_it_is_the_last_one_before_the_violation() -> None:
    late = ev.RequestEnded(9.0, P, "r9", OTHER, None, "x")
    assert choose([*GOOD, late], [Violation(7, 9.5, "blocks are missing")]) == OTHER
    assert choose([*GOOD, late], [Violation(7, 2.06, "blocks are missing")]) == OURS


def test_without_a_violation_it_is_the_one_with_most_faults() -> None:
    assert choose(GOOD, ()) == OTHER
    assert choose(BAD, ()) == OURS


def test_a_transfer_may_be_named_by_the_beginning_of_its_id() -> None:
    history = History()
    for name in ("t001-0-abc", "t002-0-abd", "t0"):
        history.add(ev.LegSent(1.0, P, "r1", TransferId(name), None))
    assert choose(history.events, (), "t001") == "t001-0-abc"
    assert choose(history.events, (), "t0") == "t0"
    with pytest.raises(UsageError, match=r"t00 may be any of t001-0-abc, t002-0-abd; name more of it"):
        choose(history.events, (), "t00")


def test_of_what_hangs_the_picture_has_its_beginning_its_deadline_and_a_count() -> None:
    events = hanging(deadline_seconds=10.0)
    owed = Violation(6, 2.5, f"D0 never reported received for {OURS}, owed since 2.5", unfinished=True)
    left = [Violation(7, math.inf, f"left over: {number}", unfinished=True) for number in range(3)]
    marks = [
        (mark.kind, mark.at_seconds, mark.note)
        for mark in story(events, OURS, [owed, *left]).marks
        if mark.kind in (Kind.VIOLATION, Kind.DEADLINE)
    ]
    end = events[-1].at_seconds
    assert marks == [
        (Kind.VIOLATION, 2.5, f"promise 6: {owed.what}"),
        (Kind.VIOLATION, end, "unfinished as well at the end: 3 more"),
        (Kind.DEADLINE, 10.0, "everything should have ended by now"),
    ]
    assert not any(mark.kind is Kind.DEADLINE for mark in story(events, OURS).marks)


def test_long_runs_of_renewals_become_a_bar() -> None:
    told = story(hanging(), OURS)
    (bar,) = bars(told, Kind.LEFT_OUT)
    assert bar.note == f"{2 * RENEWALS - 8} renewals and answers left out"
    assert len(arrows(told, "Renew")) == len(arrows(told, "Status")) - 1 == 4
    (permission,) = bars(told, Kind.PERMISSION)
    assert not any(bar.start_seconds < at < bar.stop_seconds for at in permission.ticks)


def test_short_runs_of_renewals_are_drawn() -> None:
    told = story(hanging(renewals=5), OURS)
    assert bars(told, Kind.LEFT_OUT) == []
    assert len(arrows(told, "Renew")) == 5
