"""OpenAI request and answer bodies: read, split, rewritten and joined. Pure: bytes and dictionaries only.

Bodies are rewritten by building new ones; the client's own is never edited. Fields that this module does not
know pass through unchanged to both legs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.handoff import CONSUMERS_MAX
from kvferry.router.ground.errors import invalid

Body = dict[str, Any]

_BYTES_PER_TOKEN = 4
PARAMS = "kv_transfer_params"

# What only matters to tokens that the prefill leg does not make, could make it invalid with one token
# (min_tokens), could end it early (stop, stop_token_ids), or costs time there. The client's seed and log
# probabilities belong to the decode leg, which samples every token that the client sees.
_NOT_ON_PREFILL = frozenset(
    {
        "best_of",
        "echo",
        "include_stop_str_in_output",
        "logprob_token_ids",
        "logprobs",
        "min_tokens",
        "prompt_logprobs",
        "repetition_detection",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",
        "stop",
        "stop_token_ids",
        "stream_options",
        "top_logprobs",
    }
)
# Without one of these the answer needs nothing that only the engine knows that computes the prompt.
_WHOLE_PROMPT = frozenset({"prompt_logprobs", "echo", "use_beam_search", "prompt_embeds"})
# A chat template may put these into the prompt, so a chat keeps them: another prompt would be another KV.
_NOT_ON_PREFILL_OF_TEXT = _NOT_ON_PREFILL | {"response_format", "structured_outputs"}
_ONE_TOKEN = {"max_tokens": 1, "n": 1, "stream": False, "ignore_eos": True}


class Endpoint(enum.Enum):
    """The two kinds of request that are split into legs."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class ClientRequest:
    """A client's body, read and checked.

    `bodies` has one body per prompt, in order. `whole_prompt` is True when the engine that answers must
    compute the prompt itself.
    """

    endpoint: Endpoint
    bodies: tuple[Body, ...]
    n: int
    stream: bool
    include_usage: bool
    whole_prompt: bool
    untouched: bool = False
    """Whether the one body says what the client has sent, nothing taken out."""


def read(endpoint: Endpoint, raw: bytes, prompts_max: int) -> ClientRequest:
    """Read a client's body.

    Raises:
        RequestError: 400, naming the field.
    """
    sent = read_object(raw)
    body = own_body(sent)
    n = _whole_number(body, "n", 1)
    stream = _flag(body, "stream")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid("model", f"must be a text, not {_kind(model)}")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise invalid("stream_options", f"must be an object, not {_kind(options)}")
    bodies = _split(endpoint, body, prompts_max)
    return ClientRequest(
        endpoint=endpoint,
        bodies=bodies,
        n=n,
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
        whole_prompt=_needs_whole_prompt(body, n),
        untouched=len(bodies) == 1 and bodies[0] is sent,
    )


def prefill_body(endpoint: Endpoint, body: Body, params: Body | None) -> Body:
    """The prefill leg's body: the same prompt, one token, nothing that ends it early.

    Without `params` these are still to be added.
    """
    dropped = _NOT_ON_PREFILL_OF_TEXT if endpoint is Endpoint.COMPLETIONS else _NOT_ON_PREFILL
    kept = {key: value for key, value in body.items() if key not in dropped}
    if kept.get("max_completion_tokens") is not None:
        kept["max_completion_tokens"] = 1
    kept.update(_ONE_TOKEN)
    if params is not None:
        kept[PARAMS] = params
    return kept


def decode_body(body: Body, params: Body | None) -> Body:
    """The decode leg's body: the client's, with its KV's coordinates unless the engine prefills itself."""
    return body if params is None else body | {PARAMS: params}


def with_params(raw: bytes, params: bytes) -> bytes:
    """A JSON object's bytes with `kv_transfer_params` behind its other keys; it is no empty one."""
    return b'%b,"kv_transfer_params":%b}' % (raw[: raw.rindex(b"}")], params)


def client_answer(answer: Body, cached_tokens: int | None) -> Body:
    """What the client gets of an engine's answer or stream chunk.

    The hand-over is none of the client's business. `cached_tokens` is the prefill engine's count; the decode
    engine's own counts what was transferred as cached.
    """
    told = {key: value for key, value in answer.items() if key != PARAMS}
    usage = told.get("usage")
    if cached_tokens is not None and isinstance(usage, Mapping):
        details = usage.get("prompt_tokens_details") or {}
        if isinstance(details, Mapping):
            told["usage"] = {**usage, "prompt_tokens_details": {**details, "cached_tokens": cached_tokens}}
    return told


def cached_tokens_of(answer: Body) -> int | None:
    """`usage.prompt_tokens_details.cached_tokens` of a prefill answer; None when it does not tell."""
    value: object = answer
    for key in ("usage", "prompt_tokens_details", "cached_tokens"):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def shifted(chunk: Body, position: int, n: int) -> Body:
    """An answer or chunk of prompt number `position` with the choices' indices of the whole request."""
    choices = chunk.get("choices")
    if not isinstance(choices, list):
        return chunk
    moved = [_moved(choice, position * n) for choice in choices]
    return {**chunk, "choices": moved}


