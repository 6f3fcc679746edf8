"""A second process with a NixlTransport: the parent writes into it, asks it things and kills it.

Run as `python -m tests.support.nixl_peer NAME BYTES`; it prints one JSON line when it is ready. Messages to
it: `metadata <bytes>` makes it connect to the sender, `fill N` fills its buffer, `sum` is answered with the
buffer's checksum, `write N M` writes N bytes of its buffer M times into the sender's memory, `quit` ends it.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvferry.ids import PeerName
from kvferry.layout.runs import Region, Runs
from kvferry.transport.base import Handle, PostState
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.regions import Envelope, decode_envelope


@dataclass(frozen=True, slots=True)
class ProcessPeer:
    """The parent's view of the process."""

    process: subprocess.Popen[str]
    name: PeerName
    metadata: bytes
    address: int
    bytes: int


@contextmanager
def spawned(name: str, size: int) -> Iterator[ProcessPeer]:
    """A running peer; killed at the end, whatever happened."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.nixl_peer", name, str(size)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith("{"))
        fields = json.loads(ready)
        metadata = base64.b64decode(fields["metadata"])
        yield ProcessPeer(process, PeerName(name), metadata, fields["address"], size)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


class _Child:
    def __init__(self, name: str, size: int) -> None:
        self.buffer = np.zeros(size, dtype=np.uint8)
        self.transport = NixlTransport(PeerName(name))
        self.transport.register([Region(int(self.buffer.ctypes.data), size)])
        self.parent: PeerName | None = None
        self.parent_region: Region | None = None
        self.posts: list[Handle] = []

    def serve(self) -> None:
        """Answer messages until told to quit."""
        while True:
            for message in self.transport.receive():
                if message.payload == b"quit":
                    return
                self.answer(message.peer, message.payload)
            for handle in list(self.posts):
                if self.transport.poll(handle) is not PostState.IN_FLIGHT:
                    self.posts.remove(handle)
                    self.transport.release(handle)
            time.sleep(0.0005)

    def answer(self, peer: PeerName, payload: bytes) -> None:
        word, _, rest = payload.partition(b" ")
        if word == b"metadata":
            envelope: Envelope = decode_envelope(rest, transport="nixl", peer=peer)
            self.transport.connect(peer, rest)
            self.parent = peer
            self.parent_region = envelope.regions[0]
        elif word == b"fill":
            self.buffer[:] = int(rest)
        elif word == b"sum" and self.parent is not None:
            self.transport.send(self.parent, b"sum %d" % zlib.crc32(self.buffer.tobytes()))
        elif word == b"write" and self.parent is not None and self.parent_region is not None:
            size, times = (int(number) for number in rest.split())
            for _ in range(times):
                self.posts.append(self.post(self.parent, self.parent_region, size))

    def post(self, parent: PeerName, region: Region, size: int) -> Handle:
        source, target, length = (
            np.array([value], dtype=np.uint64) for value in (self.buffer.ctypes.data, region.address, size)
        )
        return self.transport.write(parent, Runs(source, target, length), b"written")


def _main() -> None:
    name, size = sys.argv[1], int(sys.argv[2])
    child = _Child(name, size)
    ready = {
        "metadata": base64.b64encode(child.transport.local_metadata()).decode(),
        "address": int(child.buffer.ctypes.data),
    }
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    child.serve()


if __name__ == "__main__":
    _main()
