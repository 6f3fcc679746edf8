"""The self-test's KV memory, on the CPU or on a GPU, and the late writer that stands for a model.

A device fills blocks in order and asynchronously, each only after a delay, and says through a function when
it has: on a GPU that is the event that the connector itself records, on the CPU a thread that takes its time.
Whoever reads the blocks before then finds stale bytes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvferry.connector.caches import Model, Table, describe_caches
from kvferry.connector.launch import recorder
from kvferry.ids import BlockId, Rank
from kvferry.layout.spec import CacheSpec

LAYERS = 4
HEADS = 2
BLOCK_TOKENS = 16
CONTENT_BYTES = 256
BLOCK_BYTES = LAYERS * HEADS * BLOCK_TOKENS * CONTENT_BYTES
STALE = 0xEE
"""What a producer's memory holds before it is filled."""
UNTOUCHED = 0x55
"""What a consumer's memory holds where nothing was pushed."""

_CALIBRATION_CYCLES = 20_000_000
Ready = Callable[[], bool]


class Memory:
    """One rank's cache in one stride order, e.g. "BLHNC", all bytes `fill`."""

    def __init__(self, order: str, blocks: int, device: str, fill: int) -> None:
        sizes = {"L": LAYERS, "B": blocks, "H": HEADS, "N": BLOCK_TOKENS, "C": CONTENT_BYTES}
        storage = torch.full([sizes[axis] for axis in order], fill, dtype=torch.uint8, device=device)
        self.blocks = blocks
        self.view: Any = storage.permute([order.index(axis) for axis in "LBHNC"])
        """`[layer, block, head, token, content]`, whatever the order in memory."""

    def describe(self) -> CacheSpec:
        """What the agent is told, by the way of an engine's tensors."""
        tensors = {f"model.layers.{layer}.self_attn.attn": self.view[layer] for layer in range(LAYERS)}
        return describe_caches(
            tensors,
            model=Model("selftest", "uint8", "uint8", HEADS, is_mla=False, facts={}),
            rank=Rank(0, 0),
            tp=1,
            pp=1,
            tables=(Table(tuple(tensors), BLOCK_TOKENS),),
            block_count=self.blocks,
        ).spec


@dataclass(frozen=True, slots=True)
class Difference:
    """Bytes that are not as they should be: in the blocks that were the target, and in all others."""

    wrong_bytes: int
    stray_bytes: int


def content(seed: int, blocks: int) -> Any:
    """The KV of a prompt of so many blocks, `[layer, block, head, token, content]`, from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, blocks, HEADS, BLOCK_TOKENS, CONTENT_BYTES)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def compare_target(memory: Memory, targets: Sequence[BlockId], seed: int) -> Difference:
    """Compare every byte of a consumer's memory with what it should hold after one transfer."""
    expected = torch.full(memory.view.shape, UNTOUCHED, dtype=torch.uint8)
    expected[:, list(targets)] = content(seed, len(targets))
    differs = memory.view.cpu() != expected
    total = int(differs.sum())
    wrong = int(differs[:, list(targets)].sum())
    return Difference(wrong, total - wrong)


class Device(Protocol):
    """What computes KV, late."""

    def fill(self, memory: Memory, blocks: Sequence[BlockId], values: Any) -> Ready:
        """Queue a delay and then the writing of `values` into `blocks`; says when that is done."""
        ...

    def close(self) -> None:
        """Wait for what is queued."""
        ...


class LateThread:
    """The CPU's device: a thread that fills blocks in order, each after a delay."""

    def __init__(self, delay_seconds: float) -> None:
        self._delay_seconds = delay_seconds
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-late-fill", daemon=True)
        self._thread.start()

    def fill(self, memory: Memory, blocks: Sequence[BlockId], values: Any) -> Ready:
        """Queue a delay and then the writing of `values` into `blocks`; says when that is done."""
        done = threading.Event()

        def work() -> None:
            memory.view[:, list(blocks)] = values
            done.set()

        self._work.put(work)
        return done.is_set

    def close(self) -> None:
        """Wait for what is queued, without the delays."""
        self._closing.set()
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._closing.wait(self._delay_seconds)
            work()


class LateStream:
    """A GPU's device: a stream with a kernel that spins for the delay before each fill."""

    def __init__(self, delay_seconds: float) -> None:
        self._stream = torch.cuda.Stream()
        self._delay_cycles = int(delay_seconds / _seconds_per_cycle())

    def fill(self, memory: Memory, blocks: Sequence[BlockId], values: Any) -> Ready:
        """Queue a delay and then the writing of `values` into `blocks`; says when that is done."""
        record = recorder(memory.view)
        assert record is not None, "the memory is the GPU's"
        on_device = values.to(memory.view.device)
        # The stream that copied them here is not the one that reads them.
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._delay_cycles)
            for index, block in enumerate(blocks):
                memory.view[:, block].copy_(on_device[:, index], non_blocking=True)
            on_device.record_stream(self._stream)
            return record()

    def close(self) -> None:
        """Wait for what is queued."""
        self._stream.synchronize()


def open_device(device: str, delay_seconds: float) -> Device:
    """The late writer of "cpu" or "cuda"."""
    return LateStream(delay_seconds) if device == "cuda" else LateThread(delay_seconds)


def settle(device: str) -> None:
    """Wait until what was queued on the device's default stream is done, so that peers may read it."""
    if device == "cuda":
        torch.cuda.synchronize()


def _seconds_per_cycle() -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1)
    begin.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _CALIBRATION_CYCLES
