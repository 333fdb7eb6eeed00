"""``memserve bench engine``: how fast one engine is on this machine, in about a minute.

Random tokens, greedy, end-of-sequence ignored: prefill speed and TTFT cold and warm at two lengths, decode speed at
three batch sizes, then a mixed workload for the memory report. The shapes are those of the comparison with other
engines, so the figures can be compared.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from memserve.api.llm import LLM
from memserve.base.types import SamplingParams
from memserve.base.units import NS_PER_MS, human_bytes
from memserve.instance.stats import InstanceStats

GREEDY = SamplingParams(temperature=0.0)
DECODE_PROMPT_TOKENS = 128
DECODE_TOKENS = 64
PREFILL_TOKENS = (512, 2048)
DECODE_BATCHES = (1, 8, 32)
MIXED_TOKENS = (40, 200, 333, 700)
MIXED_NEW_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure."""

    name: str
    value: float
    unit: str
    note: str = ""


class Prompts:
    """Fresh random prompts, equal for equal seeds."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokens = range(vocab_size // 100, vocab_size)  # the first ids are often special

    def fresh_prompts(self, count: int, tokens: int) -> list[list[int]]:
        """``count`` prompts of ``tokens`` ids each that no cache has seen."""
        return [self._rng.choices(self._tokens, k=tokens) for _ in range(count)]


def bench_engine(llm: LLM, *, repeats: int = 3, seed: int = 5) -> Iterator[Figure]:
    """Yield figures as they are measured: medians of ``repeats`` runs. Figures that exceed the model's context are left
    out."""
    prompts = Prompts(llm.model.vocab_size, seed)
    context = llm.model.max_model_tokens
    _seconds(llm, prompts.fresh_prompts(1, min(64, context // 2)), 8)  # warm-up: threads, kernels, first-touch memory
    for tokens in PREFILL_TOKENS:
        if tokens < context:
            yield from _prefill(llm, prompts, tokens, repeats)
    for batch in DECODE_BATCHES:
        yield from _decode(llm, prompts, batch, repeats)
    yield from _memory(
        llm, [p for n in MIXED_TOKENS if n + MIXED_NEW_TOKENS <= context for p in prompts.fresh_prompts(4, n)]
    )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield Figure("peak resident memory", peak_bytes / 1e6, "MB")


def _seconds(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    started = time.perf_counter()
    llm.generate(prompts, GREEDY, max_tokens=new_tokens, ignore_eos=True)
    return time.perf_counter() - started


def _prefill(llm: LLM, prompts: Prompts, tokens: int, repeats: int) -> Iterator[Figure]:
    cold, warm = [], []
    for _ in range(repeats):
        prompt = prompts.fresh_prompts(1, tokens)
        cold.append(_seconds(llm, prompt, 1))
        warm.append(_seconds(llm, prompt, 1))
    yield Figure(f"prefill {tokens}", tokens / median(cold), "tokens/s")
    yield Figure(f"TTFT cold {tokens}", median(cold) * 1e3, "ms")
    note = f"{median(warm) / median(cold):.3f} of cold"
    yield Figure(f"TTFT warm {tokens}", median(warm) * 1e3, "ms", note)


def _decode(llm: LLM, prompts: Prompts, batch: int, repeats: int) -> Iterator[Figure]:
    rates, shares, thinking_ns = [], [], []
    for _ in range(repeats):
        same = prompts.fresh_prompts(batch, DECODE_PROMPT_TOKENS)
        _seconds(llm, same, 1)  # fills the cache, so that both timed runs start from the same prompt
        short = _seconds(llm, same, 1)
        before = llm.stats()
        long = _seconds(llm, same, 1 + DECODE_TOKENS)
        after = llm.stats()
        rates.append(batch * DECODE_TOKENS / (long - short))
        shares.append((after.machine_ns - before.machine_ns) / (after.device_ns - before.device_ns))
        thinking_ns.append((after.machine_ns - before.machine_ns) / (after.steps - before.steps))
    yield Figure(f"decode batch {batch}", median(rates), "tokens/s")
    note = f"{median(thinking_ns) / NS_PER_MS:.3f} ms a step"
    yield Figure(f"scheduler share, batch {batch}", 100 * median(shares), "%", note)


def _memory(llm: LLM, prompts: list[list[int]]) -> Iterator[Figure]:
    """The memory report in the middle of a mixed workload: sampled while it runs."""
    samples: list[InstanceStats] = []

    def sample(stats: InstanceStats) -> None:
        if stats.sequences_running:
            samples.append(stats)

    llm.generate(
        prompts, GREEDY, max_tokens=MIXED_NEW_TOKENS, ignore_eos=True, on_progress=lambda: sample(_instance(llm))
    )
    worst = max(samples, key=lambda s: s.internal_fragmentation_tokens / s.sequences_running)
    per_sequence = worst.internal_fragmentation_tokens / worst.sequences_running
    block = llm.model.geometry.block_tokens
    yield Figure("internal fragmentation, worst", per_sequence, "tokens/sequence", f"below one block of {block}")
    external = max(100 * s.external_fragmentation for s in samples)
    yield Figure("external fragmentation, worst", external, "%", "free pages that no request for a block can use")
    share = 100 * median(s.running_tokens / max(1, s.running_slots_tokens) for s in samples)
    yield Figure("running KV memory that holds token states", share, "%", f"{len(samples)} samples")


def _instance(llm: LLM) -> InstanceStats:
    stats = llm.stats().instance
    return stats if stats is not None else InstanceStats()


def describe(llm: LLM) -> dict[str, Any]:
    """The model and its KV memory."""
    geometry = llm.model.geometry
    hbm = _instance(llm).hbm
    return {
        "model": llm.model.name,
        "dtype": geometry.dtype,
        "layers": geometry.num_layers,
        "kv_bytes_per_token": geometry.token_bytes,
        "kv_memory": human_bytes(hbm.blocks_total * geometry.block_bytes),
    }
