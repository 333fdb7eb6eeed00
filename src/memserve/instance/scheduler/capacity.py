"""What fits: into a step, onto an instance, onto a machine. Pure functions over numbers, without state."""

from __future__ import annotations

from dataclasses import dataclass

from memserve.base.config import EngineOptions, PoolConfig, SchedulerConfig
from memserve.base.types import KVGeometry, Request
from memserve.base.units import GIB, ceil_div, flag_bytes, human_bytes

APART_CORES_MIN = 8
"""Prefill and decode are separated from 8 cores on. With fewer, two processes that both want every core cost more than
prefills that interrupt decoding: on two cores, time to first token and completion time are several times those of one
colocated instance (``bench/first_hour.py --shapes``)."""

PROCESS_BYTES = 3 * GIB // 4
"""Memory of an instance beside weights and KV: torch, transformers, workspaces."""

_WRITTEN_BLOCKS = 4
"""Whole blocks of a sequence whose layers stream: the one that is being written, and those that leave."""

CLIENT_TOKENS = 1000
"""A client's prompt and answer, for the estimate of how many fit."""


# -- a step, and one instance


def chunk_tokens(start: int, end: int, chunk_max: int, budget: int, block_tokens: int) -> int:
    """How many of the tokens ``[start, end)`` one step computes.

    A piece that does not reach ``end`` stops at a block boundary when it can: whole blocks can be reused by other
    requests as soon as the step is planned, parts of a block cannot.
    """
    count = min(end - start, chunk_max, budget)
    if start + count < end:
        aligned = (start + count) // block_tokens * block_tokens
        if aligned > start:
            return aligned - start
    return count


def headroom_blocks(decoding: int) -> int:
    """Blocks that admission leaves free for the growth of sequences that decode.

    A decoding sequence needs a block every ``block_tokens`` steps, so a quarter of them need one within the next
    ``block_tokens / 4`` steps. Without headroom a new sequence would be preempted soon after its admission.
    """
    return ceil_div(decoding, 4)


def context_tokens(max_model_tokens: int, pool: PoolConfig, block_tokens: int) -> int:
    """Longest sequence that lies whole. The last token's KV is never needed, hence ``+ 1``."""
    return min(max_model_tokens, pool.tokens_in(block_tokens) + 1)


