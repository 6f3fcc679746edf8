"""What clients ask for, and when: drawn from the seed before it happens.

Every item has a number, and a random source of its own, so that leaving one out shifts no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from kvferry.handoff import TransferMode
from kvferry.ids import EngineId
from kvferry.simulator.ground.content import Contents, Prompt
from kvferry.simulator.world.shape import DECODE_TOKENS_MAX, Shape

FITTING_SHARE = 1 / 6
"""Of prompts for a model with windows, those that are as long as one, or differ by a token."""
NEXT_TURN = 1000
"""A next turn's number is higher by this: it has none of its own by which it could be left out."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request of one client."""

    number: int
    at_seconds: float
    producer: EngineId
    consumer: EngineId
    prompt: Prompt
    decode_prompt: Prompt
    consumers: int
    decode_tokens: int
    stops: bool
    prefill_delay_seconds: float | None
    """None: the leg never arrives."""
    decode_delay_seconds: tuple[float | None, ...]
    """One per consumer."""
    leaves_after_seconds: float | None
    """When the client has had enough."""
    leaves: tuple[bool, bool]
    """Whether the prefill and the decode engine hear of it."""
    knows_incarnation: bool
    stale_incarnation: bool
    replay_after_seconds: float | None = None
    """How soon its legs are sent again under the same id, once a decode leg has ended or lost its blocks."""
    goes_on: bool = False
    """Whether its decode legs are left alone when its prefill engine has died."""
    goes_on_after_seconds: tuple[float, ...] = ()
    """How soon the next turn comes after each answer, as often as the conversation goes on."""
    modes: tuple[TransferMode, ...] = ()
    """One per consumer: whether it is written or reads itself; push where none is named."""

    def mode(self, index: int) -> TransferMode:
        """Of one consumer."""
        return self.modes[index] if self.modes else "push"

    @property
    def is_pushed(self) -> bool:
        """Whether no consumer reads itself."""
        return "pull" not in self.modes

    def next_turn(self, prompt: Prompt, at_seconds: float) -> Item:
        """The conversation goes on: one more request of the same client, to the same engines."""
        return replace(
            self,
            number=self.number + NEXT_TURN,
            at_seconds=at_seconds,
            prompt=prompt,
            decode_prompt=prompt,
            consumers=1,
            decode_delay_seconds=self.decode_delay_seconds[:1],
            goes_on_after_seconds=self.goes_on_after_seconds[1:],
        )

    def __str__(self) -> str:
        return (
            f"transfer of {self.prompt.tokens} tokens from {self.producer} to {self.consumers} on "
            f"{self.consumer} at {self.at_seconds:.3f} s"
        )


def workload(shape: Shape, contents: Contents, draw: Callable[[int], Random], *, is_calm: bool) -> list[Item]:
    """The items of a history, in order of time; `draw` gives each its random source.

    No leg is late in a calm world.
    """
    items = [_item(shape, contents, number, draw(number), is_calm) for number in range(shape.transfers)]
    return sorted(items, key=lambda item: item.at_seconds)


def _item(shape: Shape, contents: Contents, number: int, random: Random, is_calm: bool) -> Item:
    faults = shape.faults
    producers = [facts for facts in shape.engines if facts.produces]
    consumers = [facts for facts in shape.engines if facts.consumes]
    producer = random.choice(producers)
    others = [facts for facts in consumers if facts is not producer]
    consumer = random.choice(others)
    family = random.randrange(2)
    shared = random.randrange(4, 24) if random.random() < 0.25 else 0
    tokens = _length(shape, random)
    prompt = contents.add(tokens, family, shared)
    longer = random.randint(1, 8)
    decode_prompt = prompt
    if random.random() < 0.05 and "longer_prompt" in faults:
        decode_prompt = _longer(shape, contents, prompt, longer, shared)
    count = 2 if random.random() < 0.3 else 1
    late = [random.random() < 0.15 for _ in range(1 + count)]
    seconds = random.choice((0.05, 1.0, 8.0))
    missing = random.random() < 0.04, random.random() < 0.04
    delays = [random.random() * 0.01 for _ in range(1 + count)]
    if not faults and not is_calm:
        # A prefill leg may be late without harm: the decode leg waits for it, and says so.
        delays[0] += late[0] * seconds
    elif "leg_late" in faults:
        delays = [delay + is_late * seconds for delay, is_late in zip(delays, late, strict=True)]
    legs: list[float | None] = list(delays)
    if "leg_missing" in faults:
        legs[0] = None if missing[0] else legs[0]
        legs[-1] = None if missing[1] else legs[-1]
    leaves = random.random() < 0.2
    leaves_after = random.choice((0.02, 0.2, 2.0, 20.0)) * random.random()
    heard = random.choice(((True, True), (True, True), (True, False), (False, True)))
    return Item(
        number=number,
        at_seconds=random.random() * shape.safety_seconds * random.random(),
        producer=producer.engine,
        consumer=consumer.engine,
        prompt=prompt,
        decode_prompt=decode_prompt,
        consumers=count,
        decode_tokens=random.randint(1, DECODE_TOKENS_MAX),
        stops=random.random() < 0.3,
        prefill_delay_seconds=legs[0],
        decode_delay_seconds=tuple(legs[1:]),
        leaves_after_seconds=leaves_after if leaves and "abort" in faults else None,
        leaves=heard,
        knows_incarnation=random.random() < 0.6,
        stale_incarnation=random.random() < 0.04 and "stale_incarnation" in faults,
        replay_after_seconds=_replay_after(random) if "replay" in faults else None,
        goes_on=random.random() < 0.5,
        modes=tuple("pull" if random.random() < shape.pull_share else "push" for _ in range(count)),
        goes_on_after_seconds=_next_turns(random) if shape.turn_tokens_max else (),
    )


def _length(shape: Shape, random: Random) -> int:
    """Tokens of a prompt."""
    tokens = random.randint(*shape.tokens)
    if shape.windows and random.random() < FITTING_SHARE:
        fitting = random.choice(shape.windows) + random.choice((-1, 0, 1))
        return min(max(fitting, 1), shape.tokens[1])
    return tokens


def _longer(shape: Shape, contents: Contents, prompt: Prompt, more: int, shared: int) -> Prompt:
    """A longer prompt of the same family."""
    if shape.windows:
        # Their engines ask for a token less: what is longer by one is served, so it must begin as this one.
        return contents.longer(prompt, prompt.tokens + more)
    return contents.add(prompt.tokens + more, prompt.family, shared)


def _next_turns(random: Random) -> tuple[float, ...]:
    """Most come soon, and some when nothing is kept any more."""
    count = random.choice((0, 1, 2, 3))
    return tuple(random.choice((0.0, 0.05, 1.0, 5.0)) * random.random() for _ in range(count))


def _replay_after(random: Random) -> float | None:
    """Soon enough that answers of the first time are still under way."""
    seconds = random.choice((0.0, 0.02, 0.2, 1.0)) * random.random()
    return seconds if random.random() < 1 / 8 else None
