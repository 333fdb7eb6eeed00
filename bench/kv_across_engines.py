"""vLLM and memserve on one store, with ``share_with_memserve``: what one has computed is a hit in the other.

    python bench/kv_across_engines.py --vllm PYTHON --data FOLDER [--prompts 40] [--tokens 32]

PYTHON can import vllm (its CPU build: ``docs/guides/VLLM.md``); memserve is this checkout's. Prompts are real chats,
greedy in float32. Each engine first answers alone, then what the other one has computed: half of the prompts in one
direction, half in the other. The engines' own kernels differ in the last bits, so that is what is shown: answers equal
to those of the engine alone, those whose first other token is one of two that are less than ``TIE`` apart, and others.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from chats import opening_ids
from vllm_servers import ANSWER_S, TIE, Answer, Vllm, recorded, running

from served_store import ServedStore

BLOCK = 32
SETTLE_S = 30.0


@dataclass
class SharingVllm(Vllm):
    """A server whose blocks are memserve's."""

    @property
    def transfer(self) -> dict[str, Any]:
        """As the guide has it."""
        told = super().transfer
        told["kv_connector_extra_config"]["share_with_memserve"] = True
        return told


@contextmanager
def memserve(model: str, store: ServedStore | None, log: Path, *more: str) -> Iterator[str]:
    """One colocated instance behind a router; its address."""
    command = [sys.executable, "-m", "memserve", "serve", "--model", model, "--dtype", "float32", "--port", "0"]
    command += ["--colocated", "1", "--threads", "2", "--metadata", "none", "--served-model-name", "x", *more]
    if store is not None:
        command += ["--store", store.address, "--cluster-secret-file", str(store.secret_file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log.open("ab"), text=True)
    try:
        assert process.stdout is not None
        ready = next((found for line in process.stdout if (found := re.search(r"(http://[\d.:]+)/v1", line))), None)
        assert ready is not None, log.read_text()[-2000:]
        yield ready[1]
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, prompt: list[int], tokens: int) -> Answer:
    """One completion of memserve's, greedy."""
    body = {"model": "x", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        found = json.loads(answer.read())
    choice, gaps = found["choices"][0], list[float]()
    for top in choice["logprobs"]["top_logprobs"]:
        best = sorted(top.values(), reverse=True)
        gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
    cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(choice["logprobs"]["tokens"], gaps, cached, 0.0, time.perf_counter() - begin)


def all_of(one: Callable[[list[int]], Answer], prompts: list[list[int]]) -> list[Answer]:
    """Their answers, two at a time."""
    with ThreadPoolExecutor(2) as asking:
        return list(asking.map(one, prompts))


def compare(name: str, found: list[Answer], alone: list[Answer], prompts: list[list[int]]) -> dict[str, int]:
    """Token by token with the same engine alone."""
    counts: Counter[str] = Counter({"equal": 0, "ties": 0, "others": 0})
    for mine, right in zip(found, alone, strict=True):
        at = next(
            (at for at, pair in enumerate(zip(mine.tokens, right.tokens, strict=True)) if len(set(pair)) > 1), None
        )
        counts["equal" if at is None else "ties" if right.gaps[at] < TIE else "others"] += 1
        counts["equal tokens"] += len(right.tokens) if at is None else at
        counts["tokens from the other engine"] += mine.cached
        if at is not None:
            print(f"  another token at {at}, where the two best are {right.gaps[at]:.2g} apart")
    counts["whole blocks of the prompts, in tokens"] = sum((len(one) - 1) // BLOCK * BLOCK for one in prompts)
    print(f"{name}: {dict(counts)}", flush=True)
    return dict(counts)


def settled(store: ServedStore, blocks: int) -> None:
    """Until the store has so many KV blocks more than none."""
    deadline = time.monotonic() + SETTLE_S
    with store.client() as client:
        while client.statistics()["kv_stored"] < blocks:
            if time.monotonic() > deadline:
                raise SystemExit(f"only {client.statistics()['kv_stored']} of {blocks} blocks came to the store")
            time.sleep(0.05)


def blocks_of(prompts: list[list[int]]) -> int:
    """Different whole blocks."""
    return len({tuple(one[: end * BLOCK]) for one in prompts for end in range(1, len(one) // BLOCK + 1)})


def measure(options: Namespace, folder: Path) -> dict[str, Any]:
    prompts = opening_ids(options.data, options.model, options.prompts, 2 * BLOCK + 1, 900)
    mine, theirs = prompts[::2], prompts[1::2]
    log, tokens, record = folder / "memserve.log", options.tokens, {}
    alone = Vllm(options.vllm, options.model, cpus="0-1", log=folder / "alone.log")
    with running(alone):
        right_vllm = all_of(lambda prompt: alone.ask(prompt, tokens), mine)
    with memserve(options.model, None, log) as url:
        right_memserve = all_of(lambda prompt: ask(url, prompt, tokens), theirs)
    with ServedStore(folder, dram="1GiB") as store:
        where = store.address, str(store.secret_file)
        sharing = SharingVllm(options.vllm, options.model, *where, "0-1", log=folder / "sharing.log")
        with memserve(options.model, store, log) as url:
            all_of(lambda prompt: ask(url, prompt, 1), mine)
            settled(store, blocks_of(mine))
            with running(sharing):
                found = all_of(lambda prompt: sharing.ask(prompt, tokens), mine)
                record["computed by memserve, answered by vLLM"] = compare("vLLM", found, right_vllm, mine)
                all_of(lambda prompt: sharing.ask(prompt, 1), theirs)
                settled(store, blocks_of(mine + theirs))
            found = all_of(lambda prompt: ask(url, prompt, tokens), theirs)
            record["computed by vLLM, answered by memserve"] = compare("memserve", found, right_memserve, theirs)
        with memserve(options.model, store, log, "--no-foreign-kv") as url:
            found = all_of(lambda prompt: ask(url, prompt, tokens), theirs)
            record["memserve with --no-foreign-kv"] = compare("--no-foreign-kv", found, right_memserve, theirs)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of prompts, as lossless.py has it")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=32)
    recorded(parser, measure)


if __name__ == "__main__":
    main()