def streamed_tokens(max_model_tokens: int, pool: PoolConfig, block_tokens: int, layers: int) -> int:
    """Longest sequence whose layers stream: DRAM has all of it, and two layers at a time fit into three quarters of
    HBM; the last quarter is for what is being written, and for others."""
    frames = (pool.hbm_blocks - max(_WRITTEN_BLOCKS, pool.hbm_blocks // 4)) // 2
    entries = max(0, min(pool.dram_blocks, frames * layers))
    return max(context_tokens(max_model_tokens, pool, block_tokens), min(max_model_tokens, entries * block_tokens + 1))


def _streaming_blocks(entries: int, layers: int) -> int:
    """HBM blocks with which so many entries can stream."""
    staging_blocks = 2 * ceil_div(entries, layers)
    return staging_blocks + max(_WRITTEN_BLOCKS, ceil_div(staging_blocks, 3))


def kv_tokens(hbm_blocks: int, state_blocks: int, block_tokens: int) -> int:
    """Tokens that the pool holds in sequences of :data:`CLIENT_TOKENS`, each of which has ``state_blocks`` beside the
    KV that grows with it."""
    entries = ceil_div(CLIENT_TOKENS, block_tokens)
    return hbm_blocks * entries // (entries + state_blocks) * block_tokens


def context_note(
    served_tokens: int, model_tokens: int, options: EngineOptions, pool: PoolConfig, geometry: KVGeometry
) -> str:
    """Why the served context is shorter than the model's own, and the flag that changes it; empty: it is not
    shorter."""
    if served_tokens >= model_tokens:
        return ""
    wanted_tokens = min(options.max_model_tokens or model_tokens, model_tokens)
    if served_tokens >= wanted_tokens:
        return f"--max-model-tokens {options.max_model_tokens} limits it; the model itself takes {model_tokens}"
    entries = ceil_div(wanted_tokens - 1, geometry.block_tokens)
    blocks = entries if pool.windows is None else pool.windows.blocks_for(entries)
    memory_text = human_bytes(pool.hbm_blocks * geometry.block_bytes)
    if options.scheduler.layerwise != "off" and pool.dram_blocks < entries:
        room = flag_bytes(entries * pool.block_bytes_by_tier[1])
        return f"{human_bytes(options.dram_memory_bytes)} of DRAM hold no more; --dram-memory {room} would serve more"
    if options.scheduler.layerwise != "off":
        blocks = min(blocks, _streaming_blocks(entries, geometry.num_layers))
    room = flag_bytes(blocks * geometry.block_bytes)
    return f"{memory_text} of KV memory hold no more; --kv-memory {room} would serve {wanted_tokens}"


def running_max(config: SchedulerConfig) -> int:
    """Device slots. More than ``step_tokens`` could not all decode in one step."""
    return min(config.max_running, config.step_tokens)


def lies_whole(request: Request) -> bool:
    """Whether KV of ``request`` never lies by layer: several sequences share it, or its prompt's logprobs are told."""
    return request.n > 1 or request.beam_width > 0 or request.sampling.prompt_logprobs


def impossible_reason(request: Request, context: int, slots: int) -> str | None:
    """Why ``request`` could not run even on an idle instance, with the numbers; ``None``: it can."""
    prompt_tokens = len(request.prompt)
    width = max(request.n, request.beam_width)
    if prompt_tokens < 1:
        return "the prompt is empty"
    if request.n < 1:
        return f"n must be at least 1, got {request.n}"
    if prompt_tokens + 1 > context:
        kind = " of a request with n, beams or logprobs of its prompt" if lies_whole(request) else ""
        return (
            f"the prompt has {prompt_tokens} tokens; with one more to generate the most that fits here{kind} is"
            f" {context}"
        )
    if request.beam_width and request.n > request.beam_width:
        return f"n = {request.n} sequences cannot come out of beam_width = {request.beam_width} beams"
    if width > slots:
        return f"{width} sequences at once are more than the {slots} that can run here"
    return None


# -- a machine


@dataclass(frozen=True, slots=True)
class Hardware:
    """The resources that instances may use."""

    cores: int
    memory_bytes: int | None
    """``None``: unknown."""
    gpus: int = 0
    """GPUs that compute; 0: the CPU does."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Instances of each role."""

    prefill: int
    decode: int
    colocated: int
    reason: str = ""
    """Why it was chosen; empty: it was asked for."""


def instance_bytes(kv_bytes: int, weight_bytes: int) -> int:
    """Peak host memory of one instance: it holds its weights twice while they are packed."""
    return kv_bytes + 2 * weight_bytes + PROCESS_BYTES


def choose_shape(machine: Hardware, one_instance_bytes: int | None) -> Shape:
    """One colocated instance, or a prefill and a decode instance where there is room for both.

    ``one_instance_bytes``: host memory that an instance takes; ``None``: unknown, because the model is not downloaded
    yet.
    """
    if machine.gpus:
        return Shape(0, 0, machine.gpus, "one GPU" if machine.gpus == 1 else f"one for each of {machine.gpus} GPUs")
    if machine.cores < APART_CORES_MIN:
        cores = f"{machine.cores} core{'s' if machine.cores != 1 else ''}"
        return Shape(0, 0, 1, f"{cores} here, and prefill and decode go apart from {APART_CORES_MIN} on")
    if one_instance_bytes is None or machine.memory_bytes is None:
        return Shape(0, 0, 1, "it is not known whether two instances fit into memory")
    both_bytes = 2 * one_instance_bytes
    if both_bytes > machine.memory_bytes:
        available = human_bytes(machine.memory_bytes)
        return Shape(0, 0, 1, f"two instances need {human_bytes(both_bytes)}, and {available} are available")
    return Shape(1, 1, 0, f"{machine.cores} cores, and memory for both")


def clients_that_fit(kv_tokens: int, context_tokens: int, running_max: int) -> int:
    """About how many clients can be served at once, with :data:`CLIENT_TOKENS` each or the context if it is less."""
    return max(1, min(kv_tokens // min(CLIENT_TOKENS, context_tokens), running_max))
