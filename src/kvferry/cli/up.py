"""Start prefill and decode engines and the router on this machine.

Every engine is a vLLM API server on a free port of the loopback interface; each server's log goes to a file.
All of them stop on Ctrl-C or SIGTERM, and when one of them dies.

  kvferry up --model ./tiny --prefill 1 --decode 1
  kvferry up --model Qwen/Qwen3-32B --prefill 2 --decode 1 --prefill-args '--tensor-parallel-size 2'
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from kvferry.cli.engines import Deployment, Endpoints, bring_up
from kvferry.cli.fleet import Fleet, termination_interrupts
from kvferry.errors import UsageError
from kvferry.router.ground.settings import TRANSFER_MODES

STARTUP_SECONDS_DEFAULT = 600.0
# An engine elsewhere than where we look for it would be waited for in vain, and one of another name or role
# would not serve what the router sends.
OWN_ENGINE_OPTIONS = frozenset(("--host", "--port", "--model", "--served-model-name", "--kv-transfer-config"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The deployment's arguments."""
    parser.add_argument("--model", required=True, help="a model's directory, or its name on the model hub")
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the last part of --model")
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill engines (default: 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode engines (default: 1)")
    parser.add_argument(
        "--prefill-args",
        default="",
        metavar="'ARGS'",
        help="more vLLM arguments for prefill engines; write --prefill-args='--option' for a single one",
    )
    parser.add_argument("--decode-args", default="", metavar="'ARGS'", help="the same for decode engines")
    parser.add_argument(
        "--transfer-mode",
        choices=TRANSFER_MODES,
        help="how KV comes to decode engines (default: the router's, push)",
    )
    parser.add_argument(
        "--router-args",
        default="",
        metavar="'ARGS'",
        help="more `kvferry router` arguments; write --router-args='--option' for a single one",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where the router listens (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--log-dir", type=Path, default=Path(".kvferry/logs"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--kv-cache-gib", type=int, metavar="GIB", help="KV cache of each engine (default: vLLM's; CPU: 1)"
    )
    parser.add_argument(
        "--gpus-per-engine",
        type=int,
        metavar="N",
        help="accelerators of each engine, handed out in order (default: its number of ranks)",
    )
    parser.add_argument(
        "--accelerators",
        nargs="+",
        default=[],
        metavar="IDS",
        help="instead: ids such as 0,1 for each engine, prefill engines first, the reference engine last",
    )
    parser.add_argument(
        "--reference", action="store_true", help="also start one engine without kvferry, to compare with"
    )
    parser.add_argument(
        "--both-directions",
        action="store_true",
        help="decode engines keep a turn's KV, and prefill engines receive it with the next turn",
    )
    parser.add_argument(
        "--startup-seconds",
        type=float,
        default=STARTUP_SECONDS_DEFAULT,
        metavar="S",
        help="how long engines may take to load (default: %(default)s)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Start everything, say where it answers, and stay until interrupted."""
    deployment = read_deployment(namespace)
    with termination_interrupts():
        try:
            with Fleet(report=_say) as fleet:
                endpoints = bring_up(fleet, deployment, startup_seconds=namespace.startup_seconds)
                _say(summary(endpoints, deployment.served_name))
                fleet.watch()
        except KeyboardInterrupt:
            _say("All servers are stopped.")
    return 0


def read_deployment(namespace: argparse.Namespace) -> Deployment:
    """Validate the arguments.

    Raises:
        UsageError: names the argument and what to do.
    """
    model = checked_model(namespace.model)
    return Deployment(
        model=model,
        served_name=namespace.served_model_name or Path(model).name,
        prefill=namespace.prefill,
        decode=namespace.decode,
        reference=namespace.reference,
        prefill_arguments=engine_arguments("--prefill-args", namespace.prefill_args),
        decode_arguments=engine_arguments("--decode-args", namespace.decode_args),
        router_arguments=(*_mode(namespace), *split_arguments("--router-args", namespace.router_args)),
        host=namespace.host,
        port=namespace.port,
        logs=namespace.log_dir,
        cache_gib=namespace.kv_cache_gib,
        accelerators=tuple(namespace.accelerators),
        gpus_per_engine=namespace.gpus_per_engine,
        both_directions=namespace.both_directions,
    )


def _mode(namespace: argparse.Namespace) -> tuple[str, ...]:
    return () if namespace.transfer_mode is None else ("--transfer-mode", namespace.transfer_mode)


def checked_model(model: str) -> str:
    """A directory with a model in it, as an absolute path, or a name for the model hub."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"--model {model}: the directory has no config.json, so it holds no model")
        return str(path.resolve())
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UsageError(
            f"--model {model}: there is no such directory; `kvferry tiny-model {model}` makes one"
        )
    return model


def engine_arguments(option: str, text: str) -> tuple[str, ...]:
    """More arguments for engines, in words.

    Raises:
        UsageError: one of them is an option that `kvferry up` itself sets.
    """
    arguments = split_arguments(option, text)
    for argument in arguments:
        # vLLM also reads underscores for dashes, and `--option.key` for one key of a JSON value.
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in OWN_ENGINE_OPTIONS:
            raise UsageError(f"{name} is set by kvferry up; leave it out of {option}")
    return arguments


def split_arguments(option: str, text: str) -> tuple[str, ...]:
    """Split as a shell would."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}; quote it as in a shell") from error


def summary(endpoints: Endpoints, model: str) -> str:
    """What to tell the operator once everything is ready."""
    body = json.dumps({"model": model, "prompt": "Tell me about ferries.", "max_tokens": 32})
    request = f"-H 'Content-Type: application/json' -d {shlex.quote(body)}"
    lines = [
        "",
        f"Ready: {endpoints.router}/v1",
        *([f"Reference engine: {endpoints.reference}/v1"] if endpoints.reference else []),
        "Try:",
        f"  curl -s {endpoints.router}/v1/completions {request}",
        "Ctrl-C stops everything.",
    ]
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, flush=True)
