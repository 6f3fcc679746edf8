"""What the log of a server that ended says about why, and which of its lines say nothing about it."""

from __future__ import annotations

import re
from collections.abc import Iterable

# What vLLM writes before a line: the process, then the level, the time and the place in its source.
_PREFIX = r"(?:\([^()]*\bpid=\d+\)\s*)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]*\]\s*)?"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_OWN_ERROR = re.compile(r"kvferry\.errors\.\w+.*")
_EXCEPTION = re.compile(rf"{_PREFIX}((?:\w+\.)*[A-Z]\w*(?:Error|Exception): \S.*)")
# What argparse says of an option that a program does not know.
_WRONG_USE = re.compile(rf"{_PREFIX}(\S+: error: \S.*)")
# The parent's word for "my child has failed": what the child said is the cause.
_HEARSAY = re.compile(r"Engine core initialization failed|EngineDeadError|[Ss]ee root cause above")
_NOISE = re.compile(
    rf"{_PREFIX}(?:nanobind: |- leaked |- \.\.\. skipped remainder|See https://nanobind\.|Route: )"
    r'|.*"GET /health HTTP/'
)


def cause(lines: Iterable[str]) -> str | None:
    """The error that most likely ended the server, without vLLM's prefix; None if no line shows one.

    The last of kvferry's own errors goes before the last of any other kind, and that before one that only
    reports another process's failure.
    """
    own = other = hearsay = None
    for line in lines:
        text = _COLOR.sub("", line).strip()
        if match := _OWN_ERROR.search(text):
            own = match[0]
        elif match := _EXCEPTION.match(text) or _WRONG_USE.match(text):
            if _HEARSAY.search(text):
                hearsay = match[1]
            else:
                other = match[1]
    return own or other or hearsay


def without_noise(lines: Iterable[str]) -> list[str]:
    """The lines except those of every start, every health check and every abrupt end."""
    return [line for line in lines if not _NOISE.match(_COLOR.sub("", line).strip())]
