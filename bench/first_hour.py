"""A new user's first experience: time until the server is ready, whether answers are right, the quickest shape here.

    .venv/bin/python bench/first_hour.py                # start with the defaults, ask README's question 30 times
    .venv/bin/python bench/first_hour.py --shapes       # the same load on every shape, in turn

The question is asked with the official client: half of the time as README shows it, half without ``temperature``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence

import openai
from served import Served, serving

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


def measured(server: Served) -> tuple[float, float]:
    """Mean TTFT and JCT in ms under the load."""
    command = [sys.executable, "-m", "memserve", "bench", "load", "--base-url", server.url, "--json", *LOAD.split()]
    done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    figures = done["found"][0]["figures"]
    return 1000 * figures["ttft_s"]["mean"], 1000 * figures["jct_s"]["mean"]


def shapes(rounds: int, serve: Sequence[str]) -> None:
    """All shapes in turn, a fresh server each time, so that a slow minute of the machine affects all of them alike."""
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SHAPES}
    for _ in range(rounds):
        for name, flags in SHAPES.items():
            with serving("--metadata", "none", *flags, *serve) as server:
                ask(server, 2)
                seen[name].append((server.ready_s, *measured(server)))
    print("shape           ready [s]  TTFT [ms]   JCT [ms]   medians of the means")
    for name, rows in seen.items():
        ready_s, ttft_ms, jct_ms = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:15} {ready_s:9.1f} {ttft_ms:10.0f} {jct_ms:10.0f}")


def main() -> None:
    """Parse, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30, help="how often the question is asked")
    parser.add_argument("--shapes", action="store_true", help="measure the load on every shape instead")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all shapes")
    parser.add_argument("serve", nargs="*", help="further options of memserve serve, after --")
    options = parser.parse_args()
    shapes(options.rounds, options.serve) if options.shapes else first_answers(options.times, options.serve)


if __name__ == "__main__":
    main()
