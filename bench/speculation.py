"""Drafts on and off: are the tokens the same, and how many come a second?

    python bench/speculation.py --data DIR [--drafts 8] [--dtype bfloat16] [--prompts 20] [--batch 1] [--json FILE]

Three kinds of requests, one at a time and greedy: *chats*, turns of real conversations with the model's own answers in
the history; *agents*, calls of recorded agents with what came before; *again*, the chats' requests once more, which the
prefix cache has seen answered. ``--batch N``: N requests at a time. Two engines of the same process take turns request
by request, another one first each time. Printed for each kind: tokens a second behind the first token, on and off, and
their ratio, as the median over requests and in all; how many drafts were computed and kept; how many answers differ (in
float32 none may; in bfloat16 the kernels of more rows round differently, with or without drafts).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chats

from memserve import LLM
from memserve.llm import Completion
from memserve.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
CALLS = ("taubench", "miniswe", "magagent")
PROMPT_TOKENS_MAX = 1600


def agent_prompts(data: Path, llm: LLM, count: int) -> Iterator[list[list[int]]]:
    """Calls of recorded agents, in the order of their sessions, as long as they fit: a session each."""
    for name in CALLS:
        for session in list(chats.read(data / "agents" / f"agent_calls_{name}.jsonl.gz"))[:count]:
            texts: list[str] = []
            prompts = []
            for call in session["calls"]:
                before = texts[call["base"]][: call["keep"]] if call["base"] >= 0 else ""
                texts.append(before + call["append"])
                if 0 < len(llm.tokenize(texts[-1])) <= PROMPT_TOKENS_MAX:
                    prompts.append(chat_prompt(llm, [{"role": "user", "content": texts[-1]}]))
            if prompts:
                yield prompts


def chat_prompt(llm: LLM, messages: chats.Messages) -> list[int]:
    """The tokens of a conversation."""
    return list(llm.chat(messages, GREEDY, max_tokens=1).prompt_tokens)


def rate(answers: list[Completion]) -> float:
    """Tokens a second behind the first tokens, of requests that ran together."""
    tokens = sum(len(answer.outputs[0].tokens) - 1 for answer in answers)
    begin_ns = max(answer.first_token_ns for answer in answers)
    return tokens * 1e9 / max(1, max(answer.finished_ns for answer in answers) - begin_ns)


class Bench:
    """Both engines, and what they have said."""

    def __init__(self, args: argparse.Namespace) -> None:
        options = {"dtype": args.dtype, "kv_memory": "1GiB", "threads": args.threads}
        self.args = args
        drafts = {"off": 0, "on": args.drafts}
        self.engines = {name: LLM(args.model, **options, draft_tokens=count) for name, count in drafts.items()}
        self.asked = 0

    def ask(self, prompts: list[list[int]]) -> dict[str, list[Completion]]:
        """Each engine in turn."""
        self.asked += 1
        order = list(self.engines)[:: 1 if self.asked % 2 else -1]
        return {name: self.engines[name].generate(prompts, GREEDY, max_tokens=self.args.new_tokens) for name in order}

    def row(self, kind: str, groups: list[list[list[int]]]) -> dict[str, Any]:
        """All requests of one kind."""
        before = self.engines["on"].stats().instance
        found = [self.ask(group) for group in groups]
        after = self.engines["on"].stats().instance
        told = [one for one in found if min(len(a.outputs[0].tokens) for a in (*one["on"], *one["off"])) > 8]
        rates = {name: [rate(one[name]) for one in told] for name in self.engines}
        pairs = [pair for one in found for pair in zip(one["on"], one["off"], strict=True)]
        differ = sum(on.outputs[0].tokens != off.outputs[0].tokens for on, off in pairs)
        means = {name: statistics.harmonic_mean(rates[name]) for name in self.engines}
        ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
        return {
            "kind": kind, "requests": sum(map(len, groups)), "differ": differ,
            "off": round(means["off"], 1), "on": round(means["on"], 1), "ratio": round(means["on"] / means["off"], 3),
            "median": round(statistics.median(ratios), 3), "least": round(min(ratios), 3),
            "drafts": after.drafts_computed - before.drafts_computed, "kept": after.drafts_kept - before.drafts_kept,
        }  # fmt: skip


def batches(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    """``size`` at a time."""
    return [prompts[at : at + size] for at in range(0, len(prompts), size)]


def main() -> int:
    """Ask everything, and print a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with conversations/ and agents/")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=20, help="chats of three turns, and agents' calls")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.data.exists():
        print(f"skipped: no data at {args.data}")
        return 0
    bench = Bench(args)
    off = bench.engines["off"]
    sessions = chats.chat_sessions(args.data, args.prompts, 3)
    said = []
    for session in sessions[: args.prompts]:
        while not session.done:
            prompt = chat_prompt(off, session.messages())
            if len(prompt) > PROMPT_TOKENS_MAX:
                break
            said.append(prompt)
            session.answers.append(off.generate(prompt, GREEDY, max_tokens=args.new_tokens)[0].text)
    agents = [prompt for prompts in agent_prompts(args.data, off, args.prompts // 3 + 1) for prompt in prompts]
    rows = []
    for kind, prompts in (("chats", said), ("agents", agents[: len(said)]), ("again", said)):
        rows.append(bench.row(kind, batches(prompts, args.batch)))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return int(args.dtype == "float32" and any(row["differ"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
