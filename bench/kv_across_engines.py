"""vLLM and memserve on one store, with ``share_with_memserve``: what one has computed is a hit in the other.

    python bench/kv_across_engines.py --vllm PYTHON --data FOLDER [--prompts 40] [--tokens 32]

PYTHON can import vllm (its CPU build: ``docs/guides/VLLM.md``); memserve is this checkout's. Prompts are real chats,
greedy in float32. Each engine first answers alone, then what the other one has computed: half of the prompts in one
direction, half in the other. The engines' own kernels differ in the last bits, so that is what is shown: answers equal
to those of the engine alone, those whose first other token is one of two that are less than ``TIE`` apart, and others.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from harness.chats import opening_ids
from harness.clients import TIMEOUT_S, Answer, ask_all, greedy
from harness.engines import ServedStore, Vllm, judge, recorded, running
from harness.processes import wait_until
from harness.served import BLOCK, serving

SETTLE_S = 30.0


@contextmanager
def memserve(args: Namespace, store: ServedStore | None, *more: str) -> Iterator[str]:
    """One colocated instance behind a router; its address."""
    flags = ["--dtype", "float32", "--colocated", "1", "--threads", "2", "--metadata", "none"]
    flags += ["--served-model-name", "x", *more]
    if store is not None:
        flags += ["--store", store.address, "--cluster-secret-file", str(store.secret_file)]
    with serving(*flags, model=args.model) as server:
        yield server.url
        server.stop()


def ask(url: str, prompt: list[int], tokens: int) -> Answer:
    """One completion of memserve's, greedy, whose tokens are texts."""
    answer = Answer(200)
    body = greedy(prompt, tokens, logprobs=2)
    raw = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).raise_for_status().json()
    answer.read(raw)
    answer.tokens = raw["choices"][0]["logprobs"]["tokens"]
    return answer


def compare(name: str, results: list[Answer], alone: list[Answer], prompts: list[list[int]]) -> dict[str, int]:
    """Token by token with the same engine alone."""
    counts: Counter[str] = Counter({"equal": 0, "ties": 0, "others": 0})
    for answer, right in zip(results, alone, strict=True):
        place = judge(name, answer, right, counts, "others")
        counts["equal tokens"] += len(right.tokens) if place is None else place
        counts["tokens from the other engine"] += answer.cached
    counts["whole blocks of the prompts, in tokens"] = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)
    print(f"{name}: {dict(counts)}", flush=True)
    return dict(counts)


def wait_for_blocks(store: ServedStore, prompts: list[list[int]]) -> None:
    """Until the store has all different whole blocks of ``prompts``."""
    blocks = {tuple(prompt[: end * BLOCK]) for prompt in prompts for end in range(1, len(prompt) // BLOCK + 1)}
    with store.client() as client:
        wait_until(lambda: client.statistics()["kv_stored"] >= len(blocks), f"{len(blocks)} blocks stored", SETTLE_S)


def measure(args: Namespace, folder: Path) -> dict[str, Any]:
    """Alone, then in both directions."""
    prompts = opening_ids(args.data, args.model, args.prompts, 2 * BLOCK + 1, 900)
    own_prompts, other_prompts = prompts[::2], prompts[1::2]
    tokens, record = args.tokens, {}

    def answers(source: Vllm | str, prompts: list[list[int]], count: int = tokens) -> list[Answer]:
        """Of memserve at an address, or of vLLM, two at a time."""
        if isinstance(source, str):
            return ask_all(lambda prompt: ask(source, prompt, count), prompts, 2)
        return ask_all(lambda prompt: source.ask(prompt, count), prompts, 2)

    alone = Vllm(args.vllm, args.model, log=folder / "alone.log")
    with running(alone):
        right_vllm = answers(alone, own_prompts)
    with memserve(args, None) as url:
        right_memserve = answers(url, other_prompts)
    with ServedStore(folder, dram="1GiB") as store:
        shares = {"share_with_memserve": True}
        sharing = Vllm(args.vllm, args.model, store, folder / "sharing.log", more=shares)
        with memserve(args, store) as url:
            answers(url, own_prompts, 1)
            wait_for_blocks(store, own_prompts)
            with running(sharing):
                results = answers(sharing, own_prompts)
                record["computed by memserve, answered by vLLM"] = compare("vLLM", results, right_vllm, own_prompts)
                answers(sharing, other_prompts, 1)
                wait_for_blocks(store, own_prompts + other_prompts)
            results = answers(url, other_prompts)
            record["computed by vLLM, answered by memserve"] = compare(
                "memserve", results, right_memserve, other_prompts
            )
        with memserve(args, store, "--no-foreign-kv") as url:
            results = answers(url, other_prompts)
            record["memserve with --no-foreign-kv"] = compare("--no-foreign-kv", results, right_memserve, other_prompts)
    return record


def main() -> None:
    data = (Path, "a folder of prompts, as lossless.py has it")
    recorded(__doc__, measure, required="data", data=data, prompts=40, tokens=32)


if __name__ == "__main__":
    main()
