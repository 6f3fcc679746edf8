"""Kill and stop engines under load, again and again, and check that nothing is lost.

Starts prefill and decode engines behind the router, and one engine without kvferry to compare with. Clients
keep it busy: random prompts, short and long, streamed or not, with one answer or two, and some hang up early.
Round by round one engine is killed (SIGKILL) or stopped for a while (SIGSTOP, SIGCONT) at a named stage:

  waiting   D waits for KV of which P knows nothing yet
  half      P has pushed a part of a prompt's chunks and computes the others
  held      P has finished a prompt and holds its KV; D has not asked for it yet
  decoding  D has the KV and has sent the client its first tokens
  idle      no request runs, and every table is empty

A killed engine is started again at the same address under the same id. While the only D is away its clients
are refused, and wait until the router has one again. After each round it is checked that no answer was wrong
(tokens equal to those of the engine alone), every request was answered or told an error within its bound, a
fault of P failed no request, one of D only while D was away, nobody else ended, transfers are pushed again,
all blocks are free and all tables are empty. In the end, that no survivor's memory grew: for that an engine
has to live through 6 rounds, which 20 rounds allow for. The last line says how many answers were compared
and whose memory was judged; the exit code is 0 only if all that was judged holds. A round takes about a
minute, most of it the engine's start.

  kvferry soak --rounds 4             both sides and both faults, at four stages
  kvferry soak --rounds 20            every stage, side and fault once
  kvferry soak --minutes 20 --seed 7  for as long as asked
  kvferry soak --minutes 60 --prefill 2 --decode 2 --model ./model

Faults, stages, lengths and prompts follow from the seed; when they happen depends on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvferry.cli.engines import Deployment, Endpoints, bring_up
from kvferry.cli.fleet import Fleet, termination_interrupts
from kvferry.cli.soak_judge import Bounds, memory_growth, memory_problems
from kvferry.cli.soak_load import Addresses, Load
from kvferry.cli.soak_plan import ROUNDS_WHOLE, Mix, plan_rounds
from kvferry.cli.soak_report import INDENT, summary
from kvferry.cli.soak_rounds import Rounds
from kvferry.cli.tiny_model import write_tiny_model
from kvferry.cli.up import checked_model
from kvferry.errors import UsageError

MODEL_NAME = "soaked"
MINUTES_DEFAULT = 20.0
CHUNK_TOKENS = 512
CONTEXT_TOKENS_MAX = 16384
CONTEXT_TOKENS_MIN = 4096
CACHE_BLOCKS = 640
"""A small cache is touched in full by the first round, and does not look like a leak afterwards."""
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long, with which seed, and on what."""
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help=f"start no round after so long (default: {MINUTES_DEFAULT:g}, or no limit with --rounds)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"end after so many rounds; to judge memory takes {ROUNDS_WHOLE}",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: %(default)s")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a model whose float32 answers do not depend on what else runs (default: a tiny random one)",
    )
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill engines (default: 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode engines (default: 1)")
    parser.add_argument(
        "--log-dir", type=Path, default=Path("soak-output"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--startup-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="how long engines may take to load, also after a kill (default: %(default)s)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Run the rounds, tell of each what happened, then the summary."""
    if namespace.seed < 0:
        raise UsageError(f"--seed must not be negative, {namespace.seed} is")
    goes_on = duration(namespace)
    progress = _Progress()
    with termination_interrupts():
        try:
            return _soak(namespace, goes_on, progress)
        except KeyboardInterrupt:
            _say(f"INTERRUPTED: {progress.stage}")
            return INTERRUPTED


def _soak(
    namespace: argparse.Namespace, goes_on: Callable[[], Callable[[], bool]], progress: _Progress
) -> int:
    with _model(namespace) as model, Fleet(report=progress) as fleet:
        context = context_tokens(model)
        deployment = soak_deployment(namespace, model, context)
        endpoints = bring_up(fleet, deployment, startup_seconds=namespace.startup_seconds)
        bounds = default_bounds(endpoints)
        _say(f"\nseed {namespace.seed}; {bounds.text}\n")
        progress.indent = INDENT
        # Each from its own, or what a round draws would depend on the load's pace.
        mix, victims = (Mix(f"{who} {namespace.seed}", context) for who in ("clients", "victims"))
        with Load(_addresses(endpoints), mix, bound_seconds=bounds.request_seconds) as load:
            rounds = Rounds(
                fleet,
                endpoints,
                load,
                victims,
                bounds=bounds,
                startup_seconds=namespace.startup_seconds,
                report=_say,
                count=namespace.rounds,
            )
            plans = itertools.islice(plan_rounds(namespace.seed), namespace.rounds)
            interrupted = _strike(lambda: rounds.strike_all(plans, goes_on()))
        code = _conclude(rounds, interrupted=interrupted)
        progress.stage = "while the servers were stopped; the verdict on the rounds is above"
        return code


def _strike(work: Callable[[], None]) -> bool:
    """Whether an interrupt ended it."""
    try:
        work()
    except KeyboardInterrupt:
        return True
    return False


def _conclude(rounds: Rounds, *, interrupted: bool) -> int:
    findings = rounds.findings
    problems = [*findings.problems, *memory_problems(memory_growth(findings.rounds))]
    if not findings.rounds and not problems and not interrupted:
        problems.append("no round was finished")
    _say("\n".join(["", *summary(findings.rounds, problems, interrupted=interrupted)]))
    if problems:
        return 1
    return INTERRUPTED if interrupted else 0


def duration(namespace: argparse.Namespace) -> Callable[[], Callable[[], bool]]:
    """Starts the clock when called, and gives what tells whether another round may start.

    Raises:
        UsageError: an argument is out of range.
    """
    minutes, rounds = namespace.minutes, namespace.rounds
    if minutes is None and rounds is None:
        minutes = MINUTES_DEFAULT
    if minutes is not None and not 0 < minutes < math.inf:
        raise UsageError(f"--minutes must be greater than 0, not {minutes:g}, and have an end")
    if rounds is not None and rounds < 1:
        raise UsageError(f"--rounds must be at least 1, not {rounds}")

    def start() -> Callable[[], bool]:
        end = None if minutes is None else time.monotonic() + minutes * 60
        return lambda: end is None or time.monotonic() < end

    return start


def default_bounds(endpoints: Endpoints) -> Bounds:
    """The bounds that follow from the default settings of connector and router."""
    # The engines' settings need packages that the help does not.
    from kvferry.host.settings import read_settings  # noqa: PLC0415
    from kvferry.router.ground.settings import RouterSettings  # noqa: PLC0415

    connector = read_settings({}, environment={})
    router = RouterSettings(prefill=endpoints.prefill, decode=endpoints.decode)
    return Bounds(
        limits=connector.limits,
        retry_bound_seconds=connector.retry_bound_seconds,
        decode_recovery_seconds=router.decode_recovery_seconds,
        health_seconds=router.health_interval_seconds + router.health_timeout_seconds,
        probe_seconds=router.probe_timeout_seconds,
    )


def soak_deployment(namespace: argparse.Namespace, model: Path, context: int) -> Deployment:
    """Small chunks and a small cache, so that stages are wide and blocks are soon used again."""
    arguments = (
        *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
        *("--max-model-len", str(context)),
        *("--max-num-seqs", "16"),
        *("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
        *("--dtype", "float32"),
    )
    return Deployment(
        model=str(model),
        served_name=MODEL_NAME,
        prefill=namespace.prefill,
        decode=namespace.decode,
        reference=True,
        prefill_arguments=arguments,
        decode_arguments=arguments,
        logs=namespace.log_dir,
    )


def context_tokens(model: Path) -> int:
    """The longest context that model and soak allow.

    Raises:
        UsageError: the model's is too short for a prompt of several chunks.
    """
    shape = json.loads((model / "config.json").read_text(encoding="utf-8"))
    longest = min(int(shape.get("max_position_embeddings", CONTEXT_TOKENS_MAX)), CONTEXT_TOKENS_MAX)
    if longest < CONTEXT_TOKENS_MIN:
        raise UsageError(
            f"--model {model} has a context of {longest} tokens; the soak needs {CONTEXT_TOKENS_MIN}"
        )
    return longest


@contextlib.contextmanager
def _model(namespace: argparse.Namespace) -> Iterator[Path]:
    if namespace.model is not None:
        path = Path(checked_model(namespace.model))
        if not path.is_dir():
            raise UsageError(f"--model {namespace.model} must be a directory with a model")
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="kvferry-soak-") as directory:
        model = Path(directory) / MODEL_NAME
        write_tiny_model(model, seed=namespace.seed)
        yield model


def _addresses(endpoints: Endpoints) -> Addresses:
    assert endpoints.reference is not None
    return Addresses(endpoints.router, endpoints.reference, MODEL_NAME)


@dataclass(slots=True)
class _Progress:
    """What the fleet reports; while rounds run, it belongs to one of them."""

    indent: str = ""
    stage: str = "before the first round, while the servers were started"
    """When an interrupt ends the whole command, and not only its rounds."""

    def __call__(self, line: str) -> None:
        _say(self.indent + line)


def _say(line: str) -> None:
    print(line, flush=True)
