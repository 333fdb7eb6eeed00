"""Drafts on and off: are the tokens the same, and how many come a second?

    python bench/speculation.py --data DIR [--drafts 8] [--dtype bfloat16] [--prompts 20] [--batch 1] [--json FILE]
        [--llamacpp PYTHON --gguf FILE]

Four kinds of requests: *chats*, turns of real conversations with the model's own answers in the history; *agents*,
calls of recorded agents with what came before; *again*, the chats once more, which the prefix cache has seen
answered; *drawn*, the chats at temperature 1, where little can be foretold. All but the last are greedy. ``--batch
N``: N requests at a time, ``--limit N``: N of each kind at most. Two engines of the same process take turns request
by request, another one first each time; both have the prompts cached before. The N of a batch begin together, and it
ends with the slowest of them; with ``--running M`` only M of them run at a time and the next begins when one ends, as
at a server. ``--rounds R``: all of it R times, drawn answers with another seed each time. ``--llamacpp`` names a
Python that can import llama_cpp: it decodes as many tokens from the same prompts in a process of its own, which is
stopped otherwise.

Printed for each kind: tokens a second behind the first token, off and on (and of llama.cpp), in all; their ratio in
all, by CPU second of this process (``cpu``: less disturbed by what else the machine does), as the median and the least
of the groups; how many drafts were computed and kept; how many answers differ (in float32 none may; in bfloat16 the
kernels of more rows round differently, with or without drafts). ``--drafts 0`` measures off beside off: the noise of
the machine. ``--cpu-time --threads 1``: CPU seconds in the place of seconds throughout, for a machine that others use.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rivals
from harness import chats
from harness.flags import Commas, need, options, save
from harness.rounds import median
from msgspec.structs import replace

from memserve import LLM
from memserve.api.llm import Completion
from memserve.base.types import SamplingParams
from memserve.model import device

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0)
CALLS = ("taubench", "miniswe", "magagent")
PROMPT_TOKENS_MAX = 1600
LEAST_TOKENS = 8  # of an answer whose pace counts
Prompts = list[list[int]]


def agent_prompts(data: Path, llm: LLM, count: int) -> Iterator[list[int]]:
    """Calls of recorded agents, in the order of ``count`` sessions of each kind, as long as they fit."""
    mark = llm.tokenize("@@@")
    around = chat_prompt(llm, [{"role": "user", "content": "@@@"}])
    offset = next(offset for offset in range(len(around)) if around[offset : offset + len(mark)] == mark)
    for name in CALLS:
        for session in islice(chats.read(data / "agents" / f"agent_calls_{name}.jsonl.gz"), count):
            texts: list[str] = []
            for call in session["calls"]:
                before = texts[call["base"]][: call["keep"]] if call["base"] >= 0 else ""
                texts.append(before + call["append"])
                prompt = [*around[:offset], *llm.tokenize(texts[-1]), *around[offset + len(mark) :]]
                if len(prompt) <= PROMPT_TOKENS_MAX:
                    yield prompt


def chat_prompts(data: Path, llm: LLM, count: int, new_tokens: int) -> Iterator[list[int]]:
    """Every turn of ``count`` chats, answered by the model."""
    sessions = chats.chat_sessions(data, count, 3)
    while sessions := [session for session in sessions if not session.done]:
        prompts = [chat_prompt(llm, session.messages()) for session in sessions]
        fitting = [place for place, prompt in enumerate(prompts) if len(prompt) <= PROMPT_TOKENS_MAX]
        prompts, sessions = [prompts[place] for place in fitting], [sessions[place] for place in fitting]
        yield from prompts
        for session, answer in zip(sessions, llm.generate(prompts, GREEDY, max_tokens=new_tokens), strict=True):
            session.answers.append(answer.text)


def chat_prompt(llm: LLM, messages: chats.Messages) -> list[int]:
    """The tokens of a conversation."""
    return list(llm.chat(messages, GREEDY, max_tokens=1).prompt_tokens)


def gather(args: Namespace) -> dict[str, Prompts]:
    """The prompts of both kinds, as many of one as of the other; kept in ``--requests`` for the next call."""
    if args.requests is not None and args.requests.exists():
        return json.loads(args.requests.read_text())
    with LLM(args.model, dtype=args.dtype, threads=args.threads, kv_memory="1GiB") as llm:
        chats_said = list(chat_prompts(args.data, llm, args.prompts, args.new_tokens))
        agents = list(agent_prompts(args.data, llm, args.prompts // 3 + 1))
    step = max(1, len(agents) // max(1, len(chats_said)))
    results = {"chats": chats_said, "agents": agents[::step][: len(chats_said)]}
    if args.requests is not None:
        args.requests.write_text(json.dumps(results))
    return results


@dataclass
class Pace:
    """Tokens behind the first ones, and what they took."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    rates: list[float] = field(default_factory=list)

    def add(self, tokens: int, seconds: float, cpu_s: float = 0.0) -> None:
        """A group of requests that ran together."""
        self.tokens += tokens
        self.cpu_s += cpu_s
        self.seconds += seconds
        self.rates.append(tokens / seconds)

    @property
    def rate(self) -> float:
        """Tokens a second, over all."""
        return self.tokens / self.seconds if self.seconds else float("nan")


def taken(answers: list[Completion]) -> tuple[int, float]:
    """Tokens behind the first ones of requests that ran together, and the seconds for them."""
    tokens = sum(len(answer.outputs[0].tokens) - 1 for answer in answers)
    begin_ns = min(answer.first_token_ns for answer in answers)
    return tokens, (max(answer.finished_ns for answer in answers) - begin_ns) / 1e9


