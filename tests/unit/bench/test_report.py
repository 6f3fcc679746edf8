"""The written report: four files, one page that needs nothing else, and a verdict."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from kvferry.bench import report
from kvferry.bench.report import CSV, HTML, JSON, PNG, Written, write_report
from kvferry.bench.results import open_results
from kvferry.errors import UsageError
from tests.support.bench_results import World, made_up, options

# Drawing takes a few seconds of CPU time, which a busy machine may not have within the usual bound.
pytestmark = pytest.mark.timeout(120)

SMALL = options(cells=((1, 1024), (4, 16384)), cell_seconds=3.0)


class Page(HTMLParser):
    """What is in a page, tag by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in {"meta", "path", "use", "line", "rect"}:
            self._open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids[str(value)] += 1
            if name in {"href", "src", "xlink:href"}:
                self.links.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()
        else:
            assert tag in {"meta", "path", "use", "line", "rect"}, tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def written(directory: Path) -> Written:
    return write_report(
        made_up(directory, World(tells_idle_calls=True, others={("vllm-pull", 4): 0.12}), SMALL)
    )


@pytest.fixture(scope="module")
def page(written: Written, directory: Path) -> Page:
    return Page((directory / HTML).read_text(encoding="utf-8"))


def test_the_page_needs_nothing_else(page: Page, directory: Path) -> None:
    """No script, no font, no picture from elsewhere: only references inside of the page."""
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == 0
    assert page.links
    assert all(link.startswith("#") for link in page.links)
    text = (directory / HTML).read_text(encoding="utf-8")
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {f"#{name}" for name in page.ids}
    outside = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert {address.split("/")[2] for address in outside} <= {"www.w3.org", "purl.org", "creativecommons.org"}


def test_no_two_things_of_the_page_have_one_id(page: Page) -> None:
    assert {name: count for name, count in page.ids.items() if count > 1} == {}
    assert {link[1:] for link in page.links} <= set(page.ids)


def test_the_page_has_every_plot_and_every_connector(page: Page) -> None:
    assert page.tags["svg"] == 5
    for words in (
        "kvferry push",
        "vLLM push",
        "vLLM pull",
        "decode alone",
        "16k tokens",
        "first step",
        "queue",
    ):
        assert words in page.text
    assert "Not measured." not in page.text


def test_the_page_tells_a_requests_hooks_from_an_idle_steps(page: Page) -> None:
    """ms per request, those computing, us per idle step, ms with idle calls; then hook by hook."""
    assert "us per idle step" in page.text
    assert "kvferry push" + "prefill" + "0.300" + "0.150" + "1.0" + "0.332" in page.text
    assert "worker.get_finished" + "0.300" + "0.150" + "64.0" + "4.7" + "0.0" in page.text
    assert "scheduler.build_connector_meta" + "0.000" + "0.000" + "0.0" + "" + "32.0" + "1.0" in page.text


def test_the_page_sets_each_cell_beside_the_better_stock_connector(page: Page, directory: Path) -> None:
    assert "kvferry push, hand-over p50" + "tokens" + "1/s" + "4/s" + "1k" in page.text
    text = (directory / HTML).read_text(encoding="utf-8")
    assert re.search(r'<td class="better" title="vLLM pull, 0\.\d\d to 0\.\d\d">0\.\d\d</td>', text)


def test_the_page_has_steps_with_and_without_transfers(page: Page) -> None:
    for connector, side in (("kvferry push", "prefill"), ("decode alone, no transfer", "decode")):
        assert connector + side + "100" + "5.50" + "0.20" + "0.70" + "2.00" + "10.00" in page.text


def test_the_page_splits_processor_time_by_threads(page: Page) -> None:
    assert "main thread" + "kvferry's threads" + "all" in page.text
    assert "vLLM pull" + "decode" + "20.0" + "30.0" + "50.0" in page.text


def test_the_targets_and_the_verdict_stand_in_the_page(page: Page, written: Written) -> None:
    assert written.verdict in page.text
    for target in written.targets:
        assert target.what in page.text
        assert target.figure in page.text


def test_the_verdict_has_our_figures_beside_the_better_stock_connectors(written: Written) -> None:
    assert written.problems == ()
    pattern = (
        r"kvferry push at 4 x 16k: TTFT p50 \d+ ms \(0\.\d\d x vLLM pull\), "
        r"TTFT p95 \d+ ms \(0\.\d\d x vLLM pull, not judged\), TPOT p50 5\.7 ms \(1\.00 x vLLM push\)"
    )
    assert re.fullmatch(pattern, written.verdict)


