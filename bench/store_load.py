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

import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.flags import Commas, options, save
from harness.prompts import documents
from harness.rounds import Samples
from harness.served import BLOCK, STATS_S, Side, plain_side, stored_side
from harness.tables import show

SIDES = ("no cache", "cache", "ssd", "slow")
TIERS = ("instance_store_tokens", "instance_store_ssd_tokens", "instance_store_fetches_failed", "store_fetches_cut")
SLOWER_MAX, QUICKER_MIN, QUICKER_FROM = 1.02, 2.0, 4
COLUMNS = {
    "cached:new": "{ratio}", "side": "{side}", "total s": "{total_s:.2f}", "to no cache": "{to_no_cache:.3f}",
    "hit": "{hit:.0f}", "of the store": "{store:.0f}", "of its disk": "{disk:.0f}", "late": "{late:.0f}",
    "verdict": "{verdict}",
}  # fmt: skip


def measure(args: Namespace) -> list[dict[str, Any]]:
    """A row for each ratio and side."""
    texts = documents(args.documents, args.document, args.seed)
    spent, cached, counts = Samples(), Samples(), Samples()
    flags = {"model": args.model}
    words = ("--kv-memory", args.kv_memory)
    with ExitStack() as stack:
        disk = (args.ssd, args.store_dram, *words)
        sides_made = {
            "no cache": lambda: plain_side("no cache", "--no-cache", *words, **flags),
            "cache": lambda: plain_side("cache", *words, **flags),
            "ssd": lambda: stored_side("ssd", *disk, **flags, folder=args.folder),
            "slow": lambda: stored_side("slow", *disk, **flags, folder=args.folder),
        }
        sides = {name: stack.enter_context(sides_made[name]()) for name in args.sides}
        fill_all(sides, texts, args)
        new = iter(documents(args.rounds * len(args.ratios) * len(texts), args.document, args.seed + 1))
        for number in range(args.rounds):
            for ratio in args.ratios:
                old, fresh = split(ratio, args.document)
                prompts = [text[:old] + next(new)[:fresh] for text in texts]
                for place in range(len(sides)):
                    side = list(sides.values())[(place + number) % len(sides)]
                    run_point(side, (ratio, side.name), prompts, args, (spent, cached, counts))
    return [row_of(ratio, side, args, spent, cached, counts) for ratio in args.ratios for side in sides]


def fill_all(sides: dict[str, Side], texts: list[list[int]], args: Namespace) -> None:
    """Every document is asked once, and reaches the disks; then the slow one becomes slow."""
    for side in sides.values():
        if side.faults is not None:
            side.fill(texts)
        else:
            side.run(texts[:1] if side.name == "no cache" else texts, 1, 1)
    if "slow" in sides:
        sides["slow"].break_disk(rate=args.slow_rate * 1e6, delay_s=args.slow_delay / 1e3)
    time.sleep(0.5)


def run_point(
    side: Side, point: tuple[str, str], prompts: list[list[int]], args: Namespace, samples: tuple[Samples, ...]
) -> None:
    """One ratio on one side, once."""
    spent, cached, counts = samples
    before = [side.total(name) for name in TIERS]
    total_s, answers = side.run(prompts, args.clients, args.answer)
    spent[point].append(total_s)
    cached[point].append(sum(answer.checked().cached for answer in answers))
    if side.faults is not None:
        time.sleep(STATS_S)
        for name, earlier in zip(TIERS, before, strict=True):
            counts[*point, name].append(side.total(name) - earlier)


def split(ratio: str, document: int) -> tuple[int, int]:
    """Tokens of a document, whole blocks, and new ones behind them: about ``document`` altogether."""
    cached, new = map(int, ratio.split(":"))
    old = round(document * cached / (cached + new) / BLOCK) * BLOCK
    return old, round(old * new / cached)


def row_of(ratio: str, side: str, args: Namespace, spent: Samples, cached: Samples, counts: Samples) -> dict[str, Any]:
    """Of one ratio and side. Tokens: a prompt, on average."""
    prompts = args.documents * args.rounds
    share = spent.ratio((ratio, side), (ratio, "no cache"))
    store, disk, failed, cut = (sum(counts[ratio, side, name]) for name in TIERS)
    verdict = ""
    if side not in SIDES[:2]:
        verdict = "good" if share <= SLOWER_MAX else f"MISS: above {SLOWER_MAX}"
        if side == "ssd" and int(ratio.split(":")[0]) >= QUICKER_FROM and share > 1 / QUICKER_MIN:
            verdict = f"MISS: not {QUICKER_MIN:g} times quicker"
    return {
        "ratio": ratio, "side": side, "seconds": spent[ratio, side], "total_s": spent.median((ratio, side)),
        "to_no_cache": share, "hit": sum(cached[ratio, side]) / prompts, "store": store / prompts,
        "disk": disk / prompts, "late": failed + cut, "verdict": verdict,
    }  # fmt: skip


def main() -> None:
    args = options(
        __doc__, ratios=Commas("1:1", "4:1", "20:1", "100:1"), sides=Commas(*SIDES), rounds=3,
        documents=(12, "more than fit into memory of instance and store"), document=(1024, "tokens"), clients=2,
        answer=(4, "tokens of each answer"), kv_memory="64MiB", store_dram="64MiB", ssd="2GiB",
        slow_rate=(12.0, "MB a second"), slow_delay=(20.0, "milliseconds"), model="", folder=Path, seed=0,
        quick={"ratios": ["1:1", "20:1"], "rounds": 1, "documents": 7},
    )  # fmt: skip
    if args.sides[0] != "no cache":
        raise SystemExit("--sides begins with 'no cache'")
    print(f"{args.documents} prompts a point of about {args.document} tokens, {args.clients} at a time,")
    print(f"{args.answer} tokens of answer; medians of {args.rounds} rounds. Tokens: a prompt, on average.")
    rows = measure(args)
    show(rows, COLUMNS)
    save(args, rows)


if __name__ == "__main__":
    main()
