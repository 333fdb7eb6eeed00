"""Benchmarks of the field, run with their own tools: memserve, vLLM with memserve's connector, vLLM alone.

    python bench/field.py --vllm VENV/bin/python --lmcache VENV/bin/python --sglang VENV/bin/python --data DIR
        [--only trace,random,long-doc,chat,multi-turn] [--servers memserve,pool,vllm] [--json FILE]

Each tool runs in an environment of its own, as its authors publish it; one that is absent is skipped, with the reason:

    trace, random    ``vllm bench serve`` (0.32): Mooncake's tool-agent trace, timed, with lengths divided by 16 (blocks
                     of 512 tokens become blocks of 32); random prompts of 256 tokens behind a prefix of 256
    long-doc, chat   ``lmcache bench engine`` (0.5.6): long-doc-qa, multi-round-chat
    multi-turn       SGLang's ``bench_serving`` (0.5.9): chats of four turns behind two shared prompts; its
                     ``bench_multiturn`` is in no package

Three servers of one model, one dtype, two threads each; all run from start to end and one at a time is loaded, another
one first in each benchmark. ``--kv-tokens`` of KV memory each; memserve and vLLM with the connector have
``--more-tokens`` behind it: memserve's own DRAM tier, and a ``memserve store``. On a CPU that is ordinary memory, too,
so this shows what the second tier is worth, not a fixed budget (``vllm_shared.py`` does).

Requests per second and the time to the first token are the tools' own figures. Hits and the ceiling come from a proxy
between tool and server (``recorder.py``), for all servers alike: what was cached, and what could have been.
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.chats import load_tokenizer
from harness.engines import ServedStore, Vllm, running
from harness.flags import Commas, options, parts_of, save, working_folder
from harness.processes import end_in_order
from harness.rounds import turns
from harness.served import BLOCK as BLOCK_TOKENS
from harness.served import bundled_model, serving
from harness.tables import show
from harness.tools import LMCACHE, SGLANG, VLLM, Target, Tool, words_of_lmcache, words_of_sglang, words_of_vllm
from recorder import Ceiling, Recorder, recording
from vllm_shared import kv_bytes

TRACE = "traces/mooncake_toolagent_fragment.jsonl.gz"
SCALE = 16
"""By which the lengths of the trace are divided: its blocks are then as large as the servers'."""
LONGEST_TOKENS = 1800
CONTEXT = 2048
NOT_HERE = {
    "MLPerf Storage, KV cache": "no package installs it (pip knows no mlperf-kv-cache and no mlpstorage), and its "
    "backends are memory of its own and files in a folder: it measures a disk, not a store that is spoken to"
}

Command = Callable[[Namespace, Target], list[str]]


@dataclass(frozen=True)
class Bench:
    """A tool with one of its workloads."""

    name: str
    tool: Tool
    """An option of its name names the interpreter."""
    command: Command


# -- the tools


