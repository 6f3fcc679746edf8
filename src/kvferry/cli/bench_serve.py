"""`kvferry bench serve`: one load against one OpenAI-compatible endpoint.

Metrics, in milliseconds over the requests that were answered in full:
  ttft  from the moment at which a request was due to its first token
  tpot  (e2el - ttft) / (tokens - 1), with the tokens that the server counts in `usage`; a request of one
        token has none, and meets a --goodput tpot
  itl   between two chunks of a stream, which may hold several tokens; many samples per request
  e2el  from the moment at which a request was due to the end of its answer's stream
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.cli.progress import Progress
from kvferry.errors import UsageError

if TYPE_CHECKING:
    from kvferry.bench.records import Load
    from kvferry.bench.serve import ServeOptions

SUMMARY = "load one OpenAI-compatible endpoint and report TTFT, TPOT and goodput; needs no vLLM"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The endpoint, the load, and what to report."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--base-url", required=True, metavar="URL", help="where the server answers, such as http://HOST:8000")
    add("--model", required=True, help="the model's name there")
    add(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="R",
        help="requests per second, at moments that the seed draws; inf sends without waiting (default)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1 is a Poisson process, less comes in bursts, more is more even (default: %(default)s)",
    )
    add("--max-concurrency", type=int, metavar="N", help="requests in flight; the others wait")
    add("--num-prompts", type=int, default=100, metavar="N", help="requests (default: %(default)s)")
    add("--random-input-len", type=int, default=1024, metavar="N", help="tokens (default: %(default)s)")
    add("--random-output-len", type=int, default=128, metavar="N", help="tokens (default: %(default)s)")
    add("--prompt-kind", choices=("tokens", "text"), default="tokens", help="default: %(default)s")
    add(
        "--vocabulary",
        default="1000:30000",
        metavar="FIRST:END",
        help="token ids of prompts, within the model's vocabulary (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of prompts and moments (default: %(default)s)")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="vLLM's key (default: on)")
    add("--extra-body", default="{}", metavar="JSON", help="more keys for every request's body")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="what a good request keeps, such as ttft:500 tpot:20; of ttft, tpot, e2el",
    )
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="NAMES",
        help="metrics to report (default: %(default)s)",
    )
    add(
        "--request-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="after so long a request is given up and has failed (default: %(default)s)",
    )
    add("--save-result", type=Path, metavar="FILE", help="write options, figures and every request as JSON")


def run(namespace: argparse.Namespace) -> int:
    """Run the load and report; 1 when a request failed."""
    from kvferry.bench.metrics import parse_metrics  # noqa: PLC0415 - needs numpy
    from kvferry.bench.serve import result, serve  # noqa: PLC0415

    options = read_options(namespace)
    metrics = parse_metrics(namespace.percentile_metrics)
    file = namespace.save_result
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--save-result: there is no directory {file.parent}; make it first")
    with Progress(options.prompts, "requests") as progress:
        load = asyncio.run(serve(options, lambda record: progress.advance()))
    told = result(options, load, metrics)
    if file is not None:
        file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(load, told)))
    return 1 if load.failures else 0


def read_options(namespace: argparse.Namespace) -> ServeOptions:
    """Validate the arguments.

    Raises:
        UsageError: names the argument and what to do.
    """
    from kvferry.bench.load import LoadLimits  # noqa: PLC0415 - needs numpy
    from kvferry.bench.metrics import parse_objectives  # noqa: PLC0415
    from kvferry.bench.serve import ServeOptions  # noqa: PLC0415

    extra: dict[str, Any] = {"ignore_eos": True} if namespace.ignore_eos else {}
    headers = {"Authorization": f"Bearer {namespace.api_key}"} if namespace.api_key else {}
    return ServeOptions(
        url=namespace.base_url,
        model=namespace.model,
        rate=namespace.request_rate,
        burstiness=namespace.burstiness,
        prompts=namespace.num_prompts,
        input_tokens=namespace.random_input_len,
        output_tokens=namespace.random_output_len,
        kind=namespace.prompt_kind,
        vocabulary=read_vocabulary(namespace.vocabulary),
        seed=namespace.seed,
        limits=LoadLimits(
            concurrency_max=namespace.max_concurrency, request_seconds_max=namespace.request_seconds
        ),
        objectives=parse_objectives(namespace.goodput),
        extra=extra | read_object("--extra-body", namespace.extra_body),
        headers=headers,
    )


def read_vocabulary(text: str) -> tuple[int, int]:
    """Read `FIRST:END`; whether it is a range is checked where it is used."""
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal()):
        raise UsageError(f"--vocabulary must be FIRST:END, such as 1000:30000, not {text!r}")
    return int(first), int(end)


def read_object(option: str, text: str) -> dict[str, Any]:
    """Read a JSON object from the command line."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object, such as '{{\"top_k\": 1}}'")
    return value


def lines(load: Load, told: dict[str, Any]) -> list[str]:
    """The report: failures by kind, the table of metrics, and one line with the figures."""
    totals, figures = told["totals"], told["milliseconds"]
    found = _failures(load)
    if figures:
        columns = ("mean", "p50", "p90", "p95", "p99")
        found.append(f"{'ms':<8}" + "".join(f"{column:>11}" for column in columns) + f"{'samples':>9}")
        found += [
            f"{name:<8}"
            + "".join(f"{one[column]:>11.2f}" for column in columns)
            + f"{told['samples'][name]:>9}"
            for name, one in figures.items()
        ]
        found += [*_without_tpot(load, told), ""]
    good = totals["goodput_per_second"]
    parts = [
        f"{totals['requests'] - totals['failed']} of {totals['requests']} requests answered in "
        f"{totals['seconds']:.1f} s",
        f"{totals['requests_per_second']:.2f} requests/s",
        f"{totals['completion_tokens_per_second']:.1f} tokens/s",
        *([f"goodput {good:.2f} requests/s"] if good is not None else []),
        *([f"TTFT p50 {figures['ttft']['p50']:.1f} ms"] if "ttft" in figures else []),
    ]
    return [*found, "; ".join(parts)]


def _without_tpot(load: Load, told: dict[str, Any]) -> list[str]:
    """Why answered requests are not in `tpot`, where that was asked for."""
    if "tpot" not in told["metrics"]:
        return []
    answered = [record for record in load.records if record.succeeded]
    uncounted = sum(record.completion_tokens == 0 for record in answered)
    single = sum(record.completion_tokens == 1 for record in answered)
    reasons = {
        f"{single} requests had one token, and none after it": single,
        f"of {uncounted} the server did not count the tokens (no `usage` in the stream)": uncounted,
    }
    return [f"not in tpot: {reason}" for reason, count in reasons.items() if count]


def _failures(load: Load) -> list[str]:
    """Each kind once, with its first example: those that differ in numbers only are of one kind."""
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for record in load.failures:
        kind = re.sub(r"\d+", "0", str(record.error))
        counts[kind] = counts.get(kind, 0) + 1
        examples.setdefault(kind, str(record.error))
    lines = [
        f"failed {count} x: {examples[kind]}"
        for kind, count in sorted(counts.items(), key=lambda one: -one[1])
    ]
    if any("vocabulary" in error for error in examples.values()):
        lines.append("this model has fewer token ids: give those of the prompts with --vocabulary FIRST:END")
    return lines
