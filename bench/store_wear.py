"""How much a store writes to flash: half an hour of a real trace on a real file, without and with a budget.

    python bench/store_wear.py --trace DATA/traces/mooncake_conversation_0-30min.jsonl.gz [--folder DIR] [--mib 2048]
        [--block-kib 64] [--drive-writes-per-day 2] [--hours 0.5] [--admission second-hit] [--quick] [--json FILE]

Each block of the trace (512 tokens) is one value of ``--block-kib``: the trace's identities and times, other sizes.
The disk has ``--mib``. Blocks pass a memory of an eighth of the disk first, as in a store: what is asked for there
counts as asked for, what is only on the disk is read, what is nowhere is put, and written if the store's admission says
so. Time is the trace's, so a budget of a day is used up as in the recorded half hour; the bytes are written as fast as
the disk can. ``--hours 48`` repeats the half hour, each time with other identities.

Printed, for no budget and for ``--drive-writes-per-day`` times the disk's size, one after the other: bytes written by
the store's own count and by the kernel's (``/proc/self/io``), the most within 24 hours beside the budget, payload,
write amplification, blocks moved, hits. Exit status 1: a budget was exceeded.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import tempfile
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.disks import DiskRig
from harness.flags import need, options, save
from harness.tables import Table

from memserve.base.units import MIB, NS_PER_S
from memserve.store.disks import events as ev
from memserve.store.disks.disks import DisksConfig

HALF_HOUR_NS = 1800 * NS_PER_S
NS_PER_MINUTE = 60 * NS_PER_S
MINUTES_PER_DAY = 24 * 60
MEMORY_SHARE = 8
"""Memory has so many times fewer blocks than the disk."""


def trace_of(path: Path, requests: int | None) -> list[tuple[int, list[int]]]:
    """Time (ns) and block numbers of each request, in order."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["timestamp"] * 1_000_000, row["hash_ids"]) for row in rows[:requests]]


def repeated(trace: list[tuple[int, list[int]]], hours: float) -> Iterator[tuple[int, list[bytes]]]:
    """Time and keys of each request until ``hours`` are over; each repetition has other keys."""
    turn = 0
    while True:
        for at_ns, blocks in trace:
            now = turn * HALF_HOUR_NS + at_ns
            if now >= hours * 3600 * NS_PER_S:
                return
            yield now, [hashlib.blake2b(f"{turn}/{block}".encode(), digest_size=16).digest() for block in blocks]
        turn += 1


