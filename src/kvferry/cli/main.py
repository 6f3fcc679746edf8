"""The `kvferry` command: finds the module of a command, and turns errors into advice and exit codes.

Exit codes: 0 done, 1 the command ran and failed, 2 wrong use, 130 interrupted, 141 nobody reads what it says.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import kvferry
from kvferry.errors import KvferryError, UsageError

PURPOSE = "Carry a request's KV cache from the vLLM engine that prefilled it to the one that decodes it."

# Name -> module and summary. Each module offers `add_arguments(parser)` and `run(namespace) -> int`; only the
# one that is called is imported, so that help and errors come at once.
COMMANDS = {
    "up": ("kvferry.cli.up", "start prefill and decode engines and the router on this machine"),
    "router": ("kvferry.cli.router", "serve one OpenAI-compatible endpoint over prefill and decode engines"),
    "demo": (
        "kvferry.cli.demo",
        "compare a prefill and a decode engine with one engine alone, token for token",
    ),
    "selftest": (
        "kvferry.cli.selftest",
        "move KV between two processes' memory, CPU or GPU, and verify every byte",
    ),
    "soak": ("kvferry.cli.soak", "kill and stop engines under load, and check that nothing is lost"),
    "simulate": (
        "kvferry.cli.simulate",
        "prove the protocol in made-up histories with faults, and try whether planted faults are found",
    ),
    "bench": ("kvferry.cli.bench", "measure one part of kvferry, e.g. what its hooks cost an engine"),
    "tiny-model": ("kvferry.cli.tiny_model", "write a small random model for tests and demos"),
    "emulated-model": (
        "kvferry.cli.emulated",
        "write the model of an emulated engine, and say how to start engines with it",
    ),
    "version": ("kvferry.cli.version", "print the versions of kvferry, vLLM, NIXL and torch"),
}

VERDICTS = ("simulate", "soak")
"""Commands whose last line says how they ended, whenever that was."""
INTERRUPTED = 130

EXTRAS = {"numpy": "sim", "matplotlib": "bench"} | dict.fromkeys(("vllm", "torch", "nixl", "zmq"), "vllm")
"""Modules that a plain installation lacks, and the extra that brings each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (the process's own by default) and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(given)
        # Here, where an error can be told; at exit it could not.
        sys.stdout.flush()
    except UsageError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return 2
    except KvferryError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _say_interrupted(given)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever reads our output has enough, as `head` has.
        _say_no_more()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or "the output"
        print(f"kvferry: {where} could not be written: {error.strerror}; make room first", file=sys.stderr)
        _say_no_more()
        return 1
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        install = f"pip install '.[{extra}]' in a checkout of kvferry"
        print(f"kvferry: this command needs {error.name}: {install}", file=sys.stderr)
        return 2
    else:
        return code


def _say_interrupted(arguments: list[str]) -> None:
    """The last line of a command that always has one; it may have been interrupted while it was imported."""
    if arguments[:1] and arguments[0] in VERDICTS:
        with contextlib.suppress(OSError):
            print("INTERRUPTED: before there was a result", flush=True)


def _say_no_more() -> None:
    """Nothing may be written at exit either."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    chosen = _top_parser().parse_args(arguments[:1])
    path, summary = COMMANDS[chosen.command]
    module = importlib.import_module(path)
    parser = argparse.ArgumentParser(
        prog=f"kvferry {chosen.command}",
        description=module.__doc__ or summary,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An option that is added later must not change what a script says.
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments[1:])))


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="kvferry",
        usage="kvferry COMMAND [options]",
        description=f"{PURPOSE}\n\ncommands:\n{listed}",
        epilog="`kvferry COMMAND --help` shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvferry {kvferry.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands above")
    return parser


if __name__ == "__main__":
    sys.exit(main())
