"""Which prompts continue which: hashes of a prompt's beginning, in fixed pieces. Pure.

A turn of a conversation begins with the bytes of the turn before. So the hash of a whole number of pieces
from the beginning on, which one turn ends with, stands somewhere in the next one's chain. What shapes a
prompt besides its messages goes into every hash: the model, the tools, the template's arguments, the salt
of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import msgspec

from kvferry.router.api.openai import Body, Endpoint

PIECE_BYTES = 512
PIECES_MAX = 2048
"""What comes after so many is the same to us: a mebibyte tells conversations apart."""
_HASH_BYTES = 16
# Fields with another value make other tokens, or other KV, of the same messages.
_SHAPING = (
    "model",
    "cache_salt",
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "reasoning_effort",
    "add_special_tokens",
)

_SHAPING_BESIDES = frozenset(_SHAPING) - {"model"}


@dataclass(slots=True)
class Fingerprint:
    """A prompt, as far as its continuations are concerned."""

    session: bytes | None
    """The conversation's name as its client gives it."""
    chain: tuple[bytes, ...]
    """Of each whole piece: the hash of all up to it. Empty for a short prompt."""

    @property
    def end(self) -> bytes | None:
        """What a continuation has in its chain; None for a short prompt."""
        return self.chain[-1] if self.chain else None

    def continues(self, end: bytes | None) -> bool:
        """Whether the prompt begins with the one that ended so."""
        return end is not None and end in self.chain

    def known_by(self) -> list[bytes]:
        """What the turn before may be known by, the surest first: the session, then the longest beginning."""
        named = [] if self.session is None else [self.session]
        return named + list(reversed(self.chain))


def fingerprint(endpoint: Endpoint, body: Body, session: str | None) -> Fingerprint:
    """The fingerprint of one prompt; `session` is the client's name for its conversation."""
    model = body.get("model")
    if _SHAPING_BESIDES.isdisjoint(body) and (model is None or isinstance(model, str)):
        running = _shaped_by_model(endpoint, model).copy()
    else:
        running = _shaped(endpoint, body)
    text = memoryview(_text(endpoint, body))
    chain = []
    for start in range(0, min(len(text), PIECES_MAX * PIECE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        running.update(text[start : start + PIECE_BYTES])
        chain.append(running.digest())
    named = None if session is None else blake2b(session.encode(), digest_size=_HASH_BYTES).digest()
    return Fingerprint(named, tuple(chain))


def _shaped(endpoint: Endpoint, body: Body) -> blake2b:
    shape = msgspec.json.encode([endpoint.value, *[body.get(name) for name in _SHAPING]])
    return blake2b(shape, digest_size=_HASH_BYTES)


@lru_cache(maxsize=256)
def _shaped_by_model(endpoint: Endpoint, model: str | None) -> blake2b:
    """What nearly every prompt begins with."""
    return _shaped(endpoint, {"model": model})


def _text(endpoint: Endpoint, body: Body) -> bytes:
    """The prompt's bytes, of which a continuation's are a continuation."""
    if endpoint is Endpoint.CHAT:
        return b"\n".join(msgspec.json.encode(message) for message in body.get("messages") or ())
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    # Without the closing bracket, which the ids of a continuation do not have there.
    return msgspec.json.encode(prompt)[:-1] if isinstance(prompt, list) else b""
