"""The docs are true where a program can tell: names, defaults, flags, links, quoted texts, generated tables.

Goal: whoever adds a setting, a metric, a command or a flag, or changes a text that the docs quote, hears so.
Method: compare the pages with the code in both directions.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.cli.main import COMMANDS
from kvferry.host.settings import KNOWN_KEYS, LIMIT_KEYS, read_settings
from kvferry.router.ground.errors import Cause
from kvferry.router.operation.options import CONFIG, OPTIONS
from kvferry.router.record.metrics import RouterMetrics

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvferry"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
VARIES = "…"


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def section(page: str, title: str) -> str:
    """The text under a heading of the second level."""
    _, found, rest = page.partition(f"\n## {title}\n")
    assert found, f"there is no section {title!r}"
    return rest.partition("\n## ")[0]


def rows(text: str, first: str) -> Iterator[list[str]]:
    """Cells of the table rows of a section whose first column has this title."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first} |"):
            next(lines)
            for row in takewhile(lambda row: row.startswith("|"), lines):
                yield [cell.strip() for cell in row.strip("|").split("|")]


def named(cell: str) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def setting_defaults() -> dict[str, str]:
    """Each setting's default, as its table writes it."""
    settings = read_settings({}, environment={})
    limits = {key: getattr(settings.limits, field) for key, field in LIMIT_KEYS.items()}
    own = {key: getattr(settings, key) for key in KNOWN_KEYS if hasattr(settings, key)}
    special = {"transfer_mode": "push", "allowed_modes": "push,pull", "test_corrupt_block": None}
    # It follows the other host, which is what the table says.
    special["advertise_host"] = "side_channel_host"
    return {key: written(value) for key, value in (limits | own | special).items()}


