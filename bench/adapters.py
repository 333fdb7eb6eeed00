"""What LoRA adapters cost: steps of one engine whose rows have no adapter, one for all, or one each.

    python bench/adapters.py [--model MODEL] [--dtype auto] [--rank 16] [--rounds 5] [--json FILE]

Adapters with random matrices are written for all linears of the layers (q, k, v, o, gate, up, down), and served by one
engine (``LLM(lora=...)``), beside an engine without any. Decode steps of 1 and of 8 sequences with 512 tokens each,
and a prefill of 512 tokens, in turn; printed are milliseconds a step, medians of the rounds, and how many times
as long as in the engine without adapters.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from lora_files import save_adapter
from memserve import LLM
from memserve.base.config import DEFAULT_MODEL
from memserve.base.types import SamplingParams
from memserve.model.loading.loader import load_model

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS, DECODED, CONTEXT_TOKENS, VOCAB = 8, 48, 512, 49_000
GREEDY = SamplingParams(temperature=0)
WAYS = ("no adapters at all", "served, none asked for", "one for all", "one each")


def asked(llm: LLM, way: str, prompts: list[list[int]], tokens: int) -> float:
    """Seconds until all ``prompts`` have ``tokens``, in steps that they share."""
    plans = []
    for at, prompt in enumerate(prompts):
        name = {"one for all": "a0", "one each": f"a{at % ADAPTERS}"}.get(way)
        plans.append((prompt, {} if name is None else {"adapter": name}))
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(plans)) as pool:
        calls = [
            pool.submit(llm.generate, [one], GREEDY, max_tokens=tokens, ignore_eos=True, **more) for one, more in plans
        ]
        for call in calls:
            call.result()
    return time.perf_counter() - begin


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """That nothing has cached."""
    return [[rng.randrange(5, VOCAB) for _ in range(CONTEXT_TOKENS)] for _ in range(count)]


def decode_ms(llm: LLM, way: str, rng: random.Random, count: int) -> float:
    """Of a step, with ``count`` sequences."""
    some = prompts(rng, count)
    asked(llm, way, some, 2)  # their prefixes are cached now
    few, many = (asked(llm, way, some, tokens) for tokens in (2, 2 + DECODED))
    return (many - few) / DECODED * 1e3


CASES = {
    "decode, 1 sequence": lambda llm, way, rng: decode_ms(llm, way, rng, 1),
    "decode, 8 sequences": lambda llm, way, rng: decode_ms(llm, way, rng, 8),
    "prefill, 512 tokens": lambda llm, way, rng: asked(llm, way, prompts(rng, 1), 1) * 1e3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = random.Random(time.time_ns())
    with tempfile.TemporaryDirectory() as folder:
        module = load_model(args.model, "float32").module
        lora = []
        for at in range(ADAPTERS):
            place = save_adapter(Path(folder) / f"a{at}", module, TARGETS, at, rank=args.rank, size=0.01)
            lora.append(f"a{at}={place}")
        del module
        plain = LLM(args.model, dtype=args.dtype, kv_memory="512MiB")
        served = LLM(args.model, dtype=args.dtype, kv_memory="512MiB", lora=lora)
        found: dict[str, dict[str, list[float]]] = {case: {way: [] for way in WAYS} for case in CASES}
        with plain, served:
            for _ in range(args.rounds):
                for case, measure in CASES.items():
                    for way in rng.sample(WAYS, len(WAYS)):
                        found[case][way].append(measure(plain if way == WAYS[0] else served, way, rng))
    print(f"| {args.model}, rank {args.rank}, {ADAPTERS} adapters; ms | {' | '.join(WAYS)} |")
    print("| --- " * (1 + len(WAYS)) + "|")
    for case, ways in found.items():
        medians = [statistics.median(times) for times in ways.values()]
        ratios = [
            statistics.median(t / p for t, p in zip(times, ways[WAYS[0]], strict=True)) for times in ways.values()
        ]
        cells = [f"{ms:.1f} ({ratio:.2f}x)" for ms, ratio in zip(medians, ratios, strict=True)]
        print(f"| {case} | {' | '.join(cells)} |")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
