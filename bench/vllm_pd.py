"""One vLLM computes prompts, another one answers, through a store, behind ``memserve serve``: chats of several turns.

    python bench/vllm_pd.py --vllm PYTHON [--data FOLDER] [--chats 12] [--turns 4] [--tokens 48]

PYTHON can import vllm (its CPU build: ``docs/guides/VLLM.md``); memserve is this checkout's. Every answer, greedy in
float32, is compared token by token with one server's without a connector; one that differs where the reference's two
best tokens are less than ``TIE`` apart counts as a tie. Passes:

* *computed elsewhere*: every prompt is computed by the one and answered by the other. Before each turn the first one's
  own cache is emptied: what it does not compute it has from the store, the other one's answers of earlier turns too.
* *killed*: as many other chats, and in the middle the first one is killed (SIGKILL): no request may be lost.
"""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

from harness.chats import Session, chat_sessions
from harness.clients import Answer, ask_all, meanwhile, stream
from harness.engines import EventServer, ServedStore, Vllm, judge, recorded, running
from harness.processes import metric_sum, metrics_of
from harness.routers import fleet_router
from harness.served import BLOCK

Key = tuple[str, int]
"""A chat, and a turn of it."""


def ask(url: str, messages: list[dict[str, str]], tokens: int) -> Answer:
    more = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    body = {"model": "x", "messages": messages, "max_tokens": tokens, "temperature": 0, **more}
    answer = stream(url, body, "/v1/chat/completions").checked()
    if answer.usage["completion_tokens"] != len(answer.tokens):
        raise RuntimeError(f"{answer.usage} for {len(answer.tokens)} tokens")
    return answer


class Chats:
    """The turns, and what the reference answered."""

    def __init__(self, sessions: list[Session], tokens: int) -> None:
        self.sessions, self.tokens = sessions, tokens
        self.right: dict[Key, Answer] = {}
        self.messages: dict[Key, list[dict[str, str]]] = {}

    def prompt_tokens(self, key: Key) -> int:
        """As the reference counts them; 0: there is no such turn."""
        return int(self.right[key].usage["prompt_tokens"]) if key in self.right else 0

    def answer_all(self, alone: Vllm) -> None:
        """By the reference, chat by chat; its answers are the histories of all passes."""

        def play(session: Session) -> None:
            while not session.done:
                key = session.name, len(session.answers)
                self.messages[key] = session.messages()
                self.right[key] = ask(alone.url, self.messages[key], self.tokens)
                session.answers.append(self.right[key].text)

        ask_all(play, self.sessions, 4)

    def compare(self, url: str, keys: list[Key], counts: Counter[str]) -> None:
        """Ask these turns, four at a time."""

        def compare_turn(key: Key) -> None:
            answer = ask(url, self.messages[key], self.tokens)
            judge(key, answer, self.right[key], counts)
            counts["usage WRONG"] += answer.usage["prompt_tokens"] != self.prompt_tokens(key)
            before = self.prompt_tokens((key[0], key[1] - 1))
            if before and answer.cached > (before + BLOCK - 1) // BLOCK * BLOCK:
                counts["turns that began with blocks of the last answer"] += 1
            counts["tokens said to be cached"] += answer.cached

        ask_all(compare_turn, keys, 4)


NAMES = {
    "of its own cache": "prefix_cache_hits_total",
    "from the store": "external_prefix_cache_hits_total",
    "asked for": "prompt_tokens_total",
}


def counts_of(server: Vllm) -> Counter[str]:
    """What a server has done so far, in prompt tokens."""
    return Counter({name: server.metric(metric) for name, metric in NAMES.items()})


def done_since(name: str, server: Vllm, before: Counter[str]) -> dict[str, int]:
    """What it has done since."""
    counts = {key: value - before[key] for key, value in counts_of(server).items()}
    counts["computed"] = counts["asked for"] - counts["of its own cache"] - counts["from the store"]
    print(f"  {name}: " + ", ".join(f"{value} {key}" for key, value in counts.items()), flush=True)
    return counts


def prefills(url: str) -> int:
    """Prompts that were computed for another server, as the router counts."""
    return int(metric_sum(metrics_of(url), "memserve_fleet_prefills_total"))


def compute_elsewhere(chats: Chats, url: str, first: Vllm, second: Vllm) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    before = counts_of(first), counts_of(second)
    for turn in range(max(number for _, number in chats.right) + 1):
        first.forget()
        chats.compare(url, [key for key in chats.right if key[1] == turn], counts)
    print(f"computed elsewhere: {dict(counts)}; {prefills(url)} prompts computed for the other server")
    of_first = done_since("prompt tokens, the first", first, before[0])
    return {
        **counts, "prefill": of_first, "decode": done_since("the second", second, before[1]), "prefills": prefills(url)
    }  # fmt: skip


def kill_halfway(chats: Chats, url: str, first: Vllm, second: Vllm) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    before, earlier = counts_of(second), prefills(url)

    def kill(_: threading.Event) -> None:
        while counts["equal"] + counts["ties"] + counts["WRONG"] < len(chats.right) // 2:
            time.sleep(0.05)
        first.kill()

    with meanwhile(kill):
        chats.compare(url, list(chats.right), counts)
    print(f"killed: {dict(counts)}; {prefills(url) - earlier} prompts computed by the first before its end")
    return {**counts, "decode": done_since("prompt tokens, the second", second, before)}


def measure(args: Namespace, folder: Path) -> dict[str, Any]:
    """Both passes, with chats of their own."""
    sessions = chat_sessions(args.data, 2 * args.chats, args.turns, args.system_chars)
    passes = [Chats(sessions[place::2], args.tokens) for place in (0, 1)]
    alone = Vllm(args.vllm, args.model, cpus="0-3", log=folder / "alone.log")
    with running(alone):
        for chats in passes:
            chats.answer_all(alone)
            lengths = sorted(map(chats.prompt_tokens, chats.right))
            print(f"{len(chats.right)} prompts of {lengths[0]} to {lengths[-1]} tokens, {args.tokens} new ones each")
    with ServedStore(folder, dram="2GiB") as store:
        servers = [
            EventServer(args.vllm, args.model, store, folder / f"{role}.log", cpus)
            for role, cpus in (("prefill", "0-1"), ("decode", "2-3"))
        ]
        with running(*servers):
            engines = [
                f"{server.option},role={role}" for server, role in zip(servers, ("prefill", "decode"), strict=True)
            ]
            with fleet_router(engines, folder / "router.log", "--engine-prefill-tokens", "32") as url:
                record = {"computed elsewhere": compute_elsewhere(passes[0], url, *servers)}
                return {**record, "killed": kill_halfway(passes[1], url, *servers)}


def main() -> None:
    data = (Path, "a folder of prompts, as lossless.py has it")
    record = recorded(
        __doc__, measure, required="data", data=data, chats=12, turns=4, tokens=48, system_chars=1200
    )  # fmt: skip
    if any("WRONG" in name and count for counts in record.values() for name, count in counts.items()):
        raise SystemExit("a wrong answer")


if __name__ == "__main__":
    main()
