"""The field's own load tools against memserve, vLLM on the CPU and llama.cpp's server, in turn, on this machine.

    python bench/leaderboard.py --tools DIR --vllm VENV/bin/python --llama-server PATH [--install] [--short] [--fresh]

``--tools``: a folder with an environment for each tool (``DIR/aiperf``, ``DIR/guidellm``, ...), which has vLLM and
``llama-server`` as well, unless they are named; ``--install`` makes the environments that lack, by pip. What is not
installed is left out, with how to get it. One model at a time, the same weights
for all:

    plain       the bundled model in bfloat16: chat, documents, agents
    quantised   its GGUF file as it is, which vLLM's CPU build does not read
    hybrid      short convolutions and attention (LFM2's layers), random weights: speed alone

All servers of a model run from start to end, and one at a time is loaded, another one first in each load and each
round. A load is a tool with one of its own workloads; prompts are the tool's, from a seed that changes with round and
load, and equal for all servers. Answers go on to the same length (``ignore_eos``). Requests a second, the mean time
to the first token and the mean time between tokens are the tool's own figures.

Every run is written to ``--json`` at once: the same command goes on where it was stopped, or where ``--minutes`` were
over. ``scripts/leaderboard.py`` writes the page. Beside each run stands which share of the machine others took.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.contenders import Contender, Model, contenders, models, started
from harness.flags import Commas, options, parts_of, working_folder
from harness.processes import MachineShare, end_in_order
from harness.tools import (
    NOT_HERE,
    TOOLS,
    Target,
    Tool,
    pin_tools,
    with_hub_cache,
    words_of_aiperf,
    words_of_guidellm,
    words_of_lmcache,
    words_of_sglang,
    words_of_vllm,
)  # fmt: skip

RESULTS = ROOT / "bench" / "results" / "leaderboard.json"
MODELS = ("plain", "quantised", "hybrid")
ANSWERED_MIN = 0.5
"""Of the requests of a run: with less it fails. Figures are of those that were answered; the page says how many."""
Words = Callable[[Target], list[str]]
Record = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """A tool with one of its workloads, on one model."""

    model: str
    workload: str
    tool: str
    about: str
    words: Words
    requests: int
    """0: they come by the clock, and their rate says nothing of the server."""
    is_short: bool = False
    """A part of ``--short``."""

    @property
    def key(self) -> str:
        return f"{self.model}/{self.workload}/{self.tool}"


# -- the loads


def aiperf_chats(target: Target) -> list[str]:
    words = ["--conversation-num", "8", "--num-dataset-entries", "8", "--concurrency", "4"]
    words += ["--conversation-turn-mean", "3", "--conversation-turn-stddev", "0"]
    return words_of_aiperf(target, *words, "--isl", "96", "--isl-stddev", "0", "--osl", "48", "--osl-stddev", "0")


def aiperf_agents(target: Target) -> list[str]:
    words = ["--conversation-num", "4", "--num-dataset-entries", "4", "--concurrency", "4"]
    words += ["--conversation-turn-mean", "6", "--conversation-turn-stddev", "0"]
    words += ["--conversation-turn-delay-mean", "300", "--conversation-turn-delay-stddev", "0"]
    words += ["--shared-system-prompt-length", "512", "--user-context-prompt-length", "512"]
    return words_of_aiperf(target, *words, "--isl", "128", "--isl-stddev", "0", "--osl", "24", "--osl-stddev", "0")


def guidellm_chats(target: Target) -> list[str]:
    return words_of_guidellm(target, 4, 24, prompt_tokens=192, output_tokens=48)


def guidellm_documents(target: Target) -> list[str]:
    documents = {"prefix_tokens": 1536, "prefix_count": 4}
    return words_of_guidellm(target, 2, 16, prompt_tokens=64, output_tokens=16, **documents)


def vllm_chats(target: Target) -> list[str]:
    words = ["--dataset-name", "random", "--random-input-len", "192", "--random-output-len", "48"]
    return words_of_vllm(target, *words, "--num-prompts", "24", "--max-concurrency", "4")


def vllm_documents(target: Target) -> list[str]:
    words = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "4"]
    words += ["--prefix-repetition-prefix-len", "1536", "--prefix-repetition-suffix-len", "64"]
    words += ["--prefix-repetition-output-len", "16", "--num-prompts", "16", "--max-concurrency", "2"]
    return words_of_vllm(target, *words)


def sglang_agents(target: Target) -> list[str]:
    words = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "1", "--gsp-prompts-per-group", "4"]
    words += ["--gsp-system-prompt-len", "768", "--gsp-question-len", "128", "--gsp-output-len", "24"]
    return words_of_sglang(target, *words, "--gsp-num-turns", "6", "--num-prompts", "4", "--max-concurrency", "4")


def lmcache_chats(target: Target) -> list[str]:
    words = ["--tokens-per-gb-kvcache", str(4 * 640), "--mrc-shared-prompt-length", "256"]
    words += ["--mrc-chat-history-length", "384", "--mrc-user-input-length", "32", "--mrc-output-length", "16"]
    return words_of_lmcache(target, "multi-round-chat", *words, "--mrc-qps", "1.5", "--mrc-duration", "10")


def lmcache_documents(target: Target) -> list[str]:
    words = ["--tokens-per-gb-kvcache", str(4 * 1536), "--ldqa-document-length", "1536"]
    words += ["--ldqa-query-per-document", "3", "--ldqa-num-inflight-requests", "2", "--ldqa-max-output-length", "16"]
    return words_of_lmcache(target, "long-doc-qa", *words)


CHATS = "8 chats of 3 turns, 96 new tokens and answers of 48, 4 at once"
QUESTIONS = "24 prompts of 192 tokens, answers of 48, 4 at once"
DOCUMENTS = "16 questions of 64 tokens about 4 documents of 1,536, answers of 16, 2 at once"
AGENTS = "4 sessions of 6 turns, 300 ms apart, behind 512 shared and 512 own tokens: 128 new ones, answers of 24"
LOADS = (
    Load("plain", "chat", "aiperf", CHATS, aiperf_chats, 24),
    Load("plain", "chat", "guidellm", QUESTIONS, guidellm_chats, 24, is_short=True),
    Load("plain", "chat", "lmcache", "multi-round QA: 4 users with histories of 640 tokens, 1.5 questions a second, "
         "answers of 16", lmcache_chats, 0),
    Load("plain", "documents", "guidellm", DOCUMENTS, guidellm_documents, 16),
    Load("plain", "documents", "vllm", DOCUMENTS, vllm_documents, 16, is_short=True),
    Load("plain", "documents", "lmcache", "long-document QA: 4 documents of 1,536 tokens, each asked 3 times, answers "
         "of 16, 2 at once", lmcache_documents, 12),
    Load("plain", "agents", "aiperf", AGENTS, aiperf_agents, 24, is_short=True),
    Load("plain", "agents", "sglang", "4 sessions of 6 turns behind 768 shared tokens: 128 new ones, answers of 24",
         sglang_agents, 24),
    Load("quantised", "chat", "guidellm", QUESTIONS, guidellm_chats, 24, is_short=True),
    Load("quantised", "agents", "aiperf", AGENTS, aiperf_agents, 24),
    Load("hybrid", "chat", "vllm", QUESTIONS, vllm_chats, 24),
    Load("hybrid", "agents", "aiperf", AGENTS, aiperf_agents, 24),
)  # fmt: skip


# -- the tools that are there


def python_of(args: Namespace, tool: Tool) -> str:
    """The interpreter of a tool's environment; empty: there is none."""
    if tool.name == "vllm":
        return str(args.vllm)
    return there(args.tools / tool.name / "bin" / "python")


