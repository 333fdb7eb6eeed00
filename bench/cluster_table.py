"""What does each caching level of a disaggregated pair save? One table for one workload of real conversations.

    python bench/cluster_table.py --data DIR [--settings off,pd-caching-1,pd-caching-2,pd-caching-3] [--sessions 8]

Sessions of real user turns, with the model's own answers in the history, turn by turn, ``--clients`` sessions at
once. Every setting starts its own cluster and plays the same sessions. Printed per setting: prefill tokens computed,
tokens reused at P and at D, bytes from P to D and from D to P, TTFT and JCT; and, per turn, the share of the prompt
that P reused. MemServe section 5 says: caching-1 saves prefill, caching-2 sends only what is new, caching-3 lets the
reuse at P grow with the turns (the answers' KV comes back).
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from harness.chats import Session, chat_sessions, document_sessions, load_tokenizer
from harness.clients import TIMEOUT_S, Answer, ask_all, stream
from harness.flags import need, options, save
from harness.processes import metric_sum
from harness.rounds import mean, percentile
from harness.served import BLOCK, serving
from harness.tables import show

SETTINGS = {
    "1 colocated, off": ("--prefill", "0", "--decode", "0", "--colocated", "1", "--caching", "off"),
    "1 colocated, on": ("--prefill", "0", "--decode", "0", "--colocated", "1"),
    "1P1D off": ("--caching", "off"),
    "1P1D pd-caching-1": ("--caching", "pd-caching-1"),
    "1P1D pd-caching-2": ("--caching", "pd-caching-2"),
    "1P1D pd-caching-3": ("--caching", "pd-caching-3"),
}


@dataclass(frozen=True)
class Turn:
    """One answered turn."""

    number: int
    answer: Answer

    @property
    def prompt_tokens(self) -> int:
        return int(self.answer.usage["prompt_tokens"])


def play(session: Session, url: str, model: str, new_tokens: int) -> list[Turn]:
    """All turns of one session; the answers go into it."""
    turns = []
    with httpx.Client(timeout=TIMEOUT_S) as client:
        while not session.done:
            body = {"model": model, "messages": session.messages(), "temperature": 0, "max_tokens": new_tokens}
            answer = stream(url, body, "/v1/chat/completions", client=client).checked()
            turns.append(Turn(len(session.answers), answer))
            session.answers.append(answer.text)
    return turns


def run(name: str, flags: tuple[str, ...], sessions: list[Session], args: Namespace) -> dict[str, Any]:
    """One setting: the turns as clients saw them, and the instances' counters."""
    with serving(*flags, "--kv-memory", args.kv_memory, *args.serve.split()) as server:
        played = ask_all(
            lambda session: play(session.fresh(), server.url, server.model, args.new_tokens), sessions, args.clients
        )
        metrics = server.metrics()
        server.stop()

    def of_role(metric: str, role: str) -> float:
        return metric_sum(metrics, f'memserve_instance_{metric}_total{{role="{role}"}}')

    turns = [turn for chat_turns in played for turn in chat_turns]
    prompt_tokens, cached = (
        sum(column) for column in zip(*((t.prompt_tokens, t.answer.cached) for t in turns), strict=True)
    )
    firsts_ms = [1e3 * turn.answer.first_s for turn in turns]
    return {
        "setting": name, "prompt_tokens": prompt_tokens, "computed_at_p": prompt_tokens - cached,
        "reused_at_p": cached, "reused_at_d": BLOCK * int(of_role("reused_blocks", "decode")),
        "p_to_d_mib": round(of_role("received_bytes", "decode") / 2**20, 1),
        "d_to_p_mib": round(of_role("received_bytes", "prefill") / 2**20, 1),
        "ttft_ms": round(mean(firsts_ms), 1), "ttft_p99_ms": round(percentile(firsts_ms, 0.99), 1),
        "jct_ms": round(mean(1e3 * turn.answer.total_s for turn in turns), 1),
        "reuse_by_turn": {str(number + 1): share for number, share in reuse_by_turn(turns).items()},
    }  # fmt: skip


def reuse_by_turn(turns: list[Turn]) -> dict[int, float]:
    """Share of the prompts that were cached, by number of the turn."""
    shares = {}
    for number in sorted({turn.number for turn in turns}):
        turns_of_number = [turn for turn in turns if turn.number == number]
        shares[number] = sum(turn.answer.cached for turn in turns_of_number) / sum(
            turn.prompt_tokens for turn in turns_of_number
        )
    return shares


def show_all(rows: list[dict[str, Any]]) -> None:
    """A Markdown table of all settings, and one of the reuse by turn."""
    names = [name for name in rows[0] if name not in ("setting", "reuse_by_turn")]
    show(rows, {"setting": "{setting}"} | {name.replace("_", " "): f"{{{name}:,}}" for name in names})
    print("\nShare of the prompt that P reused, by turn:\n")
    shares = [
        {"setting": row["setting"], **{f"t{n}": share for n, share in row["reuse_by_turn"].items()}} for row in rows
    ]
    show(shares, {"setting": "{setting}"} | {number: f"{{t{number}:.0%}}" for number in rows[0]["reuse_by_turn"]})


def main() -> None:
    args = options(
        __doc__, required="data", data=Path, model=("", "for the tokenizer of long documents"),
        sessions=8, turns=6, documents=0, new_tokens=64, clients=2, kv_memory="1GiB",
        serve=("", "further options of memserve serve, in one string"),
        settings=("", "comma-separated parts of setting names; default: all"),
    )  # fmt: skip
    data, rows = need(args.data), []
    sessions = chat_sessions(data, args.sessions, args.turns)
    if args.documents:
        sessions += document_sessions(data, load_tokenizer(args.model), args.documents, 1500, args.turns)
    for name, flags in SETTINGS.items():
        if not args.settings or any(part in name for part in args.settings.split(",")):
            rows.append(run(name, flags, sessions, args))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    show_all(rows)
    save(args, rows)


if __name__ == "__main__":
    sys.exit(main())
