"""What a request of this engine shall receive from another engine instead of computing it."""

from __future__ import annotations

import msgspec

from kvferry.handoff import DecodeParams, SourceParams, TransferMode, paired_by_request_id
from kvferry.host.requests import EngineRequest
from kvferry.ids import TransferId
from kvferry.protocol.commands import Source


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """KV of a prompt's first `stop` tokens."""

    transfer: TransferId
    source: Source
    mode: TransferMode
    stop: int
    patient: bool
    """Whether its prefill may still run, or be on its way."""
    is_history: bool = False
    """It is what is kept of a turn: of use, and never waited for where computing does as well."""


def whole_prompt(request: EngineRequest, params: DecodeParams, stop: int) -> Wanted:
    """What a decode request wants: its prompt, as far as its engine receives one."""
    return Wanted(
        transfer=params.transfer or paired_by_request_id(request.request_id),
        source=source_of(params.source),
        mode=params.mode or "push",
        stop=stop,
        patient=params.prefilled_tokens is None,
    )


def source_of(params: SourceParams) -> Source:
    """The producer engine as the protocol names it."""
    return Source(params.engine, params.host, params.port, params.tp, params.pp, params.incarnation)