def trace(args: Namespace, target: Target) -> list[str]:
    """The first requests of the trace that fit, at ``--trace-rate`` a second on average."""
    with gzip.open(args.data / TRACE, "rt", encoding="utf-8") as lines:
        every = [json.loads(line) for line in lines]
    items_kept = [item for item in every if item["input_length"] <= LONGEST_TOKENS * SCALE][: args.requests]
    first_ms = items_kept[0]["timestamp"]
    seconds = (items_kept[-1]["timestamp"] - first_ms) / 1000 or 1.0
    for item in items_kept:
        item["timestamp"] -= first_ms
        for key in ("input_length", "output_length"):
            item[key] = max(2, math.ceil(item[key] / SCALE))
    (target.folder / "trace.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items_kept))
    stretched = len(items_kept) / args.trace_rate / seconds / 1000
    labels = {"timestamp": "timestamp", "input-length": "input_length", "output-length": "output_length",
              "hash-ids": "hash_ids"}  # fmt: skip
    words = ["--dataset-name", "timed_trace", "--dataset-path", str(target.folder / "trace.jsonl"), "--self-timed"]
    words += ["--timed-trace-chunk-hash-size", str(512 // SCALE), "--timed-trace-sec-multiplier", f"{stretched:.6f}"]
    words += [word for name, key in labels.items() for word in (f"--timed-trace-label-{name}", key)]
    return words_of_vllm(target, *words, "--num-prompts", str(len(items_kept)))


def random(args: Namespace, target: Target) -> list[str]:
    words = ["--dataset-name", "random", "--random-prefix-len", "256", "--random-input-len", "256"]
    words += ["--random-output-len", "16", "--num-prompts", str(args.requests), "--max-concurrency", "4"]
    return words_of_vllm(target, *words)


def long_doc(args: Namespace, target: Target) -> list[str]:
    """Documents of 768 tokens, a half more than fit in the engine's memory; two questions about each."""
    documents = math.ceil(1.5 * args.kv_tokens / 768)
    words = ["--tokens-per-gb-kvcache", str(documents * 768), "--ldqa-document-length", "768"]
    words += ["--ldqa-query-per-document", "2", "--ldqa-num-inflight-requests", "2", "--ldqa-max-output-length", "16"]
    return words_of_lmcache(target, "long-doc-qa", *words)


def chat(args: Namespace, target: Target) -> list[str]:
    """Users with a history of 768 tokens, a half more than fit; one request a second altogether."""
    users = math.ceil(1.5 * args.kv_tokens / 768)
    words = ["--tokens-per-gb-kvcache", str(users * 768), "--mrc-shared-prompt-length", "256"]
    words += ["--mrc-chat-history-length", "512", "--mrc-user-input-length", "32", "--mrc-output-length", "16"]
    words += ["--mrc-qps", str(args.chat_rate), "--mrc-duration", str(args.requests / args.chat_rate)]
    return words_of_lmcache(target, "multi-round-chat", *words)


def multi_turn(args: Namespace, target: Target) -> list[str]:
    words = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "2"]
    words += ["--gsp-prompts-per-group", str(max(1, args.requests // 8)), "--gsp-system-prompt-len", "512"]
    words += ["--gsp-question-len", "64", "--gsp-output-len", "16", "--gsp-num-turns", "4", "--max-concurrency", "4"]
    return words_of_sglang(target, *words, "--num-prompts", str(args.requests))


BENCHES = (
    Bench("trace", VLLM, trace),
    Bench("random", VLLM, random),
    Bench("long-doc", LMCACHE, long_doc),
    Bench("chat", LMCACHE, chat),
    Bench("multi-turn", SGLANG, multi_turn),
)


def absent(bench: Bench, args: Namespace) -> str | None:
    """Why it cannot run; None: it can."""
    python = getattr(args, bench.tool.name)
    if not python:
        return f"--{bench.tool.name} PYTHON was not given"
    if bench.name == "trace" and (args.data is None or not (args.data / TRACE).is_file()):
        return f"--data DIR with {TRACE} was not given"
    return bench.tool.absence(python)


def run_tool(bench: Bench, args: Namespace, url: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        target = Target(url, args.model, Path(folder), args.seed)
        try:
            return bench.tool.run(getattr(args, bench.tool.name), bench.command(args, target), target.folder)
        except RuntimeError as error:
            print(f"{bench.name}: {error}")
            return {"done": 0, "requests_per_s": math.nan, "ttft_ms": math.nan}


# -- the servers


@contextmanager
def memserve(args: Namespace, folder: Path) -> Iterator[str]:
    """With its own second tier."""
    token_bytes = kv_bytes(args.model, args.dtype) // BLOCK_TOKENS
    flags = ["--in-process", "--threads", "2", "--served-model-name", args.model, "--dtype", args.dtype]
    flags += ["--max-model-len", str(CONTEXT), "--max-running", "8"]
    flags += ["--kv-memory", f"{args.kv_tokens * token_bytes >> 10}KiB"]
    flags += ["--dram-memory", f"{args.more_tokens * token_bytes >> 10}KiB"]
    with serving(*flags, model=args.model) as server:
        yield server.url


@contextmanager
def vllm(args: Namespace, folder: Path, store: ServedStore | None = None) -> Iterator[str]:
    """Alone, or on a store."""
    flags = ("--num-gpu-blocks-override", str(args.kv_tokens // BLOCK_TOKENS), "--max-model-len", str(CONTEXT))
    log = folder / f"vllm-{'alone' if store is None else 'store'}.log"
    server = Vllm(args.vllm, args.model, store, log, args.cpus, (*flags, "--max-num-seqs", "8"), args.model, args.dtype)
    with running(server):
        yield server.url


@contextmanager
def pool(args: Namespace, folder: Path) -> Iterator[str]:
    kib = args.more_tokens * kv_bytes(args.model, args.dtype) // BLOCK_TOKENS >> 10
    with ServedStore(folder, dram=f"{kib}KiB") as store, vllm(args, folder, store) as url:
        yield url


SERVERS = {"memserve": memserve, "pool": pool, "vllm": vllm}
NAMES = {"memserve": "memserve", "pool": "vLLM with memserve", "vllm": "vLLM alone"}


# -- the run


def measure(benches: list[Bench], args: Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row for each benchmark and server."""
    names = [name for name in args.servers if args.vllm or name == "memserve"]
    tokenizer, rows = load_tokenizer(args.model), []
    with ExitStack() as stack:
        recorders: dict[str, Recorder] = {}
        for name in names:
            url = stack.enter_context(SERVERS[name](args, folder))
            recorders[name] = stack.enter_context(recording(url))
        ceilings = {name: Ceiling(tokenizer, BLOCK_TOKENS) for name in names}
        for number, name in turns(len(benches), names):
            figures = run_tool(benches[number], args, recorders[name].url)
            shares = ceilings[name].shares(recorders[name].take())
            figures |= {"requests": shares.requests, "hits": shares.hits, "ceiling": shares.ceiling}
            rows.append({"bench": benches[number].name, "server": NAMES[name], **figures})
            print(rows[-1], flush=True)
    order = list(NAMES.values())
    return sorted(
        rows, key=lambda row: ([bench.name for bench in benches].index(row["bench"]), order.index(row["server"]))
    )


COLUMNS = {
    "benchmark": "{bench}", "server": "{server}", "requests": "{requests}", "requests/s": "{requests_per_s:.2f}",
    "TTFT, mean": "{ttft_ms:,.0f} ms", "hits": "{hits:.1%}", "attainable": "{ceiling:.1%}",
}  # fmt: skip


def main() -> None:
    args = options(
        __doc__, vllm="", lmcache=("", "a Python that can import lmcache and openai"),
        sglang=("", "a Python with sglang and what its bench_serving imports"),
        only=Commas(*(bench.name for bench in BENCHES)), servers=Commas(*SERVERS), data=Path, model="",
        dtype="bfloat16", requests=(32, "of a benchmark, about"), trace_rate=(1.0, "requests a second"),
        chat_rate=(1.0, "requests a second"), kv_tokens=4096, more_tokens=32768, cpus=("0-1", "cores of vLLM"), seed=1,
        folder=Path,
    )  # fmt: skip
    args.model = args.model or bundled_model(args.dtype)
    end_in_order()
    skipped, benches = dict(NOT_HERE), []
    for bench in parts_of(args.only, {bench.name: bench for bench in BENCHES}).values():
        if reason := absent(bench, args):
            skipped[bench.name] = reason
        else:
            benches.append(bench)
    with working_folder(args.folder) as folder:
        rows = measure(benches, args, folder) if benches else []
    show(rows, COLUMNS)
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    save(args, {"rows": rows, "skipped": skipped})


if __name__ == "__main__":
    main()
