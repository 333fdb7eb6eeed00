"""A new user's first experience: time until the server is ready, whether answers are right, the quickest shape here.

    .venv/bin/python bench/first_hour.py                # start with the defaults, ask README's question 30 times
    .venv/bin/python bench/first_hour.py --shapes       # the same load on every shape, in turn

The question is asked with the official client: half of the time as README shows it, half without ``temperature``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import openai
from harness.flags import options, save
from harness.rounds import medians, turns
from harness.served import Served, serving
from harness.tables import show

QUESTION = {"role": "user", "content": "What is the capital of France?"}
SHAPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "one colocated": ("--colocated", "1"),
    "two colocated": ("--colocated", "2"),
    "1P1D": ("--prefill", "1", "--decode", "1"),
    "in process": ("--in-process",),
}
LOAD = "--rate 5 --requests 50 --prompt-tokens 200 --shared-tokens 100"


def ask(server: Served, times: int) -> list[tuple[str, int, str]]:
    """Text, tokens and finish reason of each answer."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
    answers = []
    for turn in range(times):
        more = {"temperature": 0} if turn % 2 else {}
        answer = client.chat.completions.create(model=server.model, messages=[QUESTION], **more)
        choice = answer.choices[0]
        answers.append((choice.message.content or "", answer.usage.completion_tokens, choice.finish_reason))
    return answers


def first_answers(times: int, serve: Sequence[str]) -> None:
    """Start as README does, ask, and count right answers."""
    with serving(*serve) as server:
        print(f"ready in {server.ready_s:.1f} s, measured from outside")
        answers = ask(server, times)
    right = [answer for answer in answers if re.search(r"\bParis\b", answer[0])]
    tokens = [count for _, count, _ in answers]
    print(f"{len(right)} of {times} name Paris; tokens an answer: {min(tokens)} to {max(tokens)}", end="")
    print(f"; {sum(reason != 'stop' for *_, reason in answers)} did not end by themselves")
    for text, count, _ in answers:
        if "Paris" not in text:
            print(f"  {count} tokens: {text[:100]!r}")


def measured(server: Served) -> dict[str, float]:
    """Mean TTFT and JCT in ms under the load."""
    command = [sys.executable, "-m", "memserve", "bench", "load", "--base-url", server.url, "--json", *LOAD.split()]
    output = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    figures = output["found"][0]["figures"]
    return {f"{name}_ms": 1000 * figures[f"{name}_s"]["mean"] for name in ("ttft", "jct")}


def compare_shapes(rounds: int, serve: Sequence[str]) -> list[dict[str, Any]]:
    """All shapes in turn, a fresh server each time; medians of the means."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in SHAPES}
    for _, name in turns(rounds, SHAPES):
        with serving("--metadata", "none", *SHAPES[name], *serve) as server:
            ask(server, 2)
            rows[name].append({"ready_s": server.ready_s, **measured(server)})
    return [{"shape": name, **medians(figures)} for name, figures in rows.items()]


def main() -> None:
    args = options(
        __doc__, rest="serve", times=(30, "how often the question is asked"), rounds=3,
        shapes=(False, "measure the load on every shape instead"),
    )  # fmt: skip
    if args.shapes:
        rows = compare_shapes(args.rounds, args.serve)
        show(rows, {"shape": "{shape}", "ready [s]": "{ready_s:.1f}", "TTFT [ms]": "{ttft_ms:.0f}",
                    "JCT [ms]": "{jct_ms:.0f}"})  # fmt: skip
        save(args, rows)
    else:
        first_answers(args.times, args.serve)


if __name__ == "__main__":
    main()
