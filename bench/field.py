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

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chats import load_tokenizer
from recorder import Ceiling, Recorder, recording
from rivals import bundled_model
from served import end_in_order, serving
from vllm_servers import ServedStore, Vllm, running
from vllm_shared import BLOCK_TOKENS, block_bytes

TOOL_S = 900.0
TRACE = "traces/mooncake_toolagent_fragment.jsonl.gz"
SCALE = 16
"""By which the lengths of the trace are divided: its blocks are then as large as the servers'."""
LONGEST_TOKENS = 1800
CONTEXT = 2048
NOT_HERE = {
    "MLPerf Storage, KV cache": "no package installs it (pip knows no mlperf-kv-cache and no mlpstorage), and its "
    "backends are memory of its own and files in a folder: it measures a disk, not a store that is spoken to"
}
Args = Namespace
Command = Callable[[Args, str, Path], list[str]]


@dataclass(frozen=True)
class Bench:
    """A tool with one of its workloads."""

    name: str
    python: str
    """The option that names the interpreter."""
    tool: tuple[str, ...]
    """The interpreter's words that start it."""
    command: Command
    figures: Callable[[Path], dict[str, float]]


# -- the tools

VLLM = (  # `vllm bench serve` as such asks for a package named vllm, and the CPU build has another name
    "-c",
    "from vllm.benchmarks import serve; from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser; "
    "parser = Parser(); serve.add_cli_args(parser); serve.main(parser.parse_args())",
)
LMCACHE = ("-m", "lmcache.cli.main", "bench", "engine")
SGLANG = (  # not by `-m`, which loads the whole engine first
    "-c",
    "import importlib.util, runpy; package = importlib.util.find_spec('sglang').submodule_search_locations[0]; "
    "runpy.run_path(package + '/bench_serving.py', run_name='__main__')",
)


def vllm_bench(args: Args, url: str, folder: Path, *more: str) -> list[str]:
    words = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
    words += ["--model", args.model, "--ready-check-timeout-sec", "0", "--ignore-eos", "--disable-tqdm"]
    words += ["--save-result", "--result-dir", str(folder), "--result-filename", "answer.json"]
    return [*words, "--seed", str(args.seed), "--temperature", "0", *more]


