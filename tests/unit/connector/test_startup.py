"""What an engine's directory says of its ranks is what each of them has said."""

from __future__ import annotations

from types import SimpleNamespace

from kvferry.agent.directory import Directory
from kvferry.connector import startup
from kvferry.connector.metadata import Handshake
from kvferry.ids import EngineId, Incarnation


def test_a_directory_passes_on_what_each_rank_says(monkeypatch):
    published: list[Directory] = []
    server = SimpleNamespace(publish=published.append, port=5600)
    monkeypatch.setattr(startup, "DirectoryServer", lambda *_, **__: server)
    settings = SimpleNamespace(
        side_channel_host="h", side_channel_port=5600, advertise_host="h", side_channel_secret=None
    )
    ranks = [
        Handshake(EngineId("e"), Incarnation("i"), 0, tp, b"m%d" % tp, b"c%d" % tp, ends_with_engine=tp == 0)
        for tp in range(2)
    ]
    assert startup.open_directory(settings, ranks) is server
    [directory] = published
    assert (directory.tp_size, directory.pp_size) == (2, 1)
    told = [(entry.tp, entry.metadata, entry.cache, entry.ends_with_engine) for entry in directory.ranks]
    assert told == [(0, b"m0", b"c0", True), (1, b"m1", b"c1", False)]