def joined(answers: Sequence[Body], n: int, answer_id: str) -> Body:
    """One answer of many prompts' answers, which are in order."""
    choices = [
        choice
        for position, answer in enumerate(answers)
        for choice in shifted(answer, position, n).get("choices", [])
    ]
    usages = [answer.get("usage") for answer in answers]
    return {**answers[0], "id": answer_id, "choices": choices, "usage": summed(usages)}


def summed(usages: Sequence[object]) -> Body | None:
    """The sum of usages, key by key; None when none was given."""
    total: Body = {}
    given = [usage for usage in usages if isinstance(usage, Mapping)]
    for usage in given:
        for key, value in usage.items():
            before = total.get(key)
            if isinstance(value, Mapping):
                total[key] = summed([before, value])
            elif isinstance(value, int) and not isinstance(value, bool):
                total[key] = value + (before if isinstance(before, int) else 0)
            else:
                total.setdefault(key, value)
    return total if given else None


def estimated_tokens(endpoint: Endpoint, body: Body) -> int:
    """How many tokens a prompt has, roughly: ids are counted, text has one in four bytes."""
    prompt = body.get("messages" if endpoint is Endpoint.CHAT else "prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        (prompt,) = prompt
    if isinstance(prompt, list) and endpoint is Endpoint.COMPLETIONS:
        return len(prompt)
    text = prompt.encode("utf-8", "surrogatepass") if isinstance(prompt, str) else msgspec.json.encode(prompt)
    return -(-len(text) // _BYTES_PER_TOKEN)


def error_message(raw: bytes) -> str | None:
    """The message inside an engine's error body or event; None when it is none."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    error = body.get("error") if isinstance(body, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    return message if isinstance(message, str) else None


def read_object(raw: bytes) -> Body:
    """A client's body as an object.

    Raises:
        RequestError: 400, it is none.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid("body", f"is not JSON: {error}") from None
    except RecursionError:
        raise invalid("body", "is nested too deeply") from None
    if not isinstance(body, dict):
        raise invalid("body", f"must be an object, not {_kind(body)}")
    return body


def own_body(body: Body) -> Body:
    """The body without what would steer the hand-over; vLLM also reads it from `vllm_xargs`.

    It is the same object where there is nothing to take out.
    """
    if PARAMS not in body and "vllm_xargs" not in body:
        return body
    kept = {key: value for key, value in body.items() if key != PARAMS}
    extra = kept.get("vllm_xargs")
    if isinstance(extra, Mapping) and PARAMS in extra:
        kept["vllm_xargs"] = {key: value for key, value in extra.items() if key != PARAMS}
    return kept


def _needs_whole_prompt(body: Body, n: int) -> bool:
    if _WHOLE_PROMPT.isdisjoint(body) and n <= CONSUMERS_MAX:
        return False
    # Zero is a number of log probabilities to ask for, so only absence and `false` mean none.
    asked = [body.get(key) for key in ("logprobs", "top_logprobs")]
    logprobs = any(value is not None and value is not False for value in asked)
    return bool(
        body.get("prompt_logprobs") is not None
        or (body.get("echo") and logprobs)
        # A beam search makes many requests of one; their ids and number are the engine's own affair.
        or body.get("use_beam_search")
        # Embeddings may stand beside a prompt or come as a list; only the engine knows how many prompts
        # that makes.
        or body.get("prompt_embeds") is not None
        or n > CONSUMERS_MAX
    )


def _split(endpoint: Endpoint, body: Body, prompts_max: int) -> tuple[Body, ...]:
    if endpoint is Endpoint.CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise invalid("messages", f"must be a list, not {_kind(messages)}")
        return (body,)
    if body.get("prompt_embeds") is not None:
        return (body,)
    prompts = _prompts(body.get("prompt"))
    if len(prompts) > prompts_max:
        raise invalid("prompt", f"has {len(prompts)} prompts; at most {prompts_max} go into one request")
    if len(prompts) == 1:
        return (body,)
    return tuple(body | {"prompt": prompt} for prompt in prompts)


def _prompts(prompt: object) -> list[object]:
    """The prompts in the field, which is a text, a prompt of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid("prompt", f"must be a text, token ids or a list of these, not {_kind(prompt)}")
    if not prompt:
        raise invalid("prompt", "is an empty list")
    if all(isinstance(part, str) for part in prompt):
        return list(prompt)
    if all(isinstance(part, list) for part in prompt):
        for position, part in enumerate(prompt):
            _check_token_ids(f"prompt[{position}]", part)
        return list(prompt)
    _check_token_ids("prompt", prompt)
    return [prompt]


def _check_token_ids(name: str, tokens: list[object]) -> None:
    if not tokens:
        raise invalid(name, "has no token ids")
    for position, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise invalid(f"{name}[{position}]", f"must be a token id, not {_kind(token)}")


def _whole_number(body: Body, name: str, absent: int) -> int:
    value = body.get(name)
    if value is None:
        return absent
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise invalid(name, f"must be a whole number from 1 on, not {_shown(value)}")
    return value


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"must be true or false, not {_shown(value)}")
    return bool(value)


def _moved(choice: object, offset: int) -> object:
    if not isinstance(choice, Mapping) or not isinstance(choice.get("index"), int):
        return choice
    return {**choice, "index": choice["index"] + offset}


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "nothing"}
    return names.get(type(value)) or f"the number {_shown(value)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