class Store(DiskRig):
    """Disks behind a memory that is a list of keys."""

    def __init__(self, folder: Path, args: Namespace, budget: int) -> None:
        self.found: Counter[str] = Counter()
        self.by_minute: Counter[int] = Counter()
        self.memory: OrderedDict[bytes, None] = OrderedDict()
        self.writing: dict[bytes, int] = {}
        self.reading: dict[int, tuple[bytes, int]] = {}
        self.now_ns = 0
        config = DisksConfig(writes_per_day_bytes=budget, admission=args.admission)
        super().__init__(folder, args.mib * MIB, config, args.block_kib << 10)
        self.memory_blocks = args.mib * MIB // self.block_bytes // MEMORY_SHARE

    def now(self) -> int:
        return self.now_ns

    def ask(self, key: bytes) -> None:
        """A request wants a block: it is in memory, on the disk, or computed and put."""
        if key in self.memory:
            self.memory.move_to_end(key)
            self.found["memory"] += 1
            self._put(key)
        elif key in self.disks and self._get(key):
            self.found["disk"] += 1
        else:
            self.found["computed"] += 1
            self._keep(key)
            self._put(key)

    def _keep(self, key: bytes) -> None:
        self.memory[key] = None
        if len(self.memory) > self.memory_blocks:
            self.memory.popitem(last=False)

    def _put(self, key: bytes) -> None:
        """The bytes are those of the extent; no two extents are equal, and blocks need not differ."""
        while len(self.writing) >= self.config.writes_max or not self.free:
            self.step()
        if not self.disks.wants_value(key, self.block_bytes, self.now_ns):
            return
        extent = self.free.pop()
        for _ in range(1000):  # a segment may have to be emptied first
            if self.write(key, extent):
                self.writing[key] = extent
                return
            if self.disks.is_idle:
                break
            self.step()
        self.free.append(extent)

    def _get(self, key: bytes) -> bool:
        """Into an extent that is then sealed anew: its bytes are others."""
        while not self.free:
            self.step()
        number = self.read(key, self.free[-1])
        if number is not None:
            self.reading[number] = key, self.free.pop()
        return number is not None

    def take(self) -> list[ev.DiskOutcome]:
        """Beside: bytes by minute, and extents that are free again."""
        written = self.disks.counters()["disk_bytes_written"]
        self.by_minute[self.now_ns // NS_PER_MINUTE] += written - sum(self.by_minute.values())
        outcomes = super().take()
        for outcome in outcomes:
            if isinstance(outcome, ev.Written):
                self.free.append(self.writing.pop(outcome.key))
            elif isinstance(outcome, ev.ReadEnded):
                key, extent = self.reading.pop(outcome.id)
                self.seal(range(extent, extent + 1))
                self.free.append(extent)
                self._keep(key)
        return outcomes

    def go_on(self) -> None:
        for request_done in self.arrived():
            self.disks.handle(request_done, self.now_ns)
        self.take()

    def busiest_day_bytes(self) -> int:
        """Most bytes within 24 hours that begin with a minute."""
        minutes, most, first, within = sorted(self.by_minute), 0, 0, 0
        for minute in minutes:
            within += self.by_minute[minute]
            while minute - minutes[first] >= MINUTES_PER_DAY:
                within -= self.by_minute[minutes[first]]
                first += 1
            most = max(most, within)
        return most


def kernel_bytes() -> int:
    """What this process has had written to devices, as the kernel counts it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


COLUMNS = {
    "budget, MiB a day": "{budget_mib:,.0f}", "written, MiB": "{written_mib:,.0f}", "times the disk": "{disks:.2f}",
    "by the kernel, MiB": "{kernel_mib:,.0f}", "most in 24 h, MiB": "{busiest_mib:,.0f}",
    "payload, MiB": "{payload_mib:,.0f}", "amplification": "{amplification:.3f}", "moved": "{moves:,}",
    "refused: budget": "{refused_budget:,}", "asked for once": "{refused_seldom:,}", "blocks": "{blocks}",
}  # fmt: skip


def play(trace: list[tuple[int, list[int]]], args: Namespace, budget: int) -> dict[str, Any]:
    """One run on a fresh file."""
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="memserve-store-wear-") as folder:
        store = Store(Path(folder), args, budget)
        before = kernel_bytes()
        for now_ns, keys in repeated(trace, args.hours):
            store.now_ns = now_ns
            for key in keys:
                store.ask(key)
            store.go_on()
        store.settle()
        counters, busiest = store.disks.counters(), store.busiest_day_bytes()
        written, blocks_wanted = counters["disk_bytes_written"], sum(store.found.values())
        row = {
            "budget_mib": budget / MIB, "written_mib": written / MIB, "disks": written / (args.mib * MIB),
            "kernel_mib": (kernel_bytes() - before) / MIB, "busiest_mib": busiest / MIB,
            "payload_mib": counters["payload_bytes_written"] / MIB, "amplification": store.disks.write_amplification,
            "is_within": busiest <= budget, "found": dict(store.found),
            "blocks": ", ".join(f"{place} {count / blocks_wanted:.1%}" for place, count in sorted(store.found.items())),
            **{name: counters[name] for name in ("moves", "refused_budget", "refused_seldom")},
        }  # fmt: skip
        store.host.close()
    return row


def main() -> None:
    args = options(
        __doc__, required="trace", trace=Path, folder=Path, mib=(2048, "size of the disk"), hours=0.5,
        block_kib=(64, "size of a block of the trace"), drive_writes_per_day=(2.0, "budget, in sizes of the disk"),
        admission=("second-hit", "", ("second-hit", "all")), quick={},
    )  # fmt: skip
    if args.quick:  # an eighth of the disk, and of the trace's requests
        args.mib = max(64, args.mib // 8)
    trace = trace_of(need(args.trace, "trace"), 700 if args.quick else None)
    blocks = sum(len(keys) for _, keys in trace)
    print(f"{len(trace)} requests, {blocks} blocks of {args.block_kib} KiB; a disk of {args.mib} MiB")
    table, rows = Table(COLUMNS), []
    for budget in (0, round(args.drive_writes_per_day * args.mib * MIB)):
        rows.append(play(trace, args, budget))
        table.show(rows[-1])
    save(args, rows)
    if not rows[-1]["is_within"]:
        sys.exit("more was written within 24 hours than the budget allows")


if __name__ == "__main__":
    main()
