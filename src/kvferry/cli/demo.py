"""Show that answers through a prefill and a decode engine equal those of one engine, token for token.

Makes a tiny random model, starts one prefill and one decode engine behind the router, and one engine alone.
The same requests go to both, one after the other. The exit code is 0 only if every answer is equal, the bytes
moved are those that the cache's geometry says, and the decode engine computed at most one block per prompt
itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvferry.cli.demo_cases import Case, demo_cases, expected_blocks, request_body
from kvferry.cli.demo_report import Outcome, table, verdict
from kvferry.cli.engines import Deployment, Endpoints, bring_up
from kvferry.cli.fleet import Fleet, termination_interrupts
from kvferry.cli.requests import Answer, RequestError, ask
from kvferry.cli.scrape import Counters, read_block_tokens, read_counters
from kvferry.cli.tiny_model import write_tiny_model
from kvferry.errors import KvferryError
from kvferry.handoff import TransferMode

MODEL_NAME = "tiny"
CHUNK_TOKENS = 512
CONTEXT_TOKENS = 8192
REQUEST_SECONDS_MAX = 120.0
# Engines report a transfer's bytes with the next statistics of a step, which may follow the answer.
SETTLE_SECONDS_MAX = 10.0
SETTLE_INTERVAL_SECONDS = 0.1
TESTING_VARIABLE = "KVFERRY_TESTING"


class DemoError(KvferryError):
    """The demo ran and something was not as promised."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where logs go, and the oracle's own test."""
    parser.add_argument(
        "--log-dir", type=Path, default=Path("demo-output"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of model and prompts (default: %(default)s)")
    parser.add_argument(
        "--startup-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="how long engines may take to load (default: %(default)s)",
    )
    parser.add_argument(
        "--transfer-mode",
        choices=("push", "pull"),
        default="push",
        help="how KV comes to the decode engine (default: %(default)s)",
    )
    parser.add_argument(
        "--corrupt",
        action="store_true",
        help="damage one KV block of every prompt on its way: the demo must then fail",
    )


def run(namespace: argparse.Namespace) -> int:
    """Run the demo and print its table."""
    with termination_interrupts(), _tiny_model(namespace.seed) as model, Fleet(report=_say) as fleet:
        mode: TransferMode = namespace.transfer_mode
        deployment = demo_deployment(model, namespace.log_dir, mode, corrupt=namespace.corrupt)
        endpoints = bring_up(fleet, deployment, startup_seconds=namespace.startup_seconds)
        _say("")
        outcomes = compare(endpoints, model, mode, seed=namespace.seed)
        _say(table(outcomes))
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    for problem in problems:
        _say(problem)
    _say(f"\n{verdict(outcomes)}")
    return 1 if problems else 0


def demo_deployment(
    model: Path, logs: Path, mode: TransferMode = "push", *, corrupt: bool = False
) -> Deployment:
    """One prefill engine, one decode engine and the reference; a long prompt takes several chunks."""
    arguments = (
        *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
        *("--max-model-len", str(CONTEXT_TOKENS)),
        *("--max-num-seqs", "16"),
        *("--dtype", "float32"),
    )
    return Deployment(
        model=str(model),
        served_name=MODEL_NAME,
        reference=True,
        prefill_arguments=arguments,
        decode_arguments=arguments,
        router_arguments=("--transfer-mode", mode),
        logs=logs,
        prefill_config={"test_corrupt_block": 0} if corrupt else {},
        environment={TESTING_VARIABLE: "1"} if corrupt else {},
    )


def compare(endpoints: Endpoints, model: Path, mode: TransferMode = "push", *, seed: int) -> list[Outcome]:
    """Send every case to both sides, one at a time.

    Raises:
        DemoError: the engines do not say what the comparison needs.
    """
    if endpoints.reference is None:
        raise DemoError("there is no reference engine to compare with")
    block_tokens = read_block_tokens(endpoints.prefill[0])
    if not block_tokens:
        raise DemoError(f"the prefill engine's /metrics does not tell its block size: {endpoints.prefill[0]}")
    comparison = _Comparison(
        endpoints,
        endpoints.reference,
        mode,
        block_tokens,
        block_tokens * token_bytes(model / "config.json"),
    )
    cases = demo_cases(block_tokens=block_tokens, chunk_tokens=CHUNK_TOKENS, seed=seed)
    return [comparison.outcome(case) for case in cases]


def token_bytes(config: Path) -> int:
    """KV bytes of one token of a model in float32: key and value, of every layer and KV head."""
    shape = json.loads(config.read_text(encoding="utf-8"))
    return int(2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 4)


@dataclass(frozen=True, slots=True)
class _Comparison:
    endpoints: Endpoints
    reference: str
    mode: TransferMode
    block_tokens: int
    block_bytes: int

    def outcome(self, case: Case) -> Outcome:
        expected = ask(self.reference, case.path, request_body(case, MODEL_NAME), seconds=REQUEST_SECONDS_MAX)
        lengths = case.prompt_lengths(expected.prompt_tokens)
        prefill_before, decode_before = self._counters()
        answer = self._through_router(case)

        def wanted_bytes(decode: Counters) -> int:
            return self.block_bytes * expected_blocks(
                lengths,
                answers=case.answers,
                cached_tokens=decode.tokens_cached,
                block_tokens=self.block_tokens,
            )

        def settled(prefill: Counters, decode: Counters) -> bool:
            all_counted = decode.prompt_tokens == sum(lengths) * case.answers
            return all_counted and self._moved(prefill, decode).bytes >= wanted_bytes(decode)

        prefill, decode = self._settled(prefill_before, decode_before, settled)
        return Outcome(
            name=case.name,
            prompt_tokens=sum(lengths),
            prompts=len(lengths),
            equal=answer is not None and same(answer, expected),
            mode=self.mode,
            moved_bytes=self._moved(prefill, decode).bytes,
            expected_bytes=wanted_bytes(decode),
            early_bytes=prefill.bytes_early,
            computed_tokens=decode.tokens_computed,
            computed_tokens_max=len(lengths) * case.answers * self.block_tokens,
            first_token_seconds=answer.first_token_seconds if answer else None,
            reference_first_token_seconds=expected.first_token_seconds,
        )

    def _moved(self, prefill: Counters, decode: Counters) -> Counters:
        """The counters of the engine that moves the bytes."""
        return decode if self.mode == "pull" else prefill

    def _through_router(self, case: Case) -> Answer | None:
        try:
            return ask(
                self.endpoints.router, case.path, request_body(case, MODEL_NAME), seconds=REQUEST_SECONDS_MAX
            )
        except RequestError as error:
            _say(f"{case.name}: {error}")
            return None

    def _counters(self) -> tuple[Counters, Counters]:
        return read_counters(self.endpoints.prefill[0]), read_counters(self.endpoints.decode[0])

    def _settled(
        self,
        prefill_before: Counters,
        decode_before: Counters,
        settled: Callable[[Counters, Counters], bool],
    ) -> tuple[Counters, Counters]:
        """What both engines have counted since, once it is `settled` or will not be."""
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while True:
            prefill, decode = self._counters()
            since = (prefill - prefill_before, decode - decode_before)
            if settled(*since) or time.monotonic() > deadline:
                return since
            time.sleep(SETTLE_INTERVAL_SECONDS)


def same(answer: Answer, expected: Answer) -> bool:
    """Whether two answers are equal token for token, and neither is empty."""
    return (
        bool(answer.tokens)
        and all(answer.tokens)
        and answer.tokens == expected.tokens
        and answer.texts == expected.texts
        and answer.finish_reasons == expected.finish_reasons
    )


@contextlib.contextmanager
def _tiny_model(seed: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as directory:
        model = Path(directory) / MODEL_NAME
        write_tiny_model(model, seed=seed)
        yield model


def _say(line: str) -> None:
    print(line, flush=True)
