"""Agents' sessions, driven by AIPerf: memserve that keeps prefixes while tools run, memserve with LRU alone, vLLM.

    python bench/agents.py --aiperf VENV/bin/aiperf --vllm VENV/bin/python [--rounds 3] [--only NAME,NAME] [--json FILE]

AIPerf (``pip install aiperf==0.13.0``, an environment of its own) sends what its scenario ``inferencex-agentx-mvp`` is
made of, scaled to a small model: sessions side by side that share a system prompt and tools, and begin a turn when the
tool of the turn before has run. Its own traces for that scenario are on a hub and a hundred times as long, and its
shortest run is a quarter of an hour, so the sessions are made here, from a seed, in AIPerf's form ``dag-jsonl``: each
turn is a recorded call, the tool's result, and a delay; prompts are the same for all systems, as in its replays. Every
answer is a tool call: the tool of the turn is named in ``tool_choice``, its argument is one of four, and both systems
draw within that grammar, without blanks that JSON does not need (vLLM writes the call in the form of its parser, with
the tool's name: some 25 tokens more). The model gets a chat template of the script's own, because where a template
knows no tools, memserve describes them and vLLM does not: prompts shall have equally many tokens (``prompt``).
Tools differ in how long they run, by a lognormal around ``--gaps-s`` of each.

Systems, in turn in each round, with sessions of their own (all run from start to end, one at a time is loaded):

    automatic    ``--keep-tool-prefixes auto``: prefixes that wait for a tool are kept
    lru          memserve as it is by default, ``off``
    vllm         vLLM on the CPU, its own prefix cache
    unlimited    memserve with KV for all sessions: the hits that there are to be had

The first three have the same KV memory, block by block: room for ``--share`` of all sessions at their end. An option
that this memserve does not have is left out, and its row says so: then ``automatic`` is ``lru``.

A session's time is from its first request to its last answer, with the tools' time, which no system can change:
``computing`` is what is left of it. Hits are ``cached_tokens`` by ``prompt_tokens`` of ``usage``; CPU is the server's.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.engines import Vllm, running
from harness.flags import Commas, options, parts_of, save, working_folder
from harness.processes import cpu_s, end_in_order, process_cpu_s
from harness.prompts import words
from harness.rounds import mean, median, ratio, turns
from harness.served import BLOCK as BLOCK_TOKENS
from harness.served import Served, bundled_model, plain_side
from harness.tables import show
from harness.tools import with_hub_cache
from vllm_shared import kv_bytes

KEEPS = "--keep-tool-prefixes"
"""memserve's option: ``auto`` or ``off``."""
SYSTEMS = ("automatic", "lru", "vllm", "unlimited")
TOOLS = ("read_file", "run_tests", "search_code")
FILES = ("src/main.py", "src/util.py", "tests/one.py", "tests/two.py")
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %} {{ call.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER_TOKENS = 48
"""At most. A call is shorter, and ends by itself."""
TEMPLATE_TOKENS, TOOL_TOKENS = 8, 40
"""What a message and the descriptions of the tools cost in the prompt, roughly."""
RUN_S = 3600.0
COLUMNS = {
    "system": "{system}", "prompt": "{prompt_tokens:.0f}", "answer": "{answer_tokens:.1f}",
    "session": "{session_s:.1f} s", "by lru": "{by_lru:.2f}", "by vllm": "{by_vllm:.2f}",
    "computing": "{computing_s:.1f} s", "TTFT, mean": "{ttft_s:.2f} s", "TTFT, p90": "{ttft_p90_s:.2f} s",
    "hits": "{hit_rate:.1%}", "of unlimited": "{by_unlimited:.2f}", "CPU": "{cpu_s:.0f} s", "note": "{note}",
}  # fmt: skip


@dataclass
class System:
    """A running server."""

    name: str
    url: str
    cpu_s: Callable[[], float]
    note: str = ""


# -- the sessions


def sessions(args: Namespace, seed: int) -> Iterator[dict[str, Any]]:
    """A line of ``dag-jsonl`` for each session."""
    rng = random.Random(seed)
    shared = {"role": "system", "content": words(args.shared_tokens, rng)}
    tools = [_described(name) for name in TOOLS]
    for number in range(args.sessions):
        gap_ms = rng.uniform(0, args.ramp_s) * 1e3
        messages = [shared, {"role": "user", "content": words(args.task_tokens, rng)}]
        steps = []
        for step in range(args.turns):
            tool = rng.randrange(len(TOOLS))
            choice = {"type": "function", "function": {"name": TOOLS[tool]}}
            steps.append({
                "messages": messages, "tools": tools, "max_tokens": ANSWER_TOKENS, "delay": gap_ms,
                "extra": {"tool_choice": choice, "temperature": 0, "seed": step},
            })  # fmt: skip
            gap_ms = 1e3 * args.gaps_s[tool] * rng.lognormvariate(0, args.spread)
            messages = _ran(TOOLS[tool], f"call-{number}-{step}", words(args.result_tokens, rng), rng)
        yield {"session_id": f"s{seed}-{number}", "context_mode": "deltas_with_responses", "turns": steps}


def _described(name: str) -> dict[str, Any]:
    path = {"type": "string", "enum": list(FILES)}
    schema = {"type": "object", "properties": {"path": path}, "required": ["path"], "additionalProperties": False}
    described = {"name": name, "description": name.replace("_", " "), "strict": True, "parameters": schema}
    return {"type": "function", "function": described}


def _ran(tool: str, call: str, result: str, rng: random.Random) -> list[dict[str, Any]]:
    """What a turn adds: the call as it was recorded, and its result."""
    function = {"name": tool, "arguments": json.dumps({"path": rng.choice(FILES)})}
    asked = {
        "role": "assistant",
        "content": f"I {tool}.",
        "tool_calls": [{"id": call, "type": "function", "function": function}],
    }
    return [asked, {"role": "tool", "tool_call_id": call, "content": result}]


def longest_tokens(args: Namespace) -> int:
    """Of a session at its end, roughly."""
    per_turn = args.result_tokens + 2 * TEMPLATE_TOKENS
    first = args.shared_tokens + args.task_tokens + TOOL_TOKENS + 2 * TEMPLATE_TOKENS
    longest: int = first + (args.turns - 1) * per_turn
    return longest


# -- AIPerf


def with_template(model: str, folder: Path) -> str:
    """A folder like ``model``, with :data:`TEMPLATE`."""
    place = folder / "model"
    place.mkdir(exist_ok=True)
    for path in Path(model).resolve().iterdir():
        if path.name != "chat_template.jinja" and not (place / path.name).exists():
            (place / path.name).symlink_to(path)
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return str(place)


def drive(args: Namespace, system: System, folder: Path, seed: int) -> dict[str, float]:
    """One pass: AIPerf runs all sessions at once."""
    place = folder / f"{system.name}-{seed}"
    place.mkdir()
    lines = list(map(json.dumps, sessions(args, seed)))
    (place / "sessions.jsonl").write_text("\n".join(lines) + "\n")
    command = [
        args.aiperf, "profile", "--model", "x", "--url", system.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", "local/model", "--use-server-token-count", "--custom-dataset-type", "dag-jsonl",
        "--input-file", str(place / "sessions.jsonl"), "--dataset-sampling-strategy", "sequential",
        "--concurrency", str(args.sessions), "--conversation-num", str(args.sessions), "--ui", "none",
        "--artifact-dir", str(place),
    ]  # fmt: skip
    before_s = system.cpu_s()
    with (place / "aiperf.log").open("w") as log:
        environment = {**os.environ, **with_hub_cache(folder, args.model)}
        status = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=RUN_S, cwd=place).returncode
    spent_s, export = system.cpu_s() - before_s, place / "profile_export.jsonl"
    if status or not export.exists():
        raise SystemExit(f"AIPerf ends with {status}:\n{(place / 'aiperf.log').read_text()[-2000:]}")
    records = list(map(json.loads, export.read_text().splitlines()))
    gaps_s = [sum(turn["delay"] for turn in json.loads(line)["turns"][1:]) / 1e3 for line in lines]
    return figures(args, records, mean(gaps_s)) | {"cpu_s": spent_s}


def figures(args: Namespace, records: list[dict[str, Any]], gaps_s: float) -> dict[str, float]:
    """What AIPerf has written down. Ends the script where an answer is missing, or no call."""
    bounds: dict[str, list[int]] = defaultdict(list)
    for record in records:
        about = record["metadata"]
        bounds[about["conversation_id"]] += [about["request_start_ns"], about["request_end_ns"]]
    told = [{name: value["value"] for name, value in record["metrics"].items()} for record in records]
    expected = args.sessions * args.turns
    failed = [record for record in records if record.get("error") or "usage_prompt_tokens" not in record["metrics"]]
    if len(records) != expected or failed:
        raise SystemExit(f"{len(records)} of {expected} answers, {len(failed)} without usage: {failed[:1]}")
    prompt_tokens = sum(one["usage_prompt_tokens"] for one in told)
    first_s = sorted(one["time_to_first_token"] / 1e3 for one in told)
    session_s = mean([(max(times) - min(times)) / 1e9 for times in bounds.values()])
    return {
        "session_s": session_s, "computing_s": session_s - gaps_s, "ttft_s": mean(first_s),
        "ttft_p90_s": first_s[len(first_s) * 9 // 10], "prompt_tokens": prompt_tokens / expected,
        "hit_rate": sum(one.get("usage_prompt_cache_read_tokens", 0) for one in told) / prompt_tokens,
        "answer_tokens": mean([one["usage_completion_tokens"] for one in told]),
    }  # fmt: skip


# -- the systems


def _has_option(flag: str) -> bool:
    command = [sys.executable, "-m", "memserve", "serve", "--help"]
    return flag in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextmanager
def memserve(args: Namespace, name: str, blocks: int, keeps: str, more: list[str]) -> Iterator[System]:
    """``memserve serve`` with so many blocks of KV."""
    has_option = _has_option(KEEPS)
    flags = ["--kv-memory", str(blocks * kv_bytes(args.model, args.dtype)), "--dtype", args.dtype]
    flags += [KEEPS, keeps] if has_option else []
    with plain_side(name, *flags, *more, model=args.model) as side:
        yield System(name, side.server.url, lambda: _cpu_s(side.server), "" if has_option else f"no {KEEPS} here")


def _cpu_s(server: Served) -> float:
    return sum(map(process_cpu_s, (server.process.pid, *server.children().values())))


@contextmanager
def vllm(args: Namespace, blocks: int, folder: Path) -> Iterator[System]:
    """vLLM with so many blocks of KV."""
    context = min(args.context, (blocks - 1) * BLOCK_TOKENS)  # of its blocks vLLM gives one to nothing
    flags = ["--num-gpu-blocks-override", str(blocks), "--max-model-len", str(context)]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags += ["--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})]
    # else it closes a connection after five seconds, now and then just as a client asks on it
    patience = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
    server = Vllm(
        args.vllm, args.model, None, folder / "vllm.log", args.cpus, flags, dtype=args.dtype, environment=patience
    )
    with running(server):
        assert server.process is not None
        group = server.process.pid
        yield System("vllm", server.url, lambda: cpu_s(group))


def measure(args: Namespace, folder: Path) -> list[dict[str, Any]]:
    """All systems in turn; a row for each."""
    whole = -(-longest_tokens(args) * args.sessions // BLOCK_TOKENS)
    blocks = int(whole * args.share)
    print(f"{args.sessions} sessions of {args.turns} turns, about {longest_tokens(args)} tokens at their end;")
    print(f"KV of {blocks} blocks ({blocks * BLOCK_TOKENS:,} tokens), unlimited: {2 * whole}", flush=True)
    passes: dict[str, list[dict[str, float]]] = defaultdict(list)
    with ExitStack() as stack:
        systems: dict[str, System] = {}
        for name in parts_of(args.only or list(SYSTEMS), dict.fromkeys(SYSTEMS)):
            if name == "vllm":
                if not args.vllm:
                    print("vllm: skipped: no --vllm")
                    continue
                systems[name] = stack.enter_context(vllm(args, blocks, folder))
            else:
                is_bound = name == "unlimited"
                size, keeps = 2 * whole if is_bound else blocks, "auto" if name == "automatic" else "off"
                more = [] if is_bound else args.serve
                systems[name] = stack.enter_context(memserve(args, name, size, keeps, more))
        for number, name in turns(args.rounds, systems, warm=args.warm):
            seed = args.seed + 1000 * (number + args.warm)
            row = drive(args, systems[name], folder, seed)
            if number >= 0:
                passes[name].append(row)
            print(f"round {number + 1}: {name}: {json.dumps({key: round(row[key], 3) for key in row})}", flush=True)
        notes = {name: system.note for name, system in systems.items()}
    return [_row(name, passes, notes[name]) for name in passes]


def _row(name: str, passes: dict[str, list[dict[str, float]]], note: str) -> dict[str, Any]:
    row: dict[str, Any] = {field: median([one[field] for one in passes[name]]) for field in passes[name][0]}
    columns = (
        ("by_lru", "lru", "session_s"),
        ("by_vllm", "vllm", "session_s"),
        ("by_unlimited", "unlimited", "hit_rate"),
    )
    for column, base, field in columns:
        if base in passes:
            row[column] = ratio([one[field] for one in passes[name]], [max(1e-9, one[field]) for one in passes[base]])
    return {"system": name, "note": note, **row, "passes": passes[name]}


def main() -> None:
    end_in_order()
    args = options(
        __doc__, aiperf=("aiperf", "AIPerf's command"), vllm="", model="", dtype="bfloat16", rounds=3,
        warm=(0, "rounds before them that do not count"), sessions=9, turns=8,
        share=(1 / 3, "of all sessions at their end, that KV has room for"), shared_tokens=600, task_tokens=600,
        result_tokens=250, gaps_s=(Commas(1.0, 4.0, 8.0), f"of {', '.join(TOOLS)}, in seconds"),
        spread=(0.3, "of the logarithm of gaps"), ramp_s=(0.0, "within which sessions begin"), context=8192,
        cpus=("0-1", "cores of vLLM"), serve=([], "further options of memserve, but the unlimited one"), seed=1,
        only=[""], folder=Path, quick={"sessions": 4, "turns": 3, "rounds": 1, "share": 0.5, "gaps_s": [0.1, 0.2, 0.4]},
    )  # fmt: skip
    args.model, args.only = args.model or bundled_model(args.dtype), [name for name in args.only if name]
    with working_folder(args.folder) as folder:
        args.model = with_template(args.model, folder)
        rows = measure(args, folder)
    show(rows, COLUMNS)
    save(args, rows)


if __name__ == "__main__":
    main()
