"""Never slower than no cache: loads of cached and new tokens, a store's disk behind little memory, healthy and slow.

    python bench/store_load.py [--quick] [--ratios 1:1,4:1,20:1,100:1] [--rounds 3] [--slow-rate 12] [--out FILE]

Four servers stand beside each other, with the same model and options:

    no cache   the reference: ``--no-cache``
    cache      prefix caching in memory as small as that of the others, no store
    ssd        the same, and a store with a little memory and a disk
    slow       the same, and a disk that gives ``--slow-rate`` MB a second, each read ``--slow-delay`` ms late

Documents of 1,024 random tokens are asked once: twice as many as memory of instance and store hold, so that by the time
one is asked again it is on the disk alone. Then, for each ratio, prompts of the first part of a document and new tokens
behind it go to the servers in turns; the order of the servers changes with each turn. The slow disk becomes slow when
the documents are on it: what the store has measured before is wrong then.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from store_sides import BLOCK, STATS_S, Side, documents, fill, plain_side, run_load, stored_side

SIDES = ("no cache", "cache", "ssd", "slow")
TIERS = ("instance_store_tokens", "instance_store_ssd_tokens", "instance_store_fetches_failed", "store_fetches_cut")
SLOWER_MAX, QUICKER_MIN, QUICKER_FROM = 1.02, 2.0, 4


@dataclass
class Point:
    """One ratio on one side: a number a round."""

    seconds: list[float]
    cached: list[int]


def split(ratio: str, document: int) -> tuple[int, int]:
    """Tokens of a document, whole blocks, and new ones behind them: about ``document`` altogether."""
    cached, new = map(int, ratio.split(":"))
    old = round(document * cached / (cached + new) / BLOCK) * BLOCK
    return old, round(old * new / cached)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All points, and what counters say of each side."""
    texts = documents(arguments.documents, arguments.document, arguments.seed)
    points = {(ratio, side): Point([], []) for ratio in arguments.ratios for side in arguments.sides}
    counts: dict[tuple[str, str], dict[str, float]] = {}
    flags = ["--kv-memory", arguments.kv_memory, "--served-model-name", "x"]
    flags += ["--model", arguments.model] if arguments.model else []
    with ExitStack() as stack:
        disk = (arguments.ssd, arguments.store_dram, *flags)
        made = {
            "no cache": lambda: plain_side("no cache", "--no-cache", *flags),
            "cache": lambda: plain_side("cache", *flags),
            "ssd": lambda: stored_side("ssd", *disk, folder=arguments.folder),
            "slow": lambda: stored_side("slow", *disk, folder=arguments.folder),
        }
        sides = [stack.enter_context(made[name]()) for name in arguments.sides]
        fill_all(sides, texts, arguments)
        count = arguments.rounds * len(arguments.ratios) * len(texts)
        new = iter(documents(count, arguments.document, arguments.seed + 1))
        for number in range(arguments.rounds):
            for ratio in arguments.ratios:
                cached, fresh = split(ratio, arguments.document)
                prompts = [text[:cached] + next(new)[:fresh] for text in texts]
                for turn in range(len(sides)):
                    side = sides[(turn + number) % len(sides)]
                    _one(side, ratio, prompts, arguments, points, counts)
    return {"points": points, "counts": counts}


def fill_all(sides: list[Side], texts: list[list[int]], arguments: argparse.Namespace) -> None:
    """Every document is asked once, and reaches the disks; then the slow one becomes slow."""
    for side in sides:
        if side.faults is not None:
            fill(side, texts, 1)
        else:
            run_load(side, texts[:1] if side.name == "no cache" else texts, 1, 1)
    for side in sides:
        if side.name == "slow":
            side.break_disk(rate=arguments.slow_rate * 1e6, delay_s=arguments.slow_delay / 1e3)
    time.sleep(0.5)


