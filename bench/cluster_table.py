"""What does each caching level of a disaggregated pair save? One table for one workload of real conversations.

    python bench/cluster_table.py --data DIR [--settings off,pd-caching-1,pd-caching-2,pd-caching-3] [--sessions 8]

Sessions of real user turns, with the model's own answers in the history, turn by turn, ``--clients`` sessions at
once. Every setting starts its own cluster and plays the same sessions. Printed per setting: prefill tokens computed,
tokens reused at P and at D, bytes from P to D and from D to P, TTFT and JCT; and, per turn, the share of the prompt
that P reused. MemServe section 5 says: caching-1 saves prefill, caching-2 sends only what is new, caching-3 lets the
reuse at P grow with the turns (the answers' KV comes back).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chats
from served import serving

BLOCK_TOKENS = 32
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

    session: str
    number: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_ms: float
    second_token_ms: float
    jct_ms: float


def ask(client: Any, model: str, session: chats.Session, new_tokens: int) -> Turn:
    """Send the next turn, streamed; the answer goes into the session."""
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=model, messages=session.messages(), temperature=0, max_tokens=new_tokens, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    times, text, usage = [], [], None
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and (chunk.choices[0].delta.content or chunk.choices[0].finish_reason):
            times.append((time.perf_counter() - started) * 1e3)
            text.append(chunk.choices[0].delta.content or "")
    number = len(session.answers)
    session.answers.append("".join(text))
    details = usage.prompt_tokens_details
    second = times[1] if len(times) > 1 else times[0]
    return Turn(
        session.name, number, usage.prompt_tokens, details.cached_tokens if details else 0,
        usage.completion_tokens, times[0], second, times[-1],
    )  # fmt: skip


def play(session: chats.Session, url: str, model: str, new_tokens: int) -> list[Turn]:
    """All turns of one session."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as client:
        turns = []
        while not session.done:
            turns.append(ask(client, model, session, new_tokens))
        return turns


def by_role(metrics: dict[str, float], name: str, role: str) -> float:
    """A counter summed over the instances of one role."""
    return sum(v for k, v in metrics.items() if k.startswith(name + "{") and f'role="{role}"' in k)


def run(name: str, options: tuple[str, ...], sessions: list[chats.Session], args: Any) -> dict[str, Any]:
    """One setting: the turns as clients saw them, and the instances' counters."""
    extra = tuple(args.serve.split()) if args.serve else ()
    with serving(*options, "--kv-memory", args.kv_memory, *extra) as server:
        with ThreadPoolExecutor(args.clients) as pool:
            played = pool.map(lambda s: play(s.fresh(), server.url, server.model, args.new_tokens), sessions)
            turns = [turn for one in played for turn in one]
        metrics = server.metrics()
        server.stop()
    share = {
        n: sum(t.cached_tokens for t in turns if t.number == n) / sum(t.prompt_tokens for t in turns if t.number == n)
        for n in sorted({t.number for t in turns})
    }
    return {
        "setting": name,
        "prompt_tokens": sum(t.prompt_tokens for t in turns),
        "computed_at_p": sum(t.prompt_tokens - t.cached_tokens for t in turns),
        "reused_at_p": sum(t.cached_tokens for t in turns),
        "reused_at_d": BLOCK_TOKENS * int(by_role(metrics, "memserve_instance_reused_blocks_total", "decode")),
        "p_to_d_mib": round(by_role(metrics, "memserve_instance_received_bytes_total", "decode") / 2**20, 1),
        "d_to_p_mib": round(by_role(metrics, "memserve_instance_received_bytes_total", "prefill") / 2**20, 1),
        "ttft_ms": round(statistics.mean(t.ttft_ms for t in turns), 1),
        "ttft_p99_ms": round(statistics.quantiles([t.ttft_ms for t in turns], n=100)[98], 1),
        "jct_ms": round(statistics.mean(t.jct_ms for t in turns), 1),
        "reuse_by_turn": {n: round(s, 3) for n, s in share.items()},
    }


def show(results: list[dict[str, Any]]) -> str:
    """A Markdown table of all settings, and one of the reuse by turn."""
    names = [key for key in results[0] if key != "reuse_by_turn"]
    lines = ["| " + " | ".join(n.replace("_", " ") for n in names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(f"{r[n]:,}" if n != "setting" else r[n] for n in names) + " |" for r in results]
    turns = list(results[0]["reuse_by_turn"])
    lines += ["", "Share of the prompt that P reused, by turn:", ""]
    lines += ["| setting | " + " | ".join(str(t + 1) for t in turns) + " |", "| --- |" + " --- |" * len(turns)]
    lines += [
        f"| {r['setting']} | " + " | ".join(f"{r['reuse_by_turn'][t]:.0%}" for t in turns) + " |" for r in results
    ]
    return "\n".join(lines)


def main() -> int:
    """Run every setting, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="", help="for the tokenizer of long documents; default: no documents")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--serve", default="", help="further options of memserve serve, in one string")
    parser.add_argument("--settings", default="", help="comma-separated parts of setting names; default: all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.data.exists():
        print(f"skipped: no data at {args.data}")
        return 0
    sessions = chats.chat_sessions(args.data, args.sessions, args.turns)
    if args.documents:
        sessions += chats.document_sessions(
            args.data, chats.load_tokenizer(args.model), args.documents, 1500, args.turns
        )
    parts, results = [p for p in args.settings.split(",") if p], []
    for name, options in SETTINGS.items():
        if not parts or any(part in name for part in parts):
            results.append(run(name, options, sessions, args))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(show(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
