"""What ``--kv-lower-dtype`` saves, and what it costs in answers: 20 documents with all of their KV gone through DRAM.

    python bench/lower_dtype.py [--data DIR] [--documents 20] [--tokens 1024] [--answer 64] [--model FOLDER]
        [--dtype D] [--threads N]

* bytes of a block: resident memory that 256 blocks of each tier take, by the kernel's count;
* copies: whole blocks down and up, two threads, GB/s of KV as attention reads it;
* perplexity, and how often the most probable token is that of full precision: the second half of each document is
  computed block by block, and before each block all KV before it goes down to DRAM and comes up again;
* greedy answers to the first half of each document, out of the prefix cache in DRAM (``dram_tokens_reused`` says that
  it was): how many are those of full precision, and how many tokens they have in common from the start.

``--data`` has ``longdocs/``, as for ``lossless.py``; without it documents are made from a seed, whose text has no
meaning.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from harness.chats import document_texts
from harness.flags import options, save
from harness.rounds import mean
from harness.tables import Table

from memserve import LLM
from memserve.base.config import EngineOptions
from memserve.base.types import KV_DTYPES, CopyBlocks, SamplingParams, Tier
from memserve.base.units import MIB
from memserve.host.build import build_parts
from memserve.instance.events import OpenSequence, StepPlan
from memserve.model.device import ModelDevice
from memserve.system.memory import resident_bytes

COLUMNS = {
    "KV in DRAM": "{lower}", "bytes of a block: HBM, DRAM": "{hbm:,.0f}, {dram:,.0f}",
    "down, up GB/s": "{down_gb_s:.1f}, {up_gb_s:.1f}", "perplexity": "{perplexity:.4f}",
    "most probable token as in full precision": "{best:.2%}", "greedy answers alike": "{alike} of {answers}",
    "tokens alike from the start": "{common:.1f} of {answer}", "tokens out of DRAM": "{dram_tokens:,}",
}  # fmt: skip
MEASURED_BLOCKS = 256
BLOCK = 32


@dataclass
class Outcome:
    """What was measured with one dtype."""

    block_bytes: dict[str, float]
    down_gb_s: float
    up_gb_s: float
    logprobs: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    dram_tokens: int = 0


class Document:
    """One document on the device: its tokens, its blocks, and the plans."""

    def __init__(self, device: ModelDevice, tokens: list[int], steps: Iterator[int]) -> None:
        import numpy as np

        self._device, self._tokens, self._steps = device, np.array(tokens, np.int32), steps
        self._blocks = list(range(len(tokens) // BLOCK + 1))
        top = SamplingParams(temperature=0, logprobs=1, prompt_logprobs=True)
        opened = OpenSequence(0, self._tokens, len(tokens), 0, top, self._blocks)
        self._run(open=[opened])

    def _run(self, **parts: Any) -> Any:
        return self._device.execute(StepPlan(next(self._steps), **parts))

    def compute(self, start: int, end: int, *, tell: bool) -> list[tuple[float, int]]:
        """Of each token but the last: logprob of the one behind it, and the most probable one."""
        row = {"slots": [0], "starts": [start], "counts": [end - start], "sample_slots": [()]}
        step_result = self._run(**row, prompt_logprob_rows=[0] if tell else [])
        logprobs = step_result.prompt_logprobs[0] if tell else []
        return [(entry.logprob, entry.top[0][0]) for entry in logprobs if entry is not None]

    def round_trip(self, end: int) -> None:
        """All KV before token ``end`` goes down to DRAM, is wiped above, and comes up again."""
        blocks = self._blocks[: end // BLOCK]
        self._run(copies=[CopyBlocks(Tier.HBM, Tier.DRAM, blocks, blocks)])
        self._device._arenas.hbm[: len(blocks)] = 0xFF
        self._run(copies=[CopyBlocks(Tier.DRAM, Tier.HBM, blocks, blocks)])

    def close(self) -> None:
        self._run(close=[0])


def forced(device: ModelDevice, documents: list[list[int]], outcome: Outcome) -> None:
    """Perplexity and most probable tokens of the second halves."""
    steps = iter(range(1, 1 << 30))
    for tokens in documents:
        document, half = Document(device, tokens, steps), len(tokens) // 2 // BLOCK * BLOCK
        document.compute(0, half, tell=False)
        for start in range(half, len(tokens), BLOCK):
            document.round_trip(start)
            for logprob, best in document.compute(start, min(start + BLOCK, len(tokens)), tell=True):
                outcome.logprobs.append(logprob)
                outcome.best.append(best)
        document.close()


def sizes(device: ModelDevice, block_bytes: int) -> Outcome:
    """Resident bytes of a block in both tiers, and how quick copies are."""
    blocks, figures = list(range(MEASURED_BLOCKS)), {}
    down, up = (CopyBlocks(*tiers, blocks, blocks) for tiers in ((Tier.HBM, Tier.DRAM), (Tier.DRAM, Tier.HBM)))
    before = resident_bytes()
    device._arenas.hbm[:MEASURED_BLOCKS] = 1
    figures["hbm"] = (resident_bytes() - before) / MEASURED_BLOCKS
    before = resident_bytes()
    device.execute(StepPlan(1, copies=[down]))
    figures["dram"] = (resident_bytes() - before) / MEASURED_BLOCKS
    rates = []
    for order in (down, up):
        times = []
        for _ in range(7):
            began = time.perf_counter()
            device.execute(StepPlan(1, copies=[order]))
            times.append(time.perf_counter() - began)
        rates.append(MEASURED_BLOCKS * block_bytes / sorted(times)[3] / 1e9)
    return Outcome(figures, *rates)


def answered(options: dict[str, Any], prompts: list[list[int]], block_bytes: int, count: int, to: Outcome) -> None:
    """Greedy answers out of DRAM: HBM has room for little more than one prompt."""
    room = (len(prompts[0]) + count) // BLOCK + 4
    with LLM(**options, kv_memory=room * block_bytes, dram_memory=64 * room * block_bytes, max_running=1) as llm:
        for _ in range(2):
            results = llm.generate(prompts, temperature=0, max_tokens=count, ignore_eos=True)
        to.answers = [result.outputs[0].tokens for result in results]
        stats = llm.stats().instance
        to.dram_tokens = stats.dram_tokens_reused if stats is not None else 0


def measure(options: dict[str, Any], args: Namespace, documents: list[str]) -> Outcome:
    """All of it with one dtype."""
    parts = build_parts(EngineOptions(**options, kv_memory_bytes=800 * MIB, dram_memory_bytes=800 * MIB))
    tokenizer, block_bytes = parts.model.tokenizer, parts.model.geometry.block_bytes
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"][: args.tokens] for text in documents]
    tokens = [prompt_tokens for prompt_tokens in tokens if len(prompt_tokens) == args.tokens]
    outcome = sizes(parts.device, block_bytes)
    forced(parts.device, tokens, outcome)
    parts.device.close()
    answered(
        options, [prompt_tokens[: args.tokens // 2] for prompt_tokens in tokens], block_bytes, args.answer, outcome
    )
    return outcome


def common(item: list[int], rival: list[int]) -> int:
    """Tokens that two answers share from the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(item, rival, strict=True)))


