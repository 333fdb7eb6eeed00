"""How a step is filled (level 1): pure functions over numbers, no state."""

from __future__ import annotations

from memserve.config import EngineOptions, SchedulerConfig
from memserve.types import KVGeometry, Request
from memserve.units import ceil_div, flag_bytes, human_bytes


def chunk_tokens(start: int, end: int, chunk_max: int, budget: int, block_tokens: int) -> int:
    """How many of the tokens ``[start, end)`` one step computes.

    A piece that does not reach ``end`` stops at a block boundary when it can: whole blocks can be reused by others as
    soon as the step is on its way, half ones cannot.
    """
    count = min(end - start, chunk_max, budget)
    if start + count < end:
        aligned = (start + count) // block_tokens * block_tokens
        if aligned > start:
            return aligned - start
    return count


def headroom_blocks(decoding: int) -> int:
    """Blocks that admission leaves free for the growth of what decodes already.

    A decoding sequence needs a block every ``block_tokens`` steps; a quarter of them will within the next
    ``block_tokens / 4`` steps. Without headroom a newcomer would be preempted soon after it was admitted.
    """
    return ceil_div(decoding, 4)


def context_tokens(max_model_tokens: int, hbm_blocks: int, block_tokens: int) -> int:
    """Longest sequence that can run here. The last token's KV is never needed, hence ``+ 1``."""
    return min(max_model_tokens, hbm_blocks * block_tokens + 1)


def context_note(
    served_tokens: int, model_tokens: int, options: EngineOptions, hbm_blocks: int, geometry: KVGeometry
) -> str:
    """Why the served context is shorter than the model's own, and the flag that changes it; empty: it is not."""
    if served_tokens >= model_tokens:
        return ""
    wanted = min(options.max_model_tokens or model_tokens, model_tokens)
    if served_tokens >= wanted:
        return f"--max-model-tokens {options.max_model_tokens} limits it; the model itself takes {model_tokens}"
    room = flag_bytes(ceil_div(wanted - 1, geometry.block_tokens) * geometry.block_bytes)
    held = human_bytes(hbm_blocks * geometry.block_bytes)
    return f"{held} of KV memory hold no more; --kv-memory {room} would serve {wanted}"


def running_max(config: SchedulerConfig) -> int:
    """Device slots. More than ``step_tokens`` could not all decode in one step."""
    return min(config.max_running, config.step_tokens)


def impossible_reason(request: Request, context: int, slots: int) -> str | None:
    """Why ``request`` could not run even on an idle instance, with the numbers; ``None`` when it can."""
    prompt_tokens = len(request.prompt)
    width = max(request.n, request.beam_width)
    if prompt_tokens < 1:
        return "the prompt is empty"
    if request.n < 1:
        return f"n must be at least 1, got {request.n}"
    if prompt_tokens + 1 > context:
        return f"the prompt has {prompt_tokens} tokens; with one more to generate the most that fits here is {context}"
    if request.beam_width and request.n > request.beam_width:
        return f"n = {request.n} sequences cannot come out of beam_width = {request.beam_width} beams"
    if width > slots:
        return f"{width} sequences at once are more than the {slots} that can run here"
    return None
