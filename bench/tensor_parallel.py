"""One instance with several threads beside one with several workers of one thread each: the same cores, the same model.

    python bench/tensor_parallel.py [--workers 2] [--model FOLDER] [--dtype float32] [--rounds 5] [--json FILE]

Both are whole engines in processes of their own, used in turn: decode steps of 1 and of 8 sequences with 512 tokens of
context each, and prefills of 512 and of 2,048 tokens. Their KV memory was filled once before: the first touch of memory
can take longer than what is measured (``--cold``: it was not). Printed: milliseconds a step, or a prefill, the medians
of the rounds; how many times as fast the workers are (1: as fast; targets 0.9 for decode, 0.95 for prefill); and which
share of their time the leader waits for the others, beyond the first microseconds of each wait.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from memserve import LLM
from memserve.base.types import SamplingParams

DECODED = 64
CONTEXT_TOKENS = 512
VOCAB = 49_000
KV_MEMORY_MIB = 384
FILLING_TOKENS = 2048


def prompts(rng: random.Random, count: int, tokens: int) -> list[list[int]]:
    """That nothing has cached."""
    return [[rng.randrange(5, VOCAB) for _ in range(tokens)] for _ in range(count)]


def decode_ms(llm: LLM, rng: random.Random, count: int) -> float:
    """Of a step, with ``count`` sequences."""
    asked, times = prompts(rng, count, CONTEXT_TOKENS), []
    llm.generate(asked, SamplingParams(temperature=0), max_tokens=2, ignore_eos=True)  # their prefixes are cached now
    for tokens in (2, 2 + DECODED):
        begin = time.perf_counter()
        llm.generate(asked, SamplingParams(temperature=0), max_tokens=tokens, ignore_eos=True)
        times.append(time.perf_counter() - begin)
    return (times[1] - times[0]) / DECODED * 1e3


def prefill_ms(llm: LLM, rng: random.Random, tokens: int) -> float:
    """Of a prompt that nothing has cached."""
    asked = prompts(rng, 1, tokens)
    begin = time.perf_counter()
    llm.generate(asked, SamplingParams(temperature=0), max_tokens=1)
    return (time.perf_counter() - begin) * 1e3


CASES = {
    "decode, 1 sequence": lambda llm, rng: decode_ms(llm, rng, 1),
    "decode, 8 sequences": lambda llm, rng: decode_ms(llm, rng, 8),
    "prefill, 512 tokens": lambda llm, rng: prefill_ms(llm, rng, 512),
    "prefill, 2,048 tokens": lambda llm, rng: prefill_ms(llm, rng, 2048),
}


def fill(llm: LLM) -> None:
    """Let prompts use all of the KV memory once."""
    blocks = llm.stats().instance.hbm.blocks_total
    tokens = blocks * llm.model.geometry.block_tokens
    for asked in prompts(random.Random(-1), -(-tokens // FILLING_TOKENS), FILLING_TOKENS):
        llm.generate([asked], SamplingParams(temperature=0), max_tokens=1)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="measure while KV memory is touched for the first time")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options: dict[str, Any] = {"dtype": args.dtype, "threads": args.workers, "kv_memory": f"{KV_MEMORY_MIB}MiB"}
    options |= {"model": args.model} if args.model else {}
    lines: dict[str, Any] = {}
    spawning = multiprocessing.get_context("spawn")
    for way, more in (("threads", {}), ("workers", {"tensor_parallel": args.workers})):
        lines[way], theirs = spawning.Pipe()
        spawning.Process(target=serve, args=(options | more, theirs, args.cold)).start()
        lines[way].recv()
    record: dict[str, Any] = {}
    for name in CASES:
        found: dict[str, list[float]] = {way: [] for way in lines}
        waited: list[float] = []
        for turn in range(args.rounds + 1):
            for way in list(lines)[:: 1 if turn % 2 else -1]:
                lines[way].send((name, 100 * turn + len(record)))
                ms, share = lines[way].recv()
                if turn:  # the first is the first use of each shape
                    found[way].append(ms)
                    waited += [share] if way == "workers" else []
        ratios = [one / other for one, other in zip(found["threads"], found["workers"], strict=True)]
        row = {way: statistics.median(times) for way, times in found.items()}
        record[name] = {**row, "ratio": statistics.median(ratios), "waited": statistics.median(waited)}
        print(
            f"{name:<22} threads {row['threads']:8.2f} ms, workers {row['workers']:8.2f} ms: "
            f"{record[name]['ratio']:.2f} times as fast; waits {record[name]['waited']:.1%}",
            flush=True,
        )
    for line in lines.values():
        line.send(None)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