def main() -> None:
    args = options(
        __doc__, data=(Path, "folder with longdocs/; default: made from a seed"), documents=20,
        tokens=(1024, "of each document"), answer=(64, "tokens of each greedy answer"),
        model=("smollm2-135m-instruct", "folder, file or name"), dtype="auto", threads=int,
    )  # fmt: skip
    documents, rows, full, table = document_texts(args.data, args.documents), [], None, Table(COLUMNS)
    for lower in KV_DTYPES:
        engine = {"model": args.model, "dtype": args.dtype, "threads": args.threads, "kv_lower_dtype": lower}
        outcome = measure(engine, args, documents)
        full = full or outcome
        rows.append(row_of(lower, outcome, full, args.answer))
        table.show(rows[-1])
    print(f"\n{len(full.answers)} documents of {args.tokens} tokens, {len(full.logprobs):,} tokens judged")
    save(args, rows)


def row_of(lower: str, outcome: Outcome, full: Outcome, answer: int) -> dict[str, Any]:
    """A row of the table."""
    counts = [common(answer, right) for answer, right in zip(outcome.answers, full.answers, strict=True)]
    return {
        "lower": lower, **outcome.block_bytes, "down_gb_s": outcome.down_gb_s, "up_gb_s": outcome.up_gb_s,
        "perplexity": math.exp(-mean(outcome.logprobs)), "answers": len(counts), "answer": answer,
        "best": mean(token == right for token, right in zip(outcome.best, full.best, strict=True)),
        "alike": sum(count == answer for count in counts), "common": mean(counts), "dram_tokens": outcome.dram_tokens,
    }  # fmt: skip


if __name__ == "__main__":
    main()
