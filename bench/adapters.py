"""What LoRA adapters cost: steps of one engine whose rows have no adapter, one for all, or one each.

    python bench/adapters.py [--model MODEL] [--dtype auto] [--rank 16] [--rounds 5] [--loads] [--json FILE]

Adapters with random matrices are written for all linears of the layers (q, k, v, o, gate, up, down), and served by one
engine (``LLM(lora=...)``), beside an engine without any. Decode steps of 1 and of 8 sequences with 512 tokens each,
and a prefill of 512 tokens, in turn; printed are milliseconds a step, medians of the rounds, and how many times
as long as in the engine without adapters. ``--loads``: the engine has none at the start, and they are loaded while it
serves; printed is also how long a load takes, beside one sequence that decodes, its longest pause meanwhile, and the
memory that is kept for adapters.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from harness.flags import options, save
from harness.prompts import token_prompts
from harness.rounds import Samples, turns
from harness.tables import Table

from lora_files import save_adapter
from memserve import LLM
from memserve.base.config import DEFAULT_MODEL
from memserve.base.types import SamplingParams
from memserve.model.loading.loader import load_model

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS, DECODED, CONTEXT_TOKENS = 8, 48, 512
GREEDY = SamplingParams(temperature=0)
WAYS = ("no adapters at all", "served, none asked for", "one for all", "one each")


def asked(llm: LLM, way: str, prompts: list[list[int]], tokens: int) -> float:
    """Seconds until all ``prompts`` have ``tokens``, in steps that they share."""
    plans = []
    for slot, prompt in enumerate(prompts):
        name = {"one for all": "a0", "one each": f"a{slot % ADAPTERS}"}.get(way)
        plans.append((prompt, {} if name is None else {"adapter": name}))
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(plans)) as pool:
        calls = [
            pool.submit(llm.generate, [item], GREEDY, max_tokens=tokens, ignore_eos=True, **more)
            for item, more in plans
        ]
        for call in calls:
            call.result()
    return time.perf_counter() - begin


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """That nothing has cached."""
    return token_prompts(count, CONTEXT_TOKENS, rng)


def decode_ms(llm: LLM, way: str, rng: random.Random, count: int) -> float:
    """Of a step, with ``count`` sequences."""
    all_prompts = prompts(rng, count)
    asked(llm, way, all_prompts, 2)  # their prefixes are cached now
    few, many = (asked(llm, way, all_prompts, tokens) for tokens in (2, 2 + DECODED))
    return (many - few) / DECODED * 1e3


CASES = {
    "decode, 1 sequence": lambda llm, way, rng: decode_ms(llm, way, rng, 1),
    "decode, 8 sequences": lambda llm, way, rng: decode_ms(llm, way, rng, 8),
    "prefill, 512 tokens": lambda llm, way, rng: asked(llm, way, prompts(rng, 1), 1) * 1e3,
}


def load_beside(llm: LLM, lora: list[str], rng: random.Random) -> None:
    """Load all of ``lora`` while a sequence decodes."""
    arrivals: list[float] = []
    ended = threading.Event()

    def note_token() -> None:
        arrivals.append(time.perf_counter())

    def decode() -> None:
        while not ended.is_set():
            llm.generate(prompts(rng, 1), GREEDY, max_tokens=8 * DECODED, ignore_eos=True, on_progress=note_token)

    spent, pauses = [], []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(decode)
        time.sleep(1.0)
        for item in lora:
            begin = time.perf_counter()
            llm.load_adapter(*item.split("="))
            end = time.perf_counter()
            spent.append((end - begin) * 1e3)
            time.sleep(0.3)
            times = [at for at in [*arrivals] if begin - 0.1 < at < end + 0.1]
            pauses += [(late - early) * 1e3 for early, late in itertools.pairwise(times)]
        ended.set()
    pause = f"the longest pause between two tokens {max(pauses, default=0.0):.0f} ms"
    room = 0 if llm.model.adapters is None else llm.model.adapters.room_bytes
    print(f"room for adapters: {room >> 20} MiB")
    print(f"a load: median {statistics.median(spent):.0f} ms, beside one sequence that decodes; {pause}")


def main() -> None:
    args = options(__doc__, model=DEFAULT_MODEL, dtype="auto", rank=16, rounds=5, loads=False)
    rng, results = random.Random(time.time_ns()), {case: Samples() for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        module, lora = load_model(args.model, "float32").module, []
        for number in range(ADAPTERS):
            place = save_adapter(Path(folder) / f"a{number}", module, TARGETS, number, rank=args.rank, size=0.01)
            lora.append(f"a{number}={place}")
        del module
        plain = LLM(args.model, dtype=args.dtype, kv_memory="512MiB")
        ways = {"lora_folder": folder} if args.loads else {"lora": lora}
        served = LLM(args.model, dtype=args.dtype, kv_memory="512MiB", **ways)
        with plain, served:
            if args.loads:
                load_beside(served, lora, rng)
            for _, (case, way) in turns(args.rounds, product(CASES, WAYS)):
                results[case][way].append(CASES[case](plain if way == WAYS[0] else served, way, rng))
    print(f"{args.model}, rank {args.rank}, {ADAPTERS} adapters; ms")
    table = Table(["step", *WAYS])
    for case, times in results.items():
        cells = {way: f"{times.median(way):.1f} ({times.ratio(way, WAYS[0]):.2f}x)" for way in WAYS}
        table.show({"step": case, **cells})
    save(args, results)


if __name__ == "__main__":
    main()
