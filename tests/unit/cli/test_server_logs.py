"""The cause of a server's end, from its log."""

from __future__ import annotations

import pytest

from kvferry.cli.server_logs import cause, without_noise

HEARSAY = "(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above."
DEAD = "(APIServer pid=3) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "(EngineCore pid=41) kvferry.errors.UsageError: agent_url: no such agent",
            "kvferry.errors.UsageError: agent_url: no such agent",
        ),
        (
            "(EngineCore pid=41) ERROR 11-30 12:00:00 [core.py:94] kvferry.errors.UsageError: x: y",
            "kvferry.errors.UsageError: x: y",
        ),
        ("(Worker_TP0 pid=7) ValueError: no room", "ValueError: no room"),
        ("ERROR 11-30 12:00:00 [core.py:94] torch.OutOfMemoryError: 2 GiB", "torch.OutOfMemoryError: 2 GiB"),
        ("\x1b[0;36m(EngineCore pid=41)\x1b[0;0m ValueError: colored", "ValueError: colored"),
        ("api_server.py: error: unrecognized arguments: --frob", None),
    ],
)
def test_the_cause_is_shown_without_the_prefix(line: str, expected: str | None) -> None:
    found = cause(["Traceback (most recent call last):", line, "INFO 11-30 12:00:01 [x.py:1] Shutting down"])
    assert found == (expected or line)


def test_the_last_exception_is_the_cause() -> None:
    assert cause(["KeyError: 'first'", "ValueError: second", "and then some"]) == "ValueError: second"


def test_an_error_of_kvferry_goes_before_later_ones() -> None:
    assert cause(["kvferry.errors.UsageError: a: b", "ValueError: later", HEARSAY]) == (
        "kvferry.errors.UsageError: a: b"
    )


@pytest.mark.parametrize("hearsay", [HEARSAY, DEAD])
def test_the_report_of_another_process_failure_is_only_the_last_resort(hearsay: str) -> None:
    assert cause(["(EngineCore pid=4) ValueError: first", hearsay]) == "ValueError: first"
    assert cause([hearsay]) == hearsay.partition(") ")[2]


@pytest.mark.parametrize(
    "line",
    [
        "all is well",
        "from kvferry.errors import UsageError",
        '    raise UsageError(f"no: {name}")',
        "INFO 11-30 12:00:00 [x.py:1] retries after ValueError: three",
    ],
)
def test_a_log_without_an_error_tells_no_cause(line: str) -> None:
    assert cause([line]) is None


def test_noise_is_left_out_and_the_rest_kept_in_order() -> None:
    kept = [
        "loading",
        "(EngineCore pid=4) ValueError: no room",
        'INFO: 127.0.0.1:5 - "GET /v1/models HTTP/1.1"',
    ]
    noise = [
        "nanobind: leaked 3 instances!",
        ' - leaked instance 0x7f of type "xgrammar.Grammar"',
        "(EngineCore pid=4) nanobind: leaked 2 types!",
        "(EngineCore pid=4)  - ... skipped remainder",
        "See https://nanobind.readthedocs.io/en/latest/refleaks.html",
        "(APIServer pid=3) INFO 11-30 12:00:00 [launcher.py:46] Route: /health, Methods: GET",
        '(APIServer pid=3) INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK',
    ]
    assert without_noise([kept[0], *noise[:4], kept[1], *noise[4:], kept[2]]) == kept
