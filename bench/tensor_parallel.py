"""One instance with several threads beside one with several workers of one thread each: the same cores, the same model.

    python bench/tensor_parallel.py [--workers 2] [--model FOLDER] [--dtype float32] [--rounds 5] [--json FILE]

Both are whole engines in processes of their own, used in turn: decode steps of 1 and of 8 sequences with 512 tokens of
context each, and prefills of 512 and of 2,048 tokens. Their KV memory was filled once before: the first touch of memory
can take longer than what is measured (``--cold``: it was not). Printed: milliseconds a step, or a prefill, the medians
of the rounds; how many times as fast the workers are (1: as fast; targets 0.9 for decode, 0.95 for prefill); and which
share of their time the leader waits for the others, beyond the first microseconds of each wait.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from typing import Any

from harness.flags import options, save
from harness.prompts import token_prompts
from harness.rounds import Samples, seconds, turns
from harness.tables import Table

from memserve import LLM
from memserve.base.types import SamplingParams

DECODED = 64
CONTEXT_TOKENS = 512
KV_MEMORY_MIB = 384
FILLING_TOKENS = 2048


GREEDY = SamplingParams(temperature=0)


def decode_ms(llm: LLM, rng: random.Random, count: int) -> float:
    """Of a step, with ``count`` sequences."""
    prompts = token_prompts(count, CONTEXT_TOKENS, rng)
    llm.generate(prompts, GREEDY, max_tokens=2, ignore_eos=True)  # their prefixes are cached now
    few_s, many_s = (
        seconds(lambda tokens=tokens: llm.generate(prompts, GREEDY, max_tokens=tokens, ignore_eos=True))
        for tokens in (2, 2 + DECODED)
    )
    return (many_s - few_s) / DECODED * 1e3


def prefill_ms(llm: LLM, rng: random.Random, tokens: int) -> float:
    """Of a prompt that nothing has cached."""
    prompts = token_prompts(1, tokens, rng)
    return 1e3 * seconds(lambda: llm.generate(prompts, GREEDY, max_tokens=1))


CASES = {
    "decode, 1 sequence": lambda llm, rng: decode_ms(llm, rng, 1),
    "decode, 8 sequences": lambda llm, rng: decode_ms(llm, rng, 8),
    "prefill, 512 tokens": lambda llm, rng: prefill_ms(llm, rng, 512),
    "prefill, 2,048 tokens": lambda llm, rng: prefill_ms(llm, rng, 2048),
}


def fill(llm: LLM) -> None:
    """Let prompts use all of the KV memory once."""
    tokens = llm.stats().instance.hbm.blocks_total * llm.model.geometry.block_tokens
    for prompt in token_prompts(-(-tokens // FILLING_TOKENS), FILLING_TOKENS, random.Random(-1)):
        llm.generate([prompt], GREEDY, max_tokens=1)


def serve(options: dict[str, Any], line: Connection, cold: bool) -> None:
    """A process with one engine: measures what it is told."""
    with LLM(**options) as llm:
        if not cold:
            fill(llm)
        device = llm._engine._instance._device
        line.send("ready")
        while (order := line.recv()) is not None:
            name, seed = order
            before, begin = getattr(device, "waited_ns", 0), time.perf_counter()
            ms = CASES[name](llm, random.Random(seed))
            waited_s = (getattr(device, "waited_ns", 0) - before) / 1e9
            line.send((ms, waited_s / (time.perf_counter() - begin)))


COLUMNS = {
    "step": "{case}", "threads": "{threads:.2f} ms", "workers": "{workers:.2f} ms", "times as fast": "{ratio:.2f}",
    "the leader waits": "{waited:.1%}",
}  # fmt: skip


def main() -> None:
    args = options(
        __doc__, workers=2, model="", dtype="float32", rounds=5,
        cold=(False, "measure while KV memory is touched for the first time"),
    )  # fmt: skip
    engine: dict[str, Any] = {"dtype": args.dtype, "threads": args.workers, "kv_memory": f"{KV_MEMORY_MIB}MiB"}
    engine |= {"model": args.model} if args.model else {}
    lines, spawning, record = {}, multiprocessing.get_context("spawn"), {}
    for way, more in (("threads", {}), ("workers", {"tensor_parallel": args.workers})):
        lines[way], far_end = spawning.Pipe()
        spawning.Process(target=serve, args=(engine | more, far_end, args.cold)).start()
        lines[way].recv()
    table = Table(COLUMNS)
    for case in CASES:
        times, waited = Samples(), Samples()
        for number, way in turns(args.rounds, lines, warm=1):  # the first is the first use of each shape
            lines[way].send((case, 100 * (number + 1) + len(record)))
            ms, share = lines[way].recv()
            if number >= 0:
                times[way].append(ms)
                waited[way].append(share)
        row = {way: times.median(way) for way in lines}
        record[case] = row | {"ratio": times.ratio("threads", "workers"), "waited": waited.median("workers")}
        table.show({"case": case, **record[case]})
    for line in lines.values():
        line.send(None)
    save(args, record)


if __name__ == "__main__":
    main()