def _one(
    side: Side,
    ratio: str,
    prompts: list[list[int]],
    arguments: argparse.Namespace,
    points: dict[tuple[str, str], Point],
    counts: dict[tuple[str, str], dict[str, float]],
) -> None:
    before = {name: side.total(name) for name in TIERS}
    run = run_load(side, prompts, arguments.clients, arguments.answer)
    errors = [answer.error for answer in run.answers if answer.error]
    if errors:
        raise SystemExit(f"{side.name} at {ratio}: {errors[0]}")
    point = points[ratio, side.name]
    point.seconds.append(run.total_s)
    point.cached.append(sum(answer.cached for answer in run.answers))
    if side.faults is not None:
        time.sleep(STATS_S)
        seen = counts.setdefault((ratio, side.name), dict.fromkeys(TIERS, 0.0))
        for name in TIERS:
            seen[name] += side.total(name) - before[name]


def ratios_of(found: dict[str, Any], ratio: str, side: str) -> float:
    """Median over the rounds of the total time beside that without a cache in the same round."""
    mine, none = found["points"][ratio, side].seconds, found["points"][ratio, "no cache"].seconds
    return median(after / before for before, after in zip(none, mine, strict=True))


def show(found: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the table; returns its rows."""
    rows = []
    print(f"{arguments.documents} prompts a point of about {arguments.document} tokens, {arguments.clients} at a time,")
    print(f"{arguments.answer} tokens of answer; medians of {arguments.rounds} rounds. Tokens: a prompt, on average.")
    print("cached:new  side       total s   to no cache   hit  of the store  of its disk   late  verdict")
    for ratio in arguments.ratios:
        for side in arguments.sides:
            point, share = found["points"][ratio, side], ratios_of(found, ratio, side)
            prompts = arguments.documents * arguments.rounds
            hit = sum(point.cached) / prompts
            tiers = found["counts"].get((ratio, side), dict.fromkeys(TIERS, 0.0))
            store, disk, failed, cut = (tiers[name] for name in TIERS)
            verdict = "" if side in SIDES[:2] else _verdict(ratio, side, share)
            print(
                f"{ratio:>10}  {side:<9} {median(point.seconds):8.2f}   {share:11.3f} {hit:5.0f}"
                f"  {store / prompts:12.0f}  {disk / prompts:11.0f}  {failed + cut:5.0f}  {verdict}"
            )
            rows.append({"ratio": ratio, "side": side, "seconds": point.seconds, "to_no_cache": share, "hit": hit})
            rows[-1] |= tiers
    return rows


def _verdict(ratio: str, side: str, share: float) -> str:
    if share > SLOWER_MAX:
        return f"MISS: above {SLOWER_MAX}"
    if side == "ssd" and int(ratio.split(":")[0]) >= QUICKER_FROM and share > 1 / QUICKER_MIN:
        return f"MISS: not {QUICKER_MIN:g} times quicker"
    return "good"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two minutes: two ratios, one round")
    parser.add_argument("--ratios", default="1:1,4:1,20:1,100:1")
    parser.add_argument("--sides", default=",".join(SIDES), help="the first is what the others are held against")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=12, help="more than fit into memory of instance and store")
    parser.add_argument("--document", type=int, default=1024, help="tokens")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--answer", type=int, default=4, help="tokens of each answer")
    parser.add_argument("--kv-memory", default="64MiB")
    parser.add_argument("--store-dram", default="64MiB")
    parser.add_argument("--ssd", default="2GiB")
    parser.add_argument("--slow-rate", type=float, default=12.0, help="MB a second")
    parser.add_argument("--slow-delay", type=float, default=20.0, help="milliseconds")
    parser.add_argument("--model", default="")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ratios, arguments.rounds, arguments.documents = "1:1,20:1", 1, 7
    arguments.ratios, arguments.sides = arguments.ratios.split(","), arguments.sides.split(",")
    if arguments.sides[0] != "no cache":
        parser.error("--sides begins with 'no cache'")
    rows = show(measure(arguments), arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
