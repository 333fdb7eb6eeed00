"""Requests of one length: for a server's plain speed, and for the client's own (level 4)."""

from __future__ import annotations

from memserve.errors import UserError
from memserve.units import ceil_div
from memserve.workloads.words import Blocks, History, Session, Span, Turn, Workload

BLOCK_TOKENS = 16


def uniform_workload(requests: int, *, prompt_tokens: int, shared_tokens: int, output_tokens: int) -> Workload:
    """``requests`` sessions of one turn; all prompts begin with the same ``shared_tokens`` tokens and share no more.

    Raises :class:`UserError` when more is shared than a prompt holds.
    """
    if shared_tokens > prompt_tokens:
        message = f"prompts of {prompt_tokens} tokens cannot share {shared_tokens}"
        raise UserError(message, hint="make --shared-tokens smaller, or --prompt-tokens larger")
    shared_blocks = ceil_div(shared_tokens, BLOCK_TOKENS)
    own_blocks = ceil_div(prompt_tokens - shared_tokens, BLOCK_TOKENS)
    sessions = []
    for number in range(requests):
        own = Span(shared_blocks + number * own_blocks, prompt_tokens - shared_tokens)
        blocks = Blocks(BLOCK_TOKENS, tuple(span for span in (Span(0, shared_tokens), own) if span.tokens))
        sessions.append(Session(f"request-{number}", (Turn(blocks, output_tokens),), history=History.GIVEN))
    return Workload("uniform", f"{prompt_tokens} + {output_tokens} tokens", tuple(sessions))
