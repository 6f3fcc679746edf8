"""An agent whose results the test decides, and which checks that the contract of commands is kept."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.ids import TransferId
from kvferry.protocol.commands import (
    Abandon,
    Advance,
    AnnounceCommand,
    BlocksSafe,
    Command,
    Expect,
    Finish,
    Preempt,
    Receive,
    Received,
    ReceiveFailed,
    Released,
    Result,
)


class ScriptedAgent:
    """Records commands; `refuse` and `drains` say how it answers, `say` what it reports next."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.gates: dict[int, Callable[[], bool]] = {}
        """Index of a command -> the device's readiness that it waits for."""
        self.refuse = False
        self.drains = True
        self.drained: list[tuple[TransferId, ...]] = []
        self.posted = (0, 0)
        """What `moved` answers."""
        self.closed = 0
        self._results: list[Result] = []
        self._expected: dict[TransferId, int] = {}
        self._open: set[tuple[str, str]] = set()

    def submit(self, command: Command, ready: Callable[[], bool] | None = None) -> bool:
        """Take a command, or refuse an admission."""
        if self.refuse and isinstance(command, Expect | AnnounceCommand | Receive):
            return False
        self._check(command)
        if ready is not None:
            self.gates[len(self.commands)] = ready
        self.commands.append(command)
        return True

    def results(self) -> list[Result]:
        """What the test has said since the last call."""
        results, self._results = self._results, []
        return results

    def drain(self, transfers: tuple[TransferId, ...], timeout_seconds: float) -> bool:
        """As `drains` says."""
        self.drained.append(transfers)
        return self.drains

    def moved(self) -> tuple[int, int]:
        """Bytes posted, and those of them before their prefill's end."""
        return self.posted

    def close(self, timeout_seconds: float) -> None:
        """Counts."""
        self.closed += 1

    def say(self, *results: Result) -> None:
        """Report these at the next call of `results`."""
        for result in results:
            if isinstance(result, Received | ReceiveFailed):
                self._open.remove((result.transfer, result.consumer))
            elif isinstance(result, Released):
                del self._expected[result.transfer]
            else:
                assert isinstance(result, BlocksSafe) or not isinstance(result, Received)
        self._results += results

    def take(self) -> list[Command]:
        """The commands since the last call."""
        commands, self.commands = self.commands, []
        return commands

    def _check(self, command: Command) -> None:
        """Commands of one transfer come in the order that `kvferry.protocol.commands` states."""
        if isinstance(command, Expect):
            assert command.transfer not in self._expected, "a transfer is expected once"
            self._expected[command.transfer] = 0
        elif isinstance(command, Advance):
            known = self._expected[command.transfer]
            assert command.first_block <= known, "blocks are appended without a gap"
            added = sum(count for _, count in command.blocks[0])
            self._expected[command.transfer] = command.first_block + added
        elif isinstance(command, Finish | Abandon):
            assert command.transfer in self._expected, "an unknown transfer ends"
        elif isinstance(command, Preempt):
            assert all(transfer in self._expected for transfer in command.transfers)
        elif isinstance(command, Receive):
            key = (command.transfer, command.consumer)
            assert key not in self._open, "a destination is opened once"
            self._open.add(key)