def written(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(value) if isinstance(value, tuple) else str(value)


METRIC_MODULES = (("host", "metrics.py"), ("connector", "stats.py"))


def engine_metrics() -> set[str]:
    """The names under which an engine exposes its metrics; read, because importing them needs vLLM."""
    texts = [(SOURCE / part / name).read_text("utf-8") for part, name in METRIC_MODULES]
    names: dict[str, str] = {}
    counters: set[str] = set()
    for node in (node for text in texts for node in ast.parse(text).body):
        match node:
            case ast.Assign(targets=[ast.Name(constant)], value=ast.Constant(str(name))):
                if name.startswith("kvferry_"):
                    names[constant] = name
            case ast.AnnAssign(target=ast.Name("COUNTER_LABELS"), value=ast.Dict(keys)):
                counters = {key.id for key in keys if isinstance(key, ast.Name)}
    return {name + "_total" * (constant in counters) for constant, name in names.items()}


def router_metrics() -> set[str]:
    found = RouterMetrics().registry.collect()
    return {metric.name + "_total" * (metric.type == "counter") for metric in found}


def router_flags() -> dict[str, object]:
    """Each flag's default."""
    return {CONFIG: None} | {option.flag: option.default for option in OPTIONS}


def anchors(page: Path) -> set[str]:
    """GitHub's ids of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def protocol_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("protocol_tables", ROOT / "scripts" / "protocol_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Every text in a module; what an f-string or a log message fills in is `VARIES`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else VARIES for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sdg]", VARIES, node.value)


def texts() -> list[str]:
    return [
        text
        for path in SOURCE.rglob("*.py")
        for text in texts_of(ast.parse(path.read_text(encoding="utf-8")))
    ]


def quotes(text: str, quoted: str) -> bool:
    """Whether every fixed piece of a quotation stands in a text, in order."""
    at = 0
    for piece in filter(str.strip, quoted.split(VARIES)):
        found = text.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


# --- settings, metrics, commands, flags, causes --------------------------------------------------


def test_the_settings_table_is_the_code() -> None:
    table = {
        named(key)[0]: ",".join(named(default)) or default
        for key, default, _ in rows(section(OPERATIONS, "Settings"), "key")
    }
    assert table == setting_defaults()
    assert set(table) == set(KNOWN_KEYS)


def test_the_metrics_tables_are_the_code() -> None:
    table = [named(cells[0])[0] for cells in rows(section(OPERATIONS, "Metrics"), "metric")]
    assert len(table) == len(set(table))
    assert set(table) == engine_metrics() | router_metrics()


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_no_page_names_an_unknown_metric(path: Path) -> None:
    known = engine_metrics() | router_metrics()
    words = set(re.findall(r"kvferry_\w+", path.read_text(encoding="utf-8")))
    # A key of kv_transfer_params, and vLLM's facts of a cache.
    assert words - known <= {"kvferry_incarnation", "kvferry_version"}


def test_the_commands_table_is_the_code_and_no_page_names_another_one() -> None:
    table = [named(cells[0])[0] for cells in rows(section(OPERATIONS, "Commands"), "command")]
    assert table == [f"kvferry {name}" for name in COMMANDS]
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        blocks = "".join(re.findall(r"```\n.*?```", text, flags=re.DOTALL))
        called = re.findall(r"^kvferry ([a-z-]+)", blocks, flags=re.MULTILINE)
        assert set(called + re.findall(r"`kvferry ([a-z-]+)", text)) <= set(COMMANDS), page_id(path)


def test_the_router_flags_table_is_the_code() -> None:
    table = {named(cells[0])[0]: cells[1] for cells in rows(section(OPERATIONS, "The router"), "flag")}
    flags = router_flags()
    assert set(table) == set(flags)
    for flag, default in table.items():
        value = flags[flag]
        if value in (None, ""):
            assert default in {"none", "required"}, flag
        else:
            assert named(default) == [written(value)], flag


def test_the_causes_table_is_the_code() -> None:
    table = [name for cells in rows(section(OPERATIONS, "The router"), "cause") for name in named(cells[0])]
    assert sorted(table) == sorted(cause.value for cause in Cause)


# --- links, quotations, generated parts ----------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


def test_troubleshooting_quotes_texts_that_the_code_says() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `([^`]+)`\n\n(.+)$", page, flags=re.MULTILINE)
    ours = [quoted for quoted, below in headings if not re.match(r"This is \w+'s text", below)]
    assert len(ours) > 30
    known = texts()
    assert [quoted for quoted in ours if not any(quotes(text, quoted) for text in known)] == []


def test_a_text_that_nobody_says_is_noticed() -> None:
    known = ["port … of … is taken; set … to a free port, or to 0"]
    assert quotes(known[0], "port … of … is taken")
    assert not quotes(known[0], "port … of … is busy")
    assert not quotes(known[0], "is taken … port")


def test_the_generated_parts_of_the_protocol_page_are_current() -> None:
    tables = protocol_tables()
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.current(page) == page, "run scripts/protocol_tables.py"


def test_a_generated_part_that_is_out_of_date_is_noticed() -> None:
    tables = protocol_tables()
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.current(page.replace("| computing |", "| queued |", 1)) == page
    with pytest.raises(ValueError, match="machines"):
        tables.current(page.replace("<!-- end machines -->", ""))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/testing.md"])
def test_who_has_run_make_is_told_where_the_command_is(name: str) -> None:
    """It is not on the path of a shell, and the pages write only its name."""
    page = (ROOT / name).read_text(encoding="utf-8")
    before, found, rest = page.partition("`.venv/bin/kvferry`")
    assert found
    assert "make" in before
    assert "`source .venv/bin/activate`" in rest[:120]
    assert re.search(r"^ *kvferry [a-z]+ --", before, re.MULTILINE) is None, "before the first that needs it"


def test_the_set_up_ends_with_where_the_command_is() -> None:
    last = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8").splitlines()[-1]
    assert last.startswith('echo "The command is $venv/bin/kvferry; ')
    assert "source $venv/bin/activate" in last


def test_a_round_of_the_soak_takes_as_long_in_the_help_as_on_the_page() -> None:
    words = "A round takes about a minute, most of it the engine's start"
    for path in (ROOT / "docs" / "testing.md", SOURCE / "cli" / "soak.py"):
        assert words in " ".join(path.read_text(encoding="utf-8").split())
