"""``memserve bench engine``: what one engine does on this machine, in about a minute (level 4, rows P4 and P5).

Random tokens, greedy, end-of-sequence ignored: prefill speed and TTFT cold and warm at two lengths, decode speed at
three batch sizes, then a mixed workload for the memory report. The shapes are those of the comparison with other
engines, so the figures can be held against theirs.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from memserve.instance.stats import InstanceStats
from memserve.llm import LLM
from memserve.types import SamplingParams
from memserve.units import NS_PER_MS, human_bytes

GREEDY = SamplingParams(temperature=0.0)
DECODE_PROMPT_TOKENS = 128
DECODE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    note: str = ""


def random_prompt(rng: random.Random, tokens: int, vocab: int) -> list[int]:
    """Token ids that no cache has seen."""
    return [rng.randrange(5, vocab - 100) for _ in range(tokens)]


def bench_engine(llm: LLM, *, repeats: int = 3, seed: int = 5) -> Iterator[Figure]:
    """Yield figures as they are measured. ``repeats`` runs each, medians."""
    rng = random.Random(seed)
    vocab = len(llm.model.tokenizer)

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return [random_prompt(rng, tokens, vocab) for _ in range(count)]

    _seconds(llm, prompts(1, 64), 8)  # warm-up: threads, kernels, first-touch memory
    for tokens in (512, 2048):
        yield from _prefill(llm, lambda n=tokens: prompts(1, n), tokens, repeats)  # type: ignore[misc]
    for batch in (1, 8, 32):
        yield from _decode(llm, lambda b=batch: prompts(b, DECODE_PROMPT_TOKENS), batch, repeats)  # type: ignore[misc]
    yield from _memory(llm, [p for n in (40, 200, 333, 700) for p in prompts(4, n)])
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield Figure("peak resident memory", peak_bytes / 1e6, "MB")


def _seconds(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    started = time.perf_counter()
    llm.generate(prompts, GREEDY, max_tokens=new_tokens, ignore_eos=True)
    return time.perf_counter() - started


def _prefill(llm: LLM, prompts: Callable[[], list[list[int]]], tokens: int, repeats: int) -> Iterator[Figure]:
    cold, warm = [], []
    for _ in range(repeats):
        batch = prompts()
        cold.append(_seconds(llm, batch, 1))
        warm.append(_seconds(llm, batch, 1))
    yield Figure(f"prefill {tokens}", tokens / median(cold), "tokens/s")
    yield Figure(f"TTFT cold {tokens}", median(cold) * 1e3, "ms")
    note = f"{median(warm) / median(cold):.3f} of cold"
    yield Figure(f"TTFT warm {tokens}", median(warm) * 1e3, "ms", note)


def _decode(llm: LLM, prompts: Callable[[], list[list[int]]], batch: int, repeats: int) -> Iterator[Figure]:
    rates, shares = [], []
    for _ in range(repeats):
        same = prompts()
        _seconds(llm, same, 1)  # fills the cache, so that both timed runs start from the same prompt
        short = _seconds(llm, same, 1)
        long = _seconds(llm, same, 1 + DECODE_TOKENS)
        rates.append(batch * DECODE_TOKENS / (long - short))
        stats = llm.stats()
        shares.append(stats.machine_step_ns / max(1, stats.device_step_ns))
    yield Figure(f"decode batch {batch}", median(rates), "tokens/s")
    step_ns = llm.stats().machine_step_ns
    note = f"{step_ns / NS_PER_MS:.3f} ms a step"
    yield Figure(f"scheduler share, batch {batch}", 100 * median(shares), "%", note)


def _memory(llm: LLM, prompts: list[list[int]]) -> Iterator[Figure]:
    """The memory report in the middle of a mixed workload: sampled while it runs."""
    samples: list[InstanceStats] = []

    def sample(stats: InstanceStats) -> None:
        if stats.sequences_running:
            samples.append(stats)

    llm.generate(prompts, GREEDY, max_tokens=48, ignore_eos=True, on_progress=lambda: sample(_instance(llm)))
    worst = max(samples, key=lambda s: s.internal_fragmentation_tokens / s.sequences_running)
    per_sequence = worst.internal_fragmentation_tokens / worst.sequences_running
    block = llm.model.geometry.block_tokens
    yield Figure("internal fragmentation, worst", per_sequence, "tokens/sequence", f"below one block of {block}")
    external = max(100 * s.external_fragmentation for s in samples)
    yield Figure("external fragmentation, worst", external, "%", "free pages that no request for a block can have")
    share = 100 * median(s.running_tokens / max(1, s.running_slots_tokens) for s in samples)
    yield Figure("running KV memory that holds token states", share, "%", f"{len(samples)} samples")


def _instance(llm: LLM) -> InstanceStats:
    stats = llm.stats().instance
    return stats if stats is not None else InstanceStats()


def describe(llm: LLM) -> dict[str, Any]:
    """What was measured on what."""
    geometry = llm.model.geometry
    hbm = _instance(llm).hbm
    return {
        "model": llm.model.name,
        "dtype": geometry.dtype,
        "layers": geometry.num_layers,
        "kv_bytes_per_token": geometry.token_bytes,
        "kv_memory": human_bytes(hbm.blocks_total * geometry.block_bytes),
    }
