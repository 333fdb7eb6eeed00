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

import argparse
import gzip
import hashlib
import json
import queue
import sys
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from memserve import _core
from memserve.base.units import MIB, NS_PER_S
from memserve.store.disks import events as ev
from memserve.store.disks.disks import Disks, DisksConfig
from memserve.store.host.disks import DiskHost

HALF_HOUR_NS = 1800 * NS_PER_S
NS_PER_MINUTE = 60 * NS_PER_S
MINUTES_PER_DAY = 24 * 60
EXTENTS = 64
MEMORY_SHARE = 8
"""Memory has so many times fewer blocks than the disk."""
NEVER_NS = 1 << 62


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


class Store:
    """Disks as production has them, behind a memory that is a list of keys."""

    def __init__(self, folder: Path, options: argparse.Namespace, budget: int) -> None:
        self.block_bytes = options.block_kib << 10
        config = DisksConfig(writes_per_day_bytes=budget, admission=options.admission)
        self.arena = _core.Arena(EXTENTS * self.block_bytes)
        np.frombuffer(self.arena, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, self.arena.nbytes, np.uint8)
        offsets = np.arange(EXTENTS, dtype=np.int64) * self.block_bytes
        self.seals = [int(seal) for seal in _core.seal_ranges(self.arena.address, offsets, self.block_bytes)]
        self.host = DiskHost([(folder, options.mib * MIB)], config)
        self.disks = Disks(self.host.logs, config)
        self.done: queue.SimpleQueue[ev.DiskDone] = queue.SimpleQueue()
        self.host.start(self.done.put, self.arena.address, self.arena.nbytes, self.block_bytes)
        self.memory: OrderedDict[bytes, None] = OrderedDict()
        self.memory_blocks = options.mib * MIB // self.block_bytes // MEMORY_SHARE
        self.free = list(range(EXTENTS))
        self.writing: dict[bytes, int] = {}
        self.reading: dict[int, tuple[bytes, int]] = {}
        self.found: Counter[str] = Counter()
        self.by_minute: Counter[int] = Counter()
        self.settle(0)

    def ask(self, key: bytes, now_ns: int) -> None:
        """A request wants a block: it is in memory, on the disk, or computed and put."""
        if key in self.memory:
            self.memory.move_to_end(key)
            self.found["memory"] += 1
            self._write(key, now_ns)
        elif key in self.disks and self._read(key, now_ns):
            self.found["disk"] += 1
        else:
            self.found["computed"] += 1
            self._keep(key)
            self._write(key, now_ns)

    def _keep(self, key: bytes) -> None:
        self.memory[key] = None
        if len(self.memory) > self.memory_blocks:
            self.memory.popitem(last=False)

    def _write(self, key: bytes, now_ns: int) -> None:
        """The bytes are those of the extent; no two extents are equal, and blocks need not differ."""
        while len(self.writing) >= self.disks.config.writes_max or not self.free:
            self.step(now_ns)
        if not self.disks.wants(key, self.block_bytes, now_ns):
            return
        extent = self.free.pop()
        offset, seal = extent * self.block_bytes, self.seals[extent]
        for _ in range(1000):  # a segment may have to be emptied first
            if self.disks.write(key, offset, self.block_bytes, now_ns, seal=seal):
                self.writing[key] = extent
                return
            if self.disks.idle:
                break
            self.step(now_ns)
        self.free.append(extent)

    def _read(self, key: bytes, now_ns: int) -> bool:
        """Into an extent that is then sealed anew: its bytes are others."""
        while not self.free:
            self.step(now_ns)
        extent = self.free.pop()
        read = self.disks.read(key, extent * self.block_bytes, now_ns, NEVER_NS)
        if read is None:
            self.free.append(extent)
            return False
        self.reading[read] = key, extent
        return True

    def _take(self, now_ns: int) -> bool:
        before = self.disks.counters()["disk_bytes_written"]
        self.by_minute[now_ns // NS_PER_MINUTE] += before - sum(self.by_minute.values())
        for action in self.disks.take_actions():
            self.host.perform(action)
        outcomes = self.disks.take_outcomes()
        for outcome in outcomes:
            if isinstance(outcome, ev.Written):
                self.free.append(self.writing.pop(outcome.key))
            elif isinstance(outcome, ev.ReadEnded):
                key, extent = self.reading.pop(outcome.id)
                if not outcome.ok:
                    sys.exit(f"a block was not read back: {outcome.why}")
                here = np.array([extent * self.block_bytes], np.int64)
                self.seals[extent] = int(_core.seal_ranges(self.arena.address, here, self.block_bytes)[0])
                self.free.append(extent)
                self._keep(key)
        return bool(outcomes)

    def step(self, now_ns: int) -> None:
        """Wait for the disk, unless something has ended already."""
        if not self._take(now_ns) and not self.disks.idle:
            self.disks.handle(self.done.get(timeout=60), now_ns)
            self._take(now_ns)

    def go_on(self, now_ns: int) -> None:
        """Take what has ended."""
        while not self.done.empty():
            self.disks.handle(self.done.get(), now_ns)
        self._take(now_ns)

    def settle(self, now_ns: int) -> None:
        """Until nothing is under way."""
        self._take(now_ns)
        while not self.disks.idle:
            self.step(now_ns)

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


@dataclass(frozen=True)
class Run:
    """The figures of one run."""

    budget_bytes: int
    written_bytes: int
    kernel_bytes: int
    busiest_day_bytes: int
    payload_bytes: int
    write_amplification: float
    moved: int
    refused_budget: int
    refused_seldom: int
    found: dict[str, int]

    def told(self, hours: float, disk_bytes: int) -> str:
        """In lines."""
        asked = sum(self.found.values())
        name = f"budget {self.budget_bytes / MIB:,.0f} MiB a day" if self.budget_bytes else "no budget"
        found = ", ".join(f"{where} {count / asked:.1%}" for where, count in sorted(self.found.items()))
        return (
            f"{name}: {self.written_bytes / MIB:,.0f} MiB written in {hours:g} h, "
            f"{self.written_bytes / disk_bytes:.2f} times the disk (the kernel: {self.kernel_bytes / MIB:,.0f} MiB); "
            f"at most {self.busiest_day_bytes / MIB:,.0f} MiB in 24 h\n"
            f"  payload {self.payload_bytes / MIB:,.0f} MiB, write amplification {self.write_amplification:.3f}, "
            f"{self.moved:,} blocks moved; not written: {self.refused_budget:,} for the budget, "
            f"{self.refused_seldom:,} asked for once\n  blocks: {found}"
        )


def play(trace: list[tuple[int, list[int]]], options: argparse.Namespace, budget: int) -> Run:
    """One run on a fresh file."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="memserve-store-wear-") as folder:
        store = Store(Path(folder), options, budget)
        before = kernel_bytes()
        now = 0
        for now, keys in repeated(trace, options.hours):
            for key in keys:
                store.ask(key, now)
            store.go_on(now)
        store.settle(now)
        counters = store.disks.counters()
        run = Run(
            budget, counters["disk_bytes_written"], kernel_bytes() - before, store.busiest_day_bytes(),
            counters["payload_bytes_written"], store.disks.write_amplification, counters["moves"],
            counters["refused_budget"], counters["refused_seldom"], dict(store.found),
        )  # fmt: skip
        store.host.close()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="in Mooncake's form, packed or not")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary folder")
    parser.add_argument("--mib", type=int, default=2048, help="size of the disk")
    parser.add_argument("--block-kib", type=int, default=64, help="size of a block of the trace")
    parser.add_argument("--drive-writes-per-day", type=float, default=2.0, help="budget, in sizes of the disk")
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--admission", choices=("second-hit", "all"), default="second-hit")
    parser.add_argument("--quick", action="store_true", help="an eighth of the disk, and of the trace's requests")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.trace.is_file():
        sys.exit(f"skipped: no trace {options.trace}")
    requests = None
    if options.quick:
        options.mib, requests = max(64, options.mib // 8), 700
    trace = trace_of(options.trace, requests)
    disk_bytes = options.mib * MIB
    blocks = sum(len(keys) for _, keys in trace)
    print(f"{len(trace)} requests, {blocks} blocks of {options.block_kib} KiB; a disk of {options.mib} MiB")
    rows = []
    for budget in (0, round(options.drive_writes_per_day * disk_bytes)):
        rows.append(play(trace, options, budget))
        print(rows[-1].told(options.hours, disk_bytes), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if rows[-1].busiest_day_bytes > rows[-1].budget_bytes:
        sys.exit("more was written within 24 hours than the budget allows")


if __name__ == "__main__":
    main()
