"""What writing KV to a store adds to prefill: ``memserve serve`` with a store beside one without, in turns.

    python bench/store_prefill.py [--tokens 512,2048,8192] [--rounds 9] [--streams 4] [--json FILE]

Two servers that differ in ``--store-dram`` alone, each with one instance; what that computes its store takes at once.
In each round each of them computes one prompt of each length, of random tokens that are found nowhere, and says one
token: once *idle*, and once *busy*, while so many ``--streams`` of it are being answered. The longest prompt is cut to
what the model's context takes.

* *wall*: seconds to the first token, with a store by without one: the median of the rounds' ratios, and the quartiles.
* *CPU*: of the instance's threads up to the first token, with a store by without one; what they take *behind* it, until
  all lies in the store, and what the *store's* process takes beyond what it takes at rest, both as a share of the
  prompt's own. Other programs change these less. Of the idle instance alone: else steps of the streams are in it.

*Written* is the least share of a prompt's blocks that the store took: with less, less was measured. The store is full
from the second round on, as one that has run for a while. Seals are computed in both servers; what is measured is the
offer, the store's copy, and what it tells the router.
"""

from __future__ import annotations

import random
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

from harness.clients import completion, greedy, meanwhile, stream
from harness.flags import Commas, options, save
from harness.processes import threads_cpu_s
from harness.prompts import random_tokens
from harness.rounds import Samples, median, ratios, spread, turns
from harness.served import BLOCK, WAIT_S, Side, plain_side
from harness.tables import show

CONTEXT_TOKENS = 8192
STREAM_TOKENS = 2000
"""Of an answer beside which prompts are computed; a new one begins when it ends."""
STATES = ("idle", "busy")
FIGURES = ("first_s", "cpu_s", "after_s", "store_cpu_s", "written")
WRITTEN_S = 30.0


