"""Disks that fail or stand still: the time to the first token beside the same load without a store.

    python bench/store_faults.py [--quick] [--rounds 3] [--faults healthy,ENOSPC,EIO,stall] [--out FILE]

Two servers stand beside each other with the same model and options; one of them has a store with little memory and a
disk. Conversations go to both in turns: a document that was asked before, a new question behind it. Meanwhile the disk
fails each write (ENOSPC), half of all jobs (EIO), or stands still for 2 s of every 4. Which of the two is asked first
changes with each round. Models run in float32, so every answer must be the same, token for token.

A disk that fails eight times in a row is lost until the store starts again, so each fault has a store of its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from store_sides import Answer, Side, documents, fill, plain_side, run_load, stored_side

DOCUMENT, QUESTION = 512, 32
FAULTS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "ENOSPC": {"fail_writes": "ENOSPC"},
    "EIO": {"fail_reads": "EIO", "fail_writes": "EIO", "share": 0.5},
    "stall": {"stall_s": 2.0, "every_s": 4.0},
}
SLOWER_MAX = 1.05


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each fault."""
    texts = documents(arguments.documents, DOCUMENT, arguments.seed)
    flags = ["--kv-memory", arguments.kv_memory, "--served-model-name", "x", "--dtype", "float32"]
    flags += ["--model", arguments.model] if arguments.model else []
    rows = []
    with plain_side("without", *flags) as plain:
        run_load(plain, texts, arguments.clients, 1)
        for name in arguments.faults.split(","):
            with stored_side("with", arguments.ssd, arguments.store_dram, *flags, folder=arguments.folder) as stored:
                rows.append(under_fault(name, plain, stored, texts, arguments))
                print(line_of(rows[-1]), flush=True)
    return rows


def under_fault(
    name: str, plain: Side, stored: Side, texts: list[list[int]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The same prompts on both sides, with a disk that fails."""
    fill(stored, texts, 1)
    stored.break_disk(**FAULTS[name])
    told: dict[str, list[Answer]] = {"without": [], "with": []}
    tails = []
    for number in range(arguments.rounds):
        new = documents(len(texts), QUESTION, 1000 * number + arguments.seed + 1)
        prompts = [text + question for text, question in zip(texts, new, strict=True)]
        for side in (plain, stored) if number % 2 else (stored, plain):
            told[side.name] += run_load(side, prompts, arguments.clients, arguments.answer).answers
        tails.append(p99(told["with"][-len(texts) :]) / p99(told["without"][-len(texts) :]))
    pairs = list(zip(told["without"], told["with"], strict=True))
    return {
        "fault": name,
        "prompts": len(pairs),
        "errors": [answer.error for pair in pairs for answer in pair if answer.error],
        "other_answers": sum(before.text != after.text for before, after in pairs),
        "p99_without_s": p99(told["without"]),
        "p99_with_s": p99(told["with"]),
        "p99_ratio": p99(told["with"]) / p99(told["without"]),
        "p99_ratio_of_rounds": median(tails),
        "p50_without_s": median(answer.first_s for answer in told["without"]),
        "p50_with_s": median(answer.first_s for answer in told["with"]),
        "cached_without": sum(answer.cached for answer in told["without"]) / len(pairs),
        "cached_with": sum(answer.cached for answer in told["with"]) / len(pairs),
        "disk_errors": stored.total("store_disk_errors"),
        "disks": stored.total("store_disks"),
        "late": stored.total("store_disk_reads_late"),
    }


def p99(answers: list[Answer]) -> float:
    """Of the time to the first token."""
    return float(np.percentile([answer.first_s for answer in answers], 99))


def line_of(row: dict[str, Any]) -> str:
    """For people."""
    good = not row["errors"] and not row["other_answers"] and row["p99_ratio_of_rounds"] <= SLOWER_MAX
    text = f"{row['fault']:<8} P99 TTFT {row['p99_with_s']:.2f} s, without a store {row['p99_without_s']:.2f} s: "
    text += f"{row['p99_ratio']:.3f} (of rounds {row['p99_ratio_of_rounds']:.3f}); "
    text += f"P50 {row['p50_with_s']:.2f} and {row['p50_without_s']:.2f} s; "
    text += f"cached {row['cached_with']:.0f} and {row['cached_without']:.0f} tokens; {row['prompts']} prompts, "
    text += f"{len(row['errors'])} failed, {row['other_answers']} other answers; {row['disk_errors']:.0f} disk errors, "
    return text + f"{row['late']:.0f} reads late, {row['disks']:.0f} disk left  {'good' if good else 'MISS'}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two minutes: one round of fewer prompts")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--documents", type=int, default=16, help="more than fit into memory of instance and store")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--answer", type=int, default=4, help="tokens of each answer")
    parser.add_argument("--kv-memory", default="96MiB")
    parser.add_argument("--store-dram", default="64MiB")
    parser.add_argument("--ssd", default="2GiB")
    parser.add_argument("--model", default="")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.documents = 1, 8
    rows = measure(arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