def there(path: Path) -> str:
    """The path, where something is; else nothing."""
    return str(path) if path.exists() else ""


def install(folder: Path, names: list[str]) -> None:
    """Make the environments of tools that lack. Raises ``CalledProcessError`` where pip fails."""
    for name in names:
        place = folder / name
        if (place / ".done").exists():
            continue
        print(f"installing {name} into {place} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        for words in TOOLS[name].installs:
            command = [str(place / "bin" / "python"), "-m", "pip", "--quiet", *words.split(" ")]
            subprocess.run(command, check=True)
        (place / ".done").touch()


def tools_here(args: Namespace, names: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Versions of the tools that can run, and why the others cannot."""
    versions, reasons = {}, dict(NOT_HERE)
    for name in names:
        tool = TOOLS[name]
        how = ", ".join(f"`pip {words}`" for words in tool.installs)
        python = python_of(args, tool)
        if not python:
            reasons[name] = f"not installed: `--install` makes its environment, by {how}"
            continue
        try:
            versions[name] = tool.version(python)
        except (OSError, subprocess.CalledProcessError) as error:
            reasons[name] = without_folders(f"{python} has no {tool.package}: {error}; {how}")
    return versions, reasons


# -- the record


def machine() -> str:
    """Processor, cores and memory, in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{os.cpu_count()} cores of {name}, {gib:.0f} GiB"


def opened(args: Namespace, loads: list[Load]) -> Record:
    """What an earlier run wrote, or a new record; one of other settings, or of another machine, is put aside."""
    names = ("dtype", "eager", "serve", "seed", "tool_cpus", "context")
    settings = {name: getattr(args, name) for name in names}
    fresh = {"machine": machine(), "settings": settings, "note": args.note, "tools": {}, "absent": {}, "servers": {},
             "missing": {}, "loads": {}, "rows": []}  # fmt: skip
    record = json.loads(args.json.read_text()) if args.json.exists() and not args.fresh else fresh
    if (record["settings"], record["machine"]) != (fresh["settings"], fresh["machine"]):
        if record["rows"]:
            aside = args.json.with_suffix(".old")
            args.json.replace(aside)
            print(f"{args.json} is of other settings or another machine: it is {aside} now", flush=True)
        record = fresh
    record["rounds"] = args.rounds
    for load in loads:
        record["loads"].setdefault(
            load.key, {"about": load.about, "is_timed": load.requests == 0, "requests": load.requests}
        )
    return record


def write(args: Namespace, record: Record) -> None:
    """All of it, in one piece: a run that is stopped leaves a whole file."""
    fresh = args.json.with_suffix(".new")
    fresh.write_text(json.dumps(record, indent=1) + "\n")
    fresh.replace(args.json)


# -- the run


def keep_cores(count: int) -> list[int]:
    """This process and the servers that it starts keep all cores but the last ``count``, which tools get: AIPerf keeps
    one busy all the time, and servers whose threads wait for each other suffer unequally where it takes theirs."""
    cores = sorted(os.sched_getaffinity(0))
    if not 0 <= count < len(cores):
        raise SystemExit(f"--tool-cpus {count}: there are {len(cores)} cores, and servers need one")
    own = cores[: len(cores) - count]
    os.sched_setaffinity(0, own)
    if count:
        pin_tools(cores[-count:])
    return own


@dataclass(frozen=True)
class Turn:
    """One load on one server in one round."""

    round: int
    load: Load
    server: str

    @property
    def place(self) -> dict[str, Any]:
        return {"round": self.round, "load": self.load.key, "server": self.server}


def turns_of(args: Namespace, loads: list[Load], servers: list[str]) -> Iterator[Turn]:
    """Round by round, load by load; each load of each round begins with another server."""
    for number in range(args.rounds):
        for place, load in enumerate(loads):
            first = (number + place) % len(servers) if servers else 0
            line = servers[first:] + servers[:first]
            yield from (Turn(number, load, server) for server in line)


def left(record: Record, planned: Iterator[Turn]) -> list[Turn]:
    """The turns that have not been run, or failed."""
    done = [{name: row[name] for name in ("round", "load", "server")} for row in record["rows"] if "failed" not in row]
    return [turn for turn in planned if turn.place not in done]


def run_turn(args: Namespace, turn: Turn, contender: Contender, model: Model, folder: Path) -> Record:
    """A row of the record, and the tool's command."""
    tool, place = TOOLS[turn.load.tool], folder / f"{turn.load.key.replace('/', '-')}-{turn.server}-{turn.round}"
    place.mkdir(exist_ok=True)
    seed = args.seed + 100 * turn.round + list(LOADS).index(turn.load)
    words = turn.load.words(Target(contender.url, model.folder, place, seed))
    hub = with_hub_cache(folder / Path(model.folder).name, model.folder) if tool.name == "aiperf" else {}
    share, began_s, before_s = MachineShare(), time.monotonic(), contender.cpu_s()
    row: Record = {**turn.place, "command": plain_command(tool, words, contender, model, place)}
    try:
        row |= tool.run(python_of(args, tool), words, place, **hub)
        if row["done"] < ANSWERED_MIN * turn.load.requests:
            raise RuntimeError(f"{row['done']:.0f} of {turn.load.requests} requests are answered")
    except RuntimeError as error:
        row["failed"] = without_folders(str(error))[-500:]
    row |= {"seconds": time.monotonic() - began_s, "cpu_s": contender.cpu_s() - before_s, "others": share.others()}
    return row


def plain_command(tool: Tool, words: list[str], contender: Contender, model: Model, place: Path) -> str:
    """As a reader would type it, without the names of this machine's folders."""
    start = {"vllm": "vllm bench serve", "sglang": "python -m sglang.bench_serving", "aiperf": "aiperf profile",
             "guidellm": "guidellm run", "lmcache": "lmcache bench engine"}[tool.name]  # fmt: skip
    text = " ".join([start, *map(shlex.quote, words)])
    return text.replace(contender.url, "URL").replace(model.folder, "MODEL").replace(str(place), "FOLDER")


def about_of(contender: Contender, model: Model) -> Record:
    """The same of a server: version, command, and seconds until it was ready."""
    command = str(contender.about["command"])
    for path, word in ((model.gguf, "MODEL.gguf"), (Path(model.gguf).name, "MODEL.gguf"), (model.folder, "MODEL")):
        command = command.replace(path, word)
    return contender.about | {"command": command}


def without_folders(text: str) -> str:
    """With the last name of each path alone: a reader has other folders."""
    return re.sub(r"/[\w.+-]+(?:/[\w.+@=-]+)+", lambda path: Path(path[0]).name, text)


def said(row: Record) -> str:
    """Of a run, in a line."""
    if "failed" in row:
        return "FAILED: " + row["failed"].strip().splitlines()[-1][:200]
    tpot = f", {row['tpot_ms']:.1f} ms a token" if row.get("tpot_ms") else ""
    return f"{row['requests_per_s']:.2f} requests/s, TTFT {row['ttft_ms']:,.0f} ms{tpot}; others {row['others']:.0%}"


def run_model(args: Namespace, record: Record, name: str, loads: list[Load], model: Model, ends_s: float) -> bool:
    """All turns of a model that are left. False: the time was over before."""
    expected, reasons = contenders(args, model)
    record["missing"][name] = reasons
    if not left(record, turns_of(args, loads, list(expected))):
        return True
    with working_folder(args.folder) as folder, started(args, model, folder) as (ready, missing):
        record["missing"][name] = {server: without_folders(reason) for server, reason in missing.items()}
        record["servers"][name] = {server: about_of(contender, model) for server, contender in ready.items()}
        todo = left(record, turns_of(args, loads, list(ready)))
        for number, turn in enumerate(todo, 1):
            if time.monotonic() > ends_s:
                return False
            row = run_turn(args, turn, ready[turn.server], model, folder)
            record["rows"] = [old for old in record["rows"] if any(old[k] != v for k, v in turn.place.items())] + [row]
            write(args, record)
            print(
                f"[{number} of {len(todo)}] round {turn.round + 1}, {turn.load.key}, {turn.server}: {said(row)}",
                flush=True,
            )
    return True


def minutes_of(args: Namespace, loads: list[Load], of_models: Mapping[str, Model]) -> dict[str, float]:
    """Until when each model's turns may begin: each has a part of the time, by their number."""
    counts = {name: sum(load.model == name for load in loads) * len(contenders(args, model)[0])
              for name, model in of_models.items()}  # fmt: skip
    ends = itertools.accumulate(counts.values())
    return {name: args.minutes * end / sum(counts.values()) for name, end in zip(counts, ends, strict=True)}


def main() -> None:
    args = options(
        __doc__, tools=(ROOT / "build" / "tools", "a folder with an environment for each tool"), vllm="",
        llama_server=("", "llama.cpp's server"), install=(False, "make the environments of tools that lack"),
        short=(False, "one round of a few loads"), fresh=(False, "forget what an earlier run has written"),
        rounds=3, only=Commas(*MODELS), loads=([], "only these, such as plain/chat/aiperf"),
        minutes=(40.0, "until no further load begins"), dtype="bfloat16", context=(4096, "of vLLM"),
        eager=(False, "vLLM does not compile"), serve=[], seed=1, folder=Path,
        tool_cpus=(min(1, len(os.sched_getaffinity(0)) - 1), "the last cores, which tools have for themselves"),
        note=("", "what a reader must know of this run"),
    )  # fmt: skip
    end_in_order()
    args.cpus = keep_cores(args.tool_cpus)
    began_s, args.json = time.monotonic(), args.json or RESULTS
    args.rounds, args.tools = 1 if args.short else args.rounds, args.tools.resolve()
    chosen = [load for load in LOADS if load.model in args.only and (load.is_short or not args.short)]
    chosen = [load for load in chosen if not args.loads or load.key in args.loads]
    names = list(dict.fromkeys(load.tool for load in chosen))
    if args.install:
        install(args.tools, [name for name in names if name != "vllm" or not args.vllm])
    args.vllm = args.vllm or there(args.tools / "vllm" / "bin" / "python")
    args.llama_server = args.llama_server or there(args.tools / "llama-server")
    record = opened(args, chosen)
    record["tools"], record["absent"] = tools_here(args, names)
    loads = [load for load in chosen if load.tool in record["tools"]]
    is_whole = True
    with working_folder(args.folder) as folder:
        parts = list(parts_of(list(dict.fromkeys(load.model for load in loads)), dict.fromkeys(MODELS)))
        of_models = models(parts, folder, args.dtype)
        shares = minutes_of(args, loads, of_models)
        for name, model in of_models.items():
            of_model = [load for load in loads if load.model == name]
            is_whole = run_model(args, record, name, of_model, model, began_s + 60 * shares[name]) and is_whole
    write(args, record)
    state = "all is done" if is_whole else "the time is over: the same command goes on"
    spent_min = (time.monotonic() - began_s) / 60
    print(f"{state}, after {spent_min:.1f} min: {args.json}; scripts/leaderboard.py writes the page")


if __name__ == "__main__":
    main()