class Written:
    """Waits until the KV of a prompt lies in the store of ``side``."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._before = self._blocks()

    def _blocks(self) -> float:
        return self._side.total("store_kv_blocks_stored")

    def wait(self, tokens: int) -> float:
        """Until the blocks of so many more tokens have come, or have not for :data:`WRITTEN_S`; the share that came.
        On a busy machine an instance does not lend all that it offers."""
        blocks = tokens // BLOCK
        end_s = time.monotonic() + WRITTEN_S
        while (share := (self._blocks() - self._before) / blocks) < 1 and time.monotonic() < end_s:
            time.sleep(0.2)
        return min(1.0, share)


@contextmanager
def busy(side: Side, streams: int, rng: random.Random) -> Iterator[None]:
    """So many answers are written as long as the block runs, all of which have begun."""
    begun = threading.Barrier(streams + 1)

    def answer(over: threading.Event, prompt: list[int]) -> None:
        is_first = True

        def on_event(_: Any) -> bool:
            nonlocal is_first
            if is_first:
                is_first = False
                begun.wait(WAIT_S)
            return over.is_set()

        while not over.is_set():
            stream(side.server.url, greedy(prompt, STREAM_TOKENS), on_event=on_event)

    prompts = [random_tokens(BLOCK - 1, rng) for _ in range(streams)]  # less than a block: nothing to write at first
    with meanwhile(*(lambda over, prompt=prompt: answer(over, prompt) for prompt in prompts)):
        begun.wait(WAIT_S)
        yield


def prefill(side: Side, has_store: bool, prompt: list[int], settle_s: float) -> dict[str, float]:
    """One prompt: seconds to the first token, CPU time of the instance until then and behind it, and of the store."""
    members = side.server.children()
    store = members.get("s1")
    begin_s = threads_cpu_s(store) if store else 0.0
    time.sleep(settle_s)
    rest_s = (threads_cpu_s(store) - begin_s) / settle_s if store else 0.0  # a second, for what is not this prompt
    written = Written(side) if has_store else None
    before_s = {name: threads_cpu_s(pid) for name, pid in members.items()}
    began_s = time.monotonic()
    answer = completion(side.server.url, prompt, 1).checked()
    cpu_s = threads_cpu_s(members["c1"]) - before_s["c1"]
    share = 1.0
    if written is not None:
        share = written.wait(len(prompt))
    else:
        time.sleep(settle_s)  # as long as a heartbeat of the store takes
    after_s = threads_cpu_s(members["c1"]) - before_s["c1"] - cpu_s
    store_s = threads_cpu_s(store) - before_s["s1"] - rest_s * (time.monotonic() - began_s) if store else 0.0
    return {"first_s": answer.first_s, "cpu_s": cpu_s, "after_s": after_s, "store_cpu_s": store_s, "written": share}


def measure(args: Namespace) -> dict[str, Samples]:
    """Samples of each figure, by state, tokens and server."""
    flags = ["--dtype", args.dtype, "--kv-memory", args.kv_memory, "--draft-tokens", "0"]
    samples: dict[str, Samples] = {name: Samples() for name in FIGURES}
    rng = random.Random(args.seed)
    with (
        plain_side("without", *flags, model=args.model) as without,
        plain_side("store", *flags, "--store-dram", args.store_dram, model=args.model) as stored,
    ):
        for number, side in turns(args.rounds, (without, stored), warm=1):
            for state, tokens in product(args.states, args.tokens):
                prompt = random_tokens(min(tokens, CONTEXT_TOKENS - BLOCK), rng)
                if state == "busy":
                    with busy(side, args.streams, rng):
                        figures = prefill(side, side is stored, prompt, args.settle_s)
                else:
                    figures = prefill(side, side is stored, prompt, args.settle_s)
                for name, value in figures.items() if number >= 0 else ():
                    samples[name][state, tokens, side.name].append(value)
            print(f"round {number + 1} of {args.rounds}: {side.name}", flush=True)
    return samples


def rows_of(args: Namespace, samples: dict[str, Samples]) -> Iterator[dict[str, Any]]:
    """A row for each state and length."""
    for state, tokens in product(args.states, args.tokens):
        without, stored = (state, tokens, "without"), (state, tokens, "store")
        wall = ratios(samples["first_s"][stored], samples["first_s"][without])
        spent_s = samples["cpu_s"].median(without)
        behind_s = samples["after_s"].median(stored) - samples["after_s"].median(without)
        row = {
            "state": state, "tokens": min(tokens, CONTEXT_TOKENS - BLOCK), "rounds": len(wall),
            "first_ms": 1e3 * samples["first_s"].median(without), "wall": median(wall), "wall_text": spread(wall),
            "written": min(samples["written"][stored]),
        }  # fmt: skip
        if state == "idle":  # beside streams, steps of these are in all of it
            cpu = ratios(samples["cpu_s"][stored], samples["cpu_s"][without])
            row |= {"cpu": median(cpu), "cpu_text": spread(cpu), "behind": behind_s / spent_s}
            row |= {"store_cpu": samples["store_cpu_s"].median(stored) / spent_s}
        yield row


def main() -> None:
    args = options(
        __doc__, tokens=Commas(512, 2048, 8192), states=Commas(*STATES), rounds=9, model="", dtype="bfloat16",
        streams=(4, "answers that are written at the same time, of a busy instance"), kv_memory="512MiB",
        store_dram=("384MiB", "less than a round writes: its memory was used before"), seed=1,
        settle_s=(2.5, "seconds for which a store is watched at rest"),
        quick={"tokens": [512, 2048], "rounds": 3},
    )  # fmt: skip
    samples = measure(args)
    rows = list(rows_of(args, samples))
    show(rows, {
        "instance": "{state}", "prompt": "{tokens:,} tokens", "TTFT without": "{first_ms:,.0f} ms",
        "TTFT, with / without": "{wall_text}", "its CPU, with / without": "{cpu_text}",
        "behind it": "{behind:.2%}", "store's CPU": "{store_cpu:.2%}",
        "written, at least": "{written:.0%}",
    })  # fmt: skip
    parts = {name: [{"of": list(key), "s": values} for key, values in of.items()] for name, of in samples.items()}
    save(args, {"points": rows, "samples": parts})


if __name__ == "__main__":
    main()
