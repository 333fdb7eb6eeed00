"""By layer, by request, aggregated, `auto`: what does each transfer mode cost, at low and at high load?

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

import sys
import time
from argparse import Namespace
from contextlib import ExitStack
from itertools import product
from random import Random

from harness.clients import ask_all, completion
from harness.flags import Commas, options, save
from harness.prompts import token_prompts
from harness.rounds import mean, median, medians, turns
from harness.served import Served, serving
from harness.tables import Table

MODES = ("by-request", "by-request-agg", "by-layer", "auto")
COLUMNS = {
    "link": "{link}", "clients": "{clients}", "mode": "{mode}", "degrees": "{degrees}", "TTFT, ms": "{ttft_ms:.1f}",
    "gap, ms": "{gap_ms:.2f}", "hidden": "{hidden:.1%}", "JCT, ms": "{jct_ms:.1f}", 
    "requests/s": "{requests_per_s:.2f}",
}  # fmt: skip


def measure(server: Served, prompts: list[list[int]], clients: int, new_tokens: int) -> dict[str, float]:
    """One round: every prompt once, ``clients`` at a time."""
    started = time.perf_counter()
    answers = ask_all(lambda prompt: completion(server.url, prompt, new_tokens).checked(), prompts, clients)
    spent_s = time.perf_counter() - started
    gaps_s = [answer.steps_s[0] - median(answer.steps_s[2:]) for answer in answers]
    return {
        "ttft_ms": 1e3 * median(answer.first_s for answer in answers),
        "gap_ms": 1e3 * median(gaps_s),
        "jct_ms": 1e3 * mean(answer.total_s for answer in answers),
        "requests_per_s": len(prompts) / spent_s,
    }


def start(stack: ExitStack, link: str, args: Namespace) -> dict[tuple[str, str], Served]:
    """A pair of instances for each mode and degree."""
    servers = {}
    for mode, degree in product(args.modes, args.degrees):
        prefill, _, decode = degree.partition(":")
        cut = ("--prefill-tensor-parallel", prefill, "--decode-tensor-parallel", decode)
        flags = ("--prefill", "1", "--decode", "1", *cut, "--transfer", mode, "--link", link, "--caching", "off")
        flags += ("--served-model-name", "x", *args.serve.split())
        servers[mode, degree] = stack.enter_context(serving(*flags, model=args.model))
    return servers


def main() -> None:
    """Start all pairs of a link, take turns, print a row per case."""
    args = options(
        __doc__, model="", links=Commas("shm", "nixl"), modes=Commas(*MODES), prompt_tokens=2048, new_tokens=12,
        degrees=(Commas("1:1"), "pairs of tensor parallel degrees"), clients=Commas(1, 4), rounds=3,
        prompts=(4, "prompts per round and client"), serve=("", "further options of memserve serve, in one string"),
    )  # fmt: skip
    rng, rows, table = Random(0), [], Table(COLUMNS)
    for link in args.links:
        with ExitStack() as stack:
            servers = start(stack, link, args)
            for clients in args.clients:
                results: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in servers}
                for number, case in turns(args.rounds, servers, warm=1):
                    count = args.prompts * clients if number >= 0 else 1
                    prompts = token_prompts(count, args.prompt_tokens, rng)
                    row = measure(servers[case], prompts, clients, args.new_tokens)
                    results[case] += [row] if number >= 0 else []
                figures = {case: medians(measurements) for case, measurements in results.items()}
                for (mode, degree), case_figures in figures.items():
                    rows.append({"link": link, "clients": clients, "mode": mode, "degrees": degree, **case_figures})
                    whole = figures.get(("by-request", degree), {}).get("gap_ms", 0.0)
                    rows[-1]["hidden"] = 1 - case_figures["gap_ms"] / whole if whole > 0 else None
                    table.show(rows[-1])
    save(args, rows)


if __name__ == "__main__":
    sys.exit(main())
