"""By layer, by request, by request aggregated: what does each transfer mode cost, at low and at high load?

    python bench/transfer_modes.py [--links shm,nixl] [--prompt-tokens 2048] [--clients 1,2,4,8] [--rounds 3]
    python bench/transfer_modes.py --links shm --modes by-request --clients 1 --degrees 1:1,2:2,1:2,2:1

One pair of instances per mode and link, all started before anything is measured; modes take turns inside each round.
Prompts are random tokens, so that nothing is cached. *Gap* is the time between the first token (from the prefill
instance) and the second (from the decode instance), less the time of a later token: the part of the transfer that the
prefill did not hide. By-request sends everything after the prefill, so its gap is the whole transfer, with which
*hidden* compares. With more clients, the mean request time and the requests a second show which mode wins under load.
``--degrees P:D``: workers of the prefill and of the decode instance (``--prefill-tensor-parallel``), so that the gaps
of by-request compare unequal ends with equal ones.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from served import serving

MODES = ("by-request", "by-request-agg", "by-layer")
VOCABULARY = 40_000


def ask(url: str, model: str, prompt: list[int], new_tokens: int) -> list[float]:
    """Times of the tokens in ms since the request."""
    body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, "stream": True}
    started, times = time.perf_counter(), []
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"temperature": 0}, timeout=600) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append((time.perf_counter() - started) * 1e3)
    return times


def measure(url: str, model: str, prompts: list[list[int]], clients: int, new_tokens: int) -> dict[str, float]:
    """One round: every prompt once, ``clients`` at a time."""
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: ask(url, model, prompt, new_tokens), prompts))
    seconds = time.perf_counter() - started
    gaps = [times[1] - times[0] - statistics.median(b - a for a, b in pairwise(times[2:]))
            for times in answers]  # fmt: skip
    return {
        "ttft_ms": statistics.median(times[0] for times in answers),
        "gap_ms": statistics.median(gaps),
        "jct_ms": statistics.mean(times[-1] for times in answers),
        "requests_per_s": len(prompts) / seconds,
    }


def main() -> int:
    """Start all pairs, take turns, print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="default: the bundled one")
    parser.add_argument("--links", default="shm,nixl")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--degrees", default="1:1", help="pairs of tensor parallel degrees, comma-separated")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--clients", default="1,4")
    parser.add_argument("--prompts", type=int, default=4, help="prompts per round and client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", default="", help="further options of memserve serve, in one string")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng, results = random.Random(0), []
    options = [*(("--model", args.model) if args.model else ()), *args.serve.split()]
    shape = ("--prefill", "1", "--decode", "1")
    for link in args.links.split(","):
        with ExitStack() as stack:
            cases = [(mode, degree) for mode in args.modes.split(",") for degree in args.degrees.split(",")]
            servers = {}
            for mode, degree in cases:
                prefill, _, decode = degree.partition(":")
                cut = ("--prefill-tensor-parallel", prefill, "--decode-tensor-parallel", decode)
                words = (*shape, *cut, "--transfer", mode, "--link", link, "--caching", "off", *options)
                servers[mode, degree] = stack.enter_context(serving(*words))
            for clients in map(int, args.clients.split(",")):
                rounds: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in servers}
                for turn in range(args.rounds + 1):  # the first round warms up
                    for case, server in servers.items():
                        count, size = args.prompts * clients if turn else 1, args.prompt_tokens
                        prompts = [[rng.randrange(3, VOCABULARY) for _ in range(size)] for _ in range(count)]
                        found = measure(server.url, server.model, prompts, clients, args.new_tokens)
                        if turn:
                            rounds[case].append(found)
                medians = {
                    case: {key: statistics.median(r[key] for r in runs) for key in runs[0]}
                    for case, runs in rounds.items()
                }
                for (mode, degree), found in medians.items():
                    record: dict[str, Any] = {"link": link, "clients": clients, "mode": mode, "degrees": degree}
                    record |= {key: round(value, 2) for key, value in found.items()}
                    whole = medians.get(("by-request", degree), {}).get("gap_ms", 0.0)
                    if whole > 0:
                        record["hidden"] = round(1 - found["gap_ms"] / whole, 3)
                    results.append(record)
                    print(json.dumps(record), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
