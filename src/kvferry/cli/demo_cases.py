"""The requests of the demo: every shape of prompt that a hand-over can go wrong with."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

OUTPUT_TOKENS = 24
# Ids of syllables and words of the tiny model.
TOKEN_FIRST, TOKEN_LAST = 262, 1000
SYLLABLES = ("ba", "do", "fe", "gi", "hu", "ka", "lo", "me", "ni", "pu")


@dataclass(frozen=True, slots=True)
class Case:
    """One request and what to expect of it. `body` lacks what is the same for all, see `request_body`."""

    name: str
    path: str
    body: dict[str, Any]

    @property
    def answers(self) -> int:
        """Answers per prompt."""
        return int(self.body.get("n", 1))

    def prompt_lengths(self, counted: int) -> list[int]:
        """Tokens of each prompt; `counted` is the server's own count, needed where the body has text."""
        prompt = self.body.get("prompt")
        if not isinstance(prompt, list):
            return [counted]
        return [len(part) for part in prompt] if isinstance(prompt[0], list) else [len(prompt)]


def demo_cases(*, block_tokens: int, chunk_tokens: int, seed: int) -> list[Case]:
    """Cases around these sizes. Prompts are random, so that no prefix cache answers for the transfer."""
    source = random.Random(seed)
    block, chunk = block_tokens, chunk_tokens

    def prompt(tokens: int) -> list[int]:
        return [source.randint(TOKEN_FIRST, TOKEN_LAST) for _ in range(tokens)]

    def text(words: int) -> str:
        return " ".join("".join(source.choices(SYLLABLES, k=2)) for _ in range(words))

    return [
        _completion("one token", prompt(1)),
        _completion("part of a block", prompt(block // 2)),
        _completion("one block exactly", prompt(block)),
        _completion("a few blocks, not streamed", prompt(2 * block + 3), stream=False),
        _completion("a full multiple of the block", prompt(4 * block)),
        _completion("five chunks", prompt(4 * chunk + block // 3)),
        _completion("nine chunks", prompt(8 * chunk + 1)),
        _completion("text", text(100)),
        _chat("chat, not streamed", text(20), stream=False),
        _chat("chat", text(150), stream=True),
        _completion("list of 3 prompts", [prompt(3), prompt(block + 1), prompt(2 * block)], stream=False),
        # Greedy sampling refuses n > 1; with a choice of one, every answer is the greedy one.
        _completion("n=2", prompt(block + block // 2), stream=False, n=2, temperature=1, top_k=1),
    ]


def request_body(case: Case, model: str) -> dict[str, Any]:
    """What to send: for this model, greedy, with a fixed length of the answer and its token ids."""
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if case.body["stream"]:
        common["stream_options"] = {"include_usage": True}
    return common | case.body


def expected_blocks(lengths: list[int], *, answers: int, cached_tokens: int, block_tokens: int) -> int:
    """Blocks that must travel: those of every prompt, per answer, less what the consumer had cached.

    The last token of a prompt is computed by the consumer in any case, so a prompt of one token needs none.
    """
    blocks = sum(-(-length // block_tokens) for length in lengths if length > 1)
    return blocks * answers - cached_tokens // block_tokens


def _completion(name: str, prompt: object, *, stream: bool = True, **extra: object) -> Case:
    return Case(name, "/v1/completions", {"prompt": prompt, "stream": stream, **extra})


def _chat(name: str, text: str, *, stream: bool) -> Case:
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": text}]
    return Case(name, "/v1/chat/completions", {"messages": messages, "stream": stream})
