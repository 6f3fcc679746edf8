"""What a prefill request may have of its conversation's last turn instead of computing it. Pure."""

from __future__ import annotations

from kvferry.handoff import HeldParams, TransferMode
from kvferry.host.facts import EngineFacts
from kvferry.host.prefixes import TokenRequest, common_tokens, salt_of
from kvferry.host.wanted import Wanted, source_of


def wanted_history(request: TokenRequest, held: HeldParams, mode: TransferMode, facts: EngineFacts) -> Wanted:
    """What a prefill request may receive of what is held; its `stop` is 0 when none of it is of use."""
    return Wanted(
        transfer=held.transfer,
        source=source_of(held.source),
        mode=mode,
        stop=usable_tokens(request, held, facts),
        patient=False,
        is_history=True,
    )


def usable_tokens(request: TokenRequest, held: HeldParams, facts: EngineFacts) -> int:
    """How many of the prompt's first tokens are what is held, in whole blocks of this engine; 0 for none.

    The last token of a prompt is computed in any case, to sample from it.
    """
    salt = salt_of(request)
    if salt is None:
        return 0
    prompt = request.all_token_ids[: request.num_prompt_tokens]
    told = [prefix for prefix in held.prefixes if prefix.tokens <= held.tokens]
    common = min(common_tokens(prompt, told, salt), request.num_prompt_tokens - 1)
    return common - common % facts.block_tokens
