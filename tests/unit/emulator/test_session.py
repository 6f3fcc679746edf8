"""What scheduler and worker share: one session per engine, verdicts, and what the hooks tell."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.emulator.link import Transfer
from kvferry.emulator.pattern import Grid
from kvferry.emulator.session import MISMATCHES_NAMED_MAX, Session, Verdicts, session_of
from kvferry.errors import UsageError


def vllm_config(instance: str = "i", **emulator: Any) -> Any:
    transfer = SimpleNamespace(engine_id="decode-0", kv_connector="FerryConnector", kv_role="kv_consumer")
    return SimpleNamespace(
        instance_id=instance, kv_transfer_config=transfer, additional_config={"emulator": emulator}
    )


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {"journal": str(tmp_path / "rows"), "report": str(tmp_path / "report")}


def rows(files: dict[str, str], kind: str) -> list[dict[str, Any]]:
    lines = Path(files["journal"]).read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def test_an_engine_has_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.emulator.session._sessions", {})
    assert session_of(vllm_config("a")) is session_of(vllm_config("a"))
    assert session_of(vllm_config("a")) is not session_of(vllm_config("b"))


def test_a_rank_in_a_process_of_its_own_has_files_of_its_own(files: dict[str, str], tmp_path: Path) -> None:
    session = Session(vllm_config(journal=files["journal"], report=str(tmp_path / "decode.json")), rank=1)
    session.close()
    assert json.loads((tmp_path / "decode-rank1.json").read_text())["rank"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode-rank1.json", "rows-rank1"]


def test_a_journal_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="journal or report"):
        Session(vllm_config(journal=str(tmp_path / "missing" / "rows")))


def test_verdicts_add_up_and_name_a_bounded_number_of_requests() -> None:
    verdicts = Verdicts()
    verdicts.add("good", 64, 0)
    for number in range(2 * MISMATCHES_NAMED_MAX):
        verdicts.add(f"bad-{number}", 64, 3)
    found = verdicts.to_dict()
    assert found["verified_pages"] == 64 * (1 + 2 * MISMATCHES_NAMED_MAX)
    assert found["mismatches"] == 3 * 2 * MISMATCHES_NAMED_MAX
    assert found["mismatched_requests"] == [f"bad-{number}" for number in range(MISMATCHES_NAMED_MAX)]


def blocks(*ids: int) -> Any:
    """vLLM's value for a request's blocks."""
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


class Connector:
    """The hooks that tell something."""

    def update_state_after_alloc(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Nothing."""

    def get_transfer_results(self, finished: Any) -> Any:
        return SimpleNamespace(finished_sending=None, finished_recving={"r"}, failed_recving={"f"})


def test_hooks_tell_when_blocks_were_there_and_when_kv_was(files: dict[str, str]) -> None:
    session = Session(vllm_config(**files))
    connector = Connector()
    session.watch_scheduler(connector)
    session.watch_worker(connector)
    for request in ("r", "local"):
        session.timelines.arrive(request, 32)
    connector.update_state_after_alloc(SimpleNamespace(request_id="r"), blocks(5, 2), 31)
    connector.update_state_after_alloc(SimpleNamespace(request_id="local"), blocks(7, 1), 0)
    connector.get_transfer_results(set())
    for request in ("r", "local"):
        session.timelines.finish(request, "FINISHED_STOPPED", 1)
    session.close()
    received, local = rows(files, "request")
    assert received["arrived_ns"] <= received["allocated_ns"] <= received["received_ns"]
    assert not {"allocated_ns", "received_ns"} & set(local)
    assert [row["request"] for row in rows(files, "receive_failed")] == ["f"]
    report = json.loads(Path(files["report"]).read_text())
    assert report["hooks"]["worker.get_transfer_results"]["count"] == 1
    assert report["hooks"]["scheduler.update_state_after_alloc"]["count"] == 2
    assert (report["engine"], report["connector"], report["mismatches"]) == ("decode-0", "FerryConnector", 0)


@pytest.mark.parametrize(
    ("notification", "named"),
    [
        (b"cmpl-1f0c-0-83784e09:1", "cmpl-1f0c-0-83784e09"),
        (b"\x82\xa4kind\x93chatcmpl-77aa\xc0", "chatcmpl-77aa"),
        (b"", ""),
        (b"\x00\x01", ""),
    ],
)
def test_a_transfer_is_told_with_the_request_that_its_notification_names(
    files: dict[str, str], notification: bytes, named: str
) -> None:
    session = Session(vllm_config(**files))
    session.saw(Transfer("WRITE", "peer", notification, 64, 131072, posted=1.0, post_seconds=0.25))
    session.close()
    (row,) = rows(files, "transfer")
    assert (row["request"], row["bytes"], row["descriptors"]) == (named, 131072, 64)
    assert (row["post_seconds"], row["notified"]) == (0.25, bool(notification))
    assert row["posted_ns"] < row["done_ns"]


def test_a_transfer_that_names_nobody_is_told_by_where_it_lands(files: dict[str, str]) -> None:
    session = Session(vllm_config(**files))
    connector = Connector()
    session.watch_scheduler(connector)
    # One layer of 8 blocks, each of 16 words, at address 4096.
    session.landing.place(4096, Grid(np.array([0]), 16, 16, 1, 1, 16, 1))
    connector.update_state_after_alloc(SimpleNamespace(request_id="cmpl-a-0-00000001"), blocks(5, 2), 31)
    connector.update_state_after_alloc(SimpleNamespace(request_id="cmpl-b-0-00000002"), blocks(2), 31)
    for address in (4096 + 5 * 128, 4096 + 3 * 128 - 1, 4096 + 7 * 128, 0):
        session.saw(Transfer("READ", "peer", b"", 1, 128, address=address, posted=1.0))
    session.close()
    named = [row["request"] for row in rows(files, "transfer")]
    assert named == ["cmpl-a-0-00000001", "cmpl-b-0-00000002", "", ""]