def test_page_terminal_and_json_say_where_there_are_too_few_requests(
    page: Page, written: Written, directory: Path
) -> None:
    few = (
        "too few to judge medians at 1 x 1k: 6 requests, at least 12 are needed",
        "too few to judge 95th percentiles at 1 x 1k: 6 requests, at least 120 are needed",
        "too few to judge 95th percentiles at 4 x 16k: 24 requests, at least 120 are needed",
    )
    assert written.remarks[:3] == few
    assert all(f"T{one[1:]}." in page.text for one in few)
    told = json.loads((directory / JSON).read_text())
    assert told["remarks"] == list(written.remarks)
    rows = {(row["connector"], row["rate"]): row for row in told["cells"]}
    alone, busy = rows["ferry-push", 1], rows["ferry-push", 4]
    assert alone["p50_not_judged"] == "6 requests, at least 12 are needed"
    assert not [name for name in alone if name.endswith(("_low", "_high"))]
    assert (busy["p50_not_judged"], busy["p95_not_judged"]) == (None, "24 requests, at least 120 are needed")
    assert busy["ttft_p50_ratio_low"] < busy["ttft_p50_ratio"] < busy["ttft_p50_ratio_high"]
    assert "ttft_p95_ratio" in busy
    assert "ttft_p95_ratio_low" not in busy
    text = (directory / HTML).read_text(encoding="utf-8")
    assert 'class="open" title="vLLM pull, not judged: 6 requests, at least 12 are needed"' in text


def test_page_terminal_and_json_say_how_busy_the_machine_was(
    page: Page, written: Written, directory: Path
) -> None:
    busy = (
        "the machine was not quiet: others took more than 5% of all processors' time in 2 of 14 runs of a "
        "cell, most in repeat 1 of vLLM pull at 4 x 16k, 12%"
    )
    assert written.remarks[3:] == (busy,)
    assert f"T{busy[1:]}." in page.text
    assert "2 cores of Imagined 9000, 24 GiB of memory, Linux 9.9." in page.text
    # Cores of engines, load generator, others, host; the others' share of both cores, and a repeat's most.
    assert "4 x 16k" + "vLLM pull" + "2" + "1.50" + "0.10" + "0.24" + "0.00" + "12.0%" + "12.0%" in page.text
    assert "4 x 16k" + "kvferry push" + "2" + "1.50" + "0.10" + "0.02" + "0.00" + "1.0%" + "1.0%" in page.text
    told = json.loads((directory / JSON).read_text())
    (machine,) = told["machines"]
    assert machine == {
        "processor": "Imagined 9000",
        "cores": 2,
        "memory_bytes": 24 << 30,
        "kernel": "Linux 9.9",
    }
    shares = {row["connector"]: row["others_share_most"] for row in told["cells"] if row["rate"] == 4}
    assert (shares["vllm-pull"], shares["ferry-push"]) == (0.12, 0.01)


def test_the_other_files_are_there(written: Written, directory: Path) -> None:
    assert (directory / PNG).read_bytes().startswith(b"\x89PNG")
    assert json.loads((directory / JSON).read_text())["targets"]
    assert (directory / CSV).read_text().startswith("rate,input_tokens,connector")
    assert not list(directory.glob("*.new"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words: drawing takes seconds."""
    monkeypatch.setattr(report, "draw", lambda comparison, directory: {})


@pytest.mark.usefixtures("undrawn")
def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    world = World(mismatches=2, failing="vllm-push", answers={"vllm-pull": 9})
    written = write_report(made_up(tmp_path, world, SMALL))
    assert written.problems == (
        "8 pages arrived with other content than was sent",
        "30 requests were answered differently by two connectors",
        "4 requests failed, the first under vllm-push: answered 500: unwell",
    )


@pytest.mark.usefixtures("undrawn")
def test_text_from_outside_cannot_break_the_page(tmp_path: Path) -> None:
    made = options(cells=((1, 1024),), engines={"preset": "<script>alert(1)</script>", "step_tokens": 1})
    write_report(made_up(tmp_path, World(), made))
    assert "<script>" not in (tmp_path / HTML).read_text()


def test_one_connector_and_one_cell_are_enough(tmp_path: Path) -> None:
    made = options(cells=((1, 1024),), connectors=("vllm-pull",), baseline=False, repeats=1)
    written = write_report(made_up(tmp_path, World(), made))
    assert written.verdict.startswith("vLLM pull at 1 x 1k: TTFT p50")
    assert written.targets == ()


def test_nothing_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no measured cell yet"):
        write_report(open_results(tmp_path, options()))
