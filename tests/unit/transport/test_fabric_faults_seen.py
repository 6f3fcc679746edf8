from __future__ import annotations

import pytest

from kvferry.errors import TransportError
from kvferry.transport.memory import MessageFault, PostFault
from kvferry.transport.seen import Faulted
from tests.support.fabric import Rig, runs_between


def test_a_listener_hears_of_each_fault_that_strikes_and_of_nothing_else():
    rig = Rig()
    seen: list[Faulted] = []
    rig.fabric.on_fault(seen.append)
    runs = runs_between(rig.a, rig.b, (0, 0, 64))
    rig.a.transport.send(rig.b.name, b"well")
    rig.fabric.inject(rig.a.name, rig.b.name, MessageFault.LOSE, PostFault.REFUSE, PostFault.STALL)
    assert seen == [], "it has not struck yet"
    rig.a.transport.send(rig.b.name, b"lost")
    with pytest.raises(TransportError):
        rig.a.transport.write(rig.b.name, runs)
    rig.a.transport.write(rig.b.name, runs)
    rig.a.transport.write(rig.b.name, runs)
    assert [(one.sender, one.target, one.fault, one.payload) for one in seen] == [
        (rig.a.name, rig.b.name, MessageFault.LOSE, b"lost"),
        (rig.a.name, rig.b.name, PostFault.REFUSE, b""),
        (rig.a.name, rig.b.name, PostFault.STALL, b""),
    ]
    assert [one.runs for one in seen] == [None, runs, runs]
