"""Disks that fail or stand still: the time to the first token beside the same load without a store.

    python bench/store_faults.py [--quick] [--rounds 3] [--faults healthy,ENOSPC,EIO,stall] [--out FILE]

Two servers stand beside each other with the same model and options; one of them has a store with little memory and a
disk. Conversations go to both in turns: a document that was asked before, a new question behind it. Meanwhile the disk
fails each write (ENOSPC), half of all jobs (EIO), or stands still for 2 s of every 4. Which of the two is asked first
changes with each round. Models run in float32, so every answer must be the same, token for token.

A disk that fails eight times in a row is lost until the store starts again, so each fault has a store of its own.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from harness.clients import Answer
from harness.flags import Commas, options, save
from harness.prompts import documents
from harness.rounds import Samples, median, percentile, turns
from harness.served import Side, plain_side, stored_side
from harness.tables import Table

DOCUMENT, QUESTION = 512, 32
FAULTS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "ENOSPC": {"fail_writes": "ENOSPC"},
    "EIO": {"fail_reads": "EIO", "fail_writes": "EIO", "share": 0.5},
    "stall": {"stall_s": 2.0, "every_s": 4.0},
}
SLOWER_MAX = 1.05
COLUMNS = {
    "fault": "{fault}", "P99 TTFT": "{p99_with_s:.2f} s", "without a store": "{p99_without_s:.2f} s",
    "ratio": "{p99_ratio:.3f}", "of rounds": "{p99_ratio_of_rounds:.3f}", "P50": "{p50_with_s:.2f} s",
    "P50 without": "{p50_without_s:.2f} s", "cached": "{cached_with:.0f}", "cached without": "{cached_without:.0f}",
    "prompts": "{prompts}", "failed": "{failed}", "other answers": "{other_answers}",
    "disk errors": "{disk_errors:.0f}", "late": "{late:.0f}", "disks left": "{disks:.0f}", "verdict": "{verdict}",
}  # fmt: skip


def measure(args: Namespace) -> list[dict[str, Any]]:
    """A row for each fault."""
    texts = documents(args.documents, DOCUMENT, args.seed)
    flags, rows, table = ("--kv-memory", args.kv_memory, "--dtype", "float32"), [], Table(COLUMNS)
    with plain_side("without", *flags, model=args.model) as plain:
        plain.run(texts, args.clients, 1)
        for fault in args.faults:
            disk = (args.ssd, args.store_dram, *flags)
            with stored_side("with", *disk, model=args.model, folder=args.folder) as stored:
                rows.append(measure_fault(fault, plain, stored, texts, args))
                table.show(rows[-1])
    return rows


def measure_fault(fault: str, plain: Side, stored: Side, texts: list[list[int]], args: Namespace) -> dict[str, Any]:
    """The same prompts on both sides, with a disk that fails."""
    stored.fill(texts)
    stored.break_disk(**FAULTS[fault])
    answers: dict[str, list[Answer]] = {"without": [], "with": []}
    tails = Samples()
    for number, side in turns(args.rounds, (stored, plain)):
        questions = documents(len(texts), QUESTION, 1000 * number + args.seed + 1)
        prompts = [text + question for text, question in zip(texts, questions, strict=True)]
        _, latest = side.run(prompts, args.clients, args.answer)
        answers[side.name] += latest
        tails[side.name].append(p99(latest))
    pairs = list(zip(*answers.values(), strict=True))
    row = {"fault": fault, "prompts": len(pairs), "p99_ratio": p99(answers["with"]) / p99(answers["without"])}
    for name, side_answers in answers.items():
        row[f"p99_{name}_s"], row[f"p50_{name}_s"] = (
            p99(side_answers),
            median(answer.first_s for answer in side_answers),
        )
        row[f"cached_{name}"] = sum(answer.cached for answer in side_answers) / len(side_answers)
    row |= {
        "p99_ratio_of_rounds": tails.ratio("with", "without"),
        "errors": [answer.error for pair in pairs for answer in pair if answer.error],
        "other_answers": sum(before.text != after.text for before, after in pairs),
        "disk_errors": stored.total("store_disk_errors"),
        "disks": stored.total("store_disks"),
        "late": stored.total("store_disk_reads_late"),
    }
    is_good = not row["errors"] and not row["other_answers"] and row["p99_ratio_of_rounds"] <= SLOWER_MAX
    return row | {"failed": len(row["errors"]), "verdict": "good" if is_good else "MISS"}


def p99(answers: list[Answer]) -> float:
    """Of the time to the first token."""
    return percentile((answer.first_s for answer in answers), 0.99)


def main() -> None:
    args = options(
        __doc__, faults=Commas(*FAULTS), rounds=4, clients=2, answer=(4, "tokens of each answer"),
        documents=(16, "more than fit into memory of instance and store"), kv_memory="96MiB", store_dram="64MiB",
        ssd="2GiB", model="", folder=Path, seed=0, quick={"rounds": 1, "documents": 8},
    )  # fmt: skip
    save(args, measure(args))


if __name__ == "__main__":
    main()