def trace(args: Args, url: str, folder: Path) -> list[str]:
    """The first requests of the trace that fit, at ``--trace-rate`` a second on average."""
    with gzip.open(args.data / TRACE, "rt", encoding="utf-8") as lines:
        every = [json.loads(line) for line in lines]
    kept = [one for one in every if one["input_length"] <= LONGEST_TOKENS * SCALE][: args.requests]
    first_ms = kept[0]["timestamp"]
    seconds = (kept[-1]["timestamp"] - first_ms) / 1000 or 1.0
    for one in kept:
        one["timestamp"] -= first_ms
        for key in ("input_length", "output_length"):
            one[key] = max(2, math.ceil(one[key] / SCALE))
    (folder / "trace.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    stretched = len(kept) / args.trace_rate / seconds / 1000
    labels = {"timestamp": "timestamp", "input-length": "input_length", "output-length": "output_length",
              "hash-ids": "hash_ids"}  # fmt: skip
    words = ["--dataset-name", "timed_trace", "--dataset-path", str(folder / "trace.jsonl"), "--self-timed"]
    words += ["--timed-trace-chunk-hash-size", str(512 // SCALE), "--timed-trace-sec-multiplier", f"{stretched:.6f}"]
    words += [word for name, key in labels.items() for word in (f"--timed-trace-label-{name}", key)]
    return vllm_bench(args, url, folder, *words, "--num-prompts", str(len(kept)))


def random(args: Args, url: str, folder: Path) -> list[str]:
    words = ["--dataset-name", "random", "--random-prefix-len", "256", "--random-input-len", "256"]
    words += ["--random-output-len", "16", "--num-prompts", str(args.requests), "--max-concurrency", "4"]
    return vllm_bench(args, url, folder, *words)


def lmcache(args: Args, url: str, folder: Path, workload: str, *more: str) -> list[str]:
    words = ["--engine-url", url, "--model", args.model]
    words += ["--workload", workload, "--output-dir", str(folder), "--json", "--no-csv", "--quiet", "--ignore-eos"]
    return [*words, "--no-interactive", "--seed", str(args.seed), "--kv-cache-volume", "1", *more]


def long_doc(args: Args, url: str, folder: Path) -> list[str]:
    """Documents of 768 tokens, a half more than fit in the engine's memory; two questions about each."""
    documents = math.ceil(1.5 * args.kv_tokens / 768)
    words = ["--tokens-per-gb-kvcache", str(documents * 768), "--ldqa-document-length", "768"]
    words += ["--ldqa-query-per-document", "2", "--ldqa-num-inflight-requests", "2", "--ldqa-max-output-length", "16"]
    return lmcache(args, url, folder, "long-doc-qa", *words)


def chat(args: Args, url: str, folder: Path) -> list[str]:
    """Users with a history of 768 tokens, a half more than fit; one request a second altogether."""
    users = math.ceil(1.5 * args.kv_tokens / 768)
    words = ["--tokens-per-gb-kvcache", str(users * 768), "--mrc-shared-prompt-length", "256"]
    words += ["--mrc-chat-history-length", "512", "--mrc-user-input-length", "32", "--mrc-output-length", "16"]
    words += ["--mrc-qps", str(args.chat_rate), "--mrc-duration", str(args.requests / args.chat_rate)]
    return lmcache(args, url, folder, "multi-round-chat", *words)


def multi_turn(args: Args, url: str, folder: Path) -> list[str]:
    words = ["--backend", "vllm-chat", "--base-url", url, "--model", args.model]
    words += ["--tokenizer", args.model, "--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "2"]
    words += ["--gsp-prompts-per-group", str(max(1, args.requests // 8)), "--gsp-system-prompt-len", "512"]
    words += ["--gsp-question-len", "64", "--gsp-output-len", "16", "--gsp-num-turns", "4", "--max-concurrency", "4"]
    words += ["--num-prompts", str(args.requests), "--seed", str(args.seed), "--warmup-requests", "0"]
    return [*words, "--disable-tqdm", "--output-file", str(folder / "answer.json")]


def of_serving(folder: Path) -> dict[str, float]:
    """vLLM's and SGLang's answers have the same names."""
    told = json.loads((folder / "answer.json").read_text().splitlines()[-1])
    return {"done": told["completed"], "requests_per_s": told["request_throughput"], "ttft_ms": told["mean_ttft_ms"]}


def of_lmcache(folder: Path) -> dict[str, float]:
    told = json.loads((folder / "bench_summary.json").read_text())["results"]
    done = told["successful_requests"]
    return {"done": done, "requests_per_s": done / told["elapsed_time"], "ttft_ms": told["mean_ttft_ms"]}


BENCHES = (
    Bench("trace", "vllm", VLLM, trace, of_serving),
    Bench("random", "vllm", VLLM, random, of_serving),
    Bench("long-doc", "lmcache", LMCACHE, long_doc, of_lmcache),
    Bench("chat", "lmcache", LMCACHE, chat, of_lmcache),
    Bench("multi-turn", "sglang", SGLANG, multi_turn, of_serving),
)


def environment() -> dict[str, str]:
    """Of a tool: equal prompts in each run (`timed_trace` draws them by Python's hash), and nothing from a hub."""
    quiet = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **quiet}


def absent(bench: Bench, args: Args) -> str | None:
    """Why it cannot run; None: it can."""
    python = getattr(args, bench.python)
    if not python:
        return f"--{bench.python} PYTHON was not given"
    if bench.name == "trace" and (args.data is None or not (args.data / TRACE).is_file()):
        return f"--data DIR with {TRACE} was not given"
    tried = subprocess.run(
        [python, *bench.tool, "--help"], env=environment(), capture_output=True, text=True, timeout=TOOL_S
    )
    return None if tried.returncode == 0 else f"{python}: {(tried.stderr.strip().splitlines() or ['no word'])[-1]}"


def run_tool(bench: Bench, args: Args, url: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [getattr(args, bench.python), *bench.tool, *bench.command(args, url, Path(folder))]
        run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TOOL_S)
        if run.returncode:
            print(f"{bench.name}: the tool ended with {run.returncode}\n{(run.stdout + run.stderr)[-2000:]}")
            return {"done": 0, "requests_per_s": math.nan, "ttft_ms": math.nan}
        return bench.figures(Path(folder))


# -- the servers


@contextmanager
def memserve(args: Args, folder: Path) -> Iterator[str]:
    nbytes = block_bytes(args.model, args.dtype) // BLOCK_TOKENS
    words = ["--in-process", "--threads", "2", "--model", args.model, "--served-model-name", args.model]
    words += ["--dtype", args.dtype, "--max-model-len", str(CONTEXT), "--max-running", "8"]
    words += ["--kv-memory", f"{args.kv_tokens * nbytes >> 10}KiB"]
    with serving(*words, "--dram-memory", f"{args.more_tokens * nbytes >> 10}KiB") as server:
        yield server.url


@contextmanager
def vllm(args: Args, folder: Path, *store: str) -> Iterator[str]:
    flags = ("--num-gpu-blocks-override", str(args.kv_tokens // BLOCK_TOKENS), "--max-model-len", str(CONTEXT))
    log = folder / f"vllm{len(store)}.log"
    server = Vllm(
        args.vllm, args.model, *store, cpus=args.cpus, flags=(*flags, "--max-num-seqs", "8"), log=log,
        name=args.model, dtype=args.dtype,
    )  # fmt: skip
    with running(server):
        yield server.url


@contextmanager
def pool(args: Args, folder: Path) -> Iterator[str]:
    kib = args.more_tokens * block_bytes(args.model, args.dtype) // BLOCK_TOKENS >> 10
    with (
        ServedStore(folder, dram=f"{kib}KiB") as store,
        vllm(args, folder, store.address, str(store.secret_file)) as url,
    ):
        yield url


SERVERS = {"memserve": memserve, "pool": pool, "vllm": vllm}
NAMES = {"memserve": "memserve", "pool": "vLLM with memserve", "vllm": "vLLM alone"}


# -- the run


def measure(benches: list[Bench], args: Args, folder: Path) -> list[dict[str, Any]]:
    """One row for each benchmark and server."""
    names = [name for name in args.servers.split(",") if args.vllm or name == "memserve"]
    tokenizer, rows = load_tokenizer(args.model), []
    with ExitStack() as stack:
        recorders: dict[str, Recorder] = {}
        for name in names:
            url = stack.enter_context(SERVERS[name](args, folder))
            recorders[name] = stack.enter_context(recording(url))
        ceilings = {name: Ceiling(tokenizer, BLOCK_TOKENS) for name in names}
        for turn, bench in enumerate(benches):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                told = run_tool(bench, args, recorders[name].url)
                shares = ceilings[name].shares(recorders[name].take())
                seen = {"requests": shares.requests, "hits": shares.hits, "ceiling": shares.ceiling}
                rows.append({"bench": bench.name, "server": NAMES[name], **told, **seen})
                print(rows[-1], flush=True)
    order = list(NAMES.values())
    return sorted(rows, key=lambda row: ([one.name for one in benches].index(row["bench"]), order.index(row["server"])))


def show(rows: list[dict[str, Any]]) -> None:
    print("| benchmark | server | requests | requests/s | TTFT, mean | hits | attainable |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['bench']} | {row['server']} | {row['requests']} | {row['requests_per_s']:.2f} | "
            f"{row['ttft_ms']:,.0f} ms | {row['hits']:.1%} | {row['ceiling']:.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="", help="a Python that can import vllm (its CPU build)")
    parser.add_argument("--lmcache", default="", help="a Python that can import lmcache and openai")
    parser.add_argument("--sglang", default="", help="a Python with sglang and what its bench_serving imports")
    parser.add_argument("--only", default=",".join(bench.name for bench in BENCHES))
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--data", type=Path, help="the folder of data sets (docs/guides/BENCH.md)")
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=32, help="of a benchmark, about")
    parser.add_argument("--trace-rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--chat-rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--kv-tokens", type=int, default=4096)
    parser.add_argument("--more-tokens", type=int, default=32768)
    parser.add_argument("--cpus", default="0-1", help="cores of vLLM")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for logs; default: a temporary one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.model = args.model or bundled_model(args.dtype)
    end_in_order()
    wanted, skipped = [], dict(NOT_HERE)
    for bench in (one for one in BENCHES if one.name in args.only.split(",")):
        if reason := absent(bench, args):
            skipped[bench.name] = reason
        else:
            wanted.append(bench)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = measure(wanted, args, folder) if wanted else []
    show(rows)
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": rows, "skipped": skipped}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