class Bench:
    """Both engines, and llama.cpp beside them."""

    def __init__(self, args: Namespace) -> None:
        options = {"dtype": args.dtype, "kv_memory": "1GiB", "threads": args.threads}
        if args.running is not None:
            options["max_running"] = args.running
        self.args = args
        drafts = {"off": 0, "on": args.drafts}
        self.engines = {name: LLM(args.model, **options, draft_tokens=count) for name, count in drafts.items()}
        self.asked = 0
        #: of the newest answers
        self.cpu_s: dict[str, float] = {}
        self.rival: rivals.Engine | None = None
        if args.llamacpp:
            options = {"model": str(args.gguf), "dtype": "", "threads": args.threads}
            self.rival = rivals.Engine("llama.cpp", "llamacpp", args.llamacpp, options)
            why = self.rival.start(Path("/dev/null"))
            if why is not None:
                raise SystemExit(f"llama.cpp does not start: {why}")

    def ask(self, prompts: Prompts, sampling: SamplingParams) -> dict[str, list[Completion]]:
        """Each engine in turn, once it has the prompts cached."""
        self.asked += 1
        answers = {}
        self.cpu_s = {}
        for name in list(self.engines)[:: 1 if self.asked % 2 else -1]:
            self.engines[name].generate(prompts, GREEDY, max_tokens=1)
            began = time.process_time()
            answers[name] = self.engines[name].generate(prompts, sampling, max_tokens=self.args.new_tokens)
            self.cpu_s[name] = time.process_time() - began
        return answers

    def row(self, kind: str, groups: list[Prompts], samplings: list[SamplingParams]) -> dict[str, Any]:
        """All requests of one kind, once with each of ``samplings``."""
        before = self.engines["on"].stats().instance
        paces = {name: Pace() for name in (*self.engines, *(["llama.cpp"] if self.rival else []))}
        differ, request_count = 0, 0
        for sampling, group in product(samplings, groups):
            results = self.ask(group, sampling)
            pairs = list(zip(results["on"], results["off"], strict=True))
            differ += sum(on.outputs[0].tokens != off.outputs[0].tokens for on, off in pairs)
            request_count += len(group)
            tokens = {name: taken(answers) for name, answers in results.items()}
            if min(count for count, _ in tokens.values()) < LEAST_TOKENS * len(group):
                continue
            for name, (count, seconds) in tokens.items():
                cpu_s = self.cpu_s[name]
                paces[name].add(count, cpu_s if self.args.cpu_time else seconds, cpu_s)
            if self.rival is not None:
                new = max(1, round(tokens["off"][0] / len(group)))
                paces["llama.cpp"].add(
                    new * len(group),
                    self.rival.ask({"prompts": group, "new": new, "cpu": self.args.cpu_time})["decode_s"],
                )
        after = self.engines["on"].stats().instance
        ratios = [on / off for on, off in zip(paces["on"].rates, paces["off"].rates, strict=True)]
        return {
            "kind": kind, "batch": self.args.batch, "requests": request_count, "differ": differ,
            **{name: round(pace.rate, 1) for name, pace in paces.items()},
            "ratio": round(paces["on"].rate / paces["off"].rate, 3),
            "cpu": round(paces["on"].tokens / paces["on"].cpu_s * paces["off"].cpu_s / paces["off"].tokens, 3),
            "median": round(median(ratios), 3), "least": round(min(ratios), 3),
            "drafts": after.drafts_computed - before.drafts_computed, "kept": after.drafts_kept - before.drafts_kept,
        }  # fmt: skip


def batches(prompts: Prompts, size: int) -> list[Prompts]:
    """``size`` at a time, full ones only, unless there is none."""
    whole = max(size, len(prompts) // size * size)
    return [prompts[offset : offset + size] for offset in range(0, min(whole, len(prompts)), size)]


def main() -> None:
    args = options(
        __doc__, required="data", data=(Path, "folder with conversations/ and agents/"), model="smollm2-135m-instruct",
        dtype="bfloat16", drafts=8, threads=2, batch=1, running=(int, "of a batch, how many run at a time"), rounds=1,
        prompts=(20, "chats of three turns, and as many agents' calls"), new_tokens=128, limit=int,
        kinds=Commas("chats", "agents", "again", "drawn"), requests=(Path, "keep the prompts here for the next call"),
        llamacpp=("", "a Python that can import llama_cpp"), gguf=(Path, "what llama.cpp loads"),
        cpu_time=(False, "tokens by CPU second: for a busy machine, one thread"),
    )  # fmt: skip
    need(args.data)
    prompts = gather(args)
    if args.cpu_time:
        if args.threads != 1:
            raise SystemExit("--cpu-time is for --threads 1: threads that wait for each other take CPU time as well")
        device.time = SimpleNamespace(perf_counter_ns=time.thread_time_ns)  # what steps take, as the policy learns it
    bench, rows = Bench(args), []
    sources = {"chats": "chats", "agents": "agents", "again": "chats", "drawn": "chats"}
    for kind in args.kinds:
        groups = batches(prompts[sources[kind]][: args.limit], args.batch)
        samplings = [replace(DRAWN, seed=seed) if kind == "drawn" else GREEDY for seed in range(7, 7 + args.rounds)]
        rows.append(bench.row(kind, groups, samplings))
        print(json.dumps(rows[-1]), flush=True)
    if bench.rival is not None:
        bench.rival.end()
    save(args, rows)
    sys.exit(args.dtype == "float32" and any(row["differ"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
