"""The store's disks beside fio: whole KV blocks, read and written past the page cache.

    python bench/store_disk.py [--folder DIR] [--gib 4] [--rounds 5] [--seconds 1] [--depths 1,8,32] [--json FILE]
        [--geometry llama3]

Each round measures, one after the other and in changing order, memserve and fio at each depth:

* *read*: random blocks of 737,280 bytes (a block of SmolLM2-135M, or of ``--geometry``) of a disk that is full, through
  the machine and its host: head, key, length and checksum of each block are compared. fio reads random blocks of one
  size and compares nothing;
* *write*: new blocks, admitted, appended, published; segments are emptied for them. fio writes one behind the other.

Both files are of one size, in one folder, written once before. Figures are medians of the rounds, in MB/s; the ratio
is the median of the rounds' ratios. Without fio, or on a file system without O_DIRECT, the other figures are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from memserve import _core
from memserve.base.units import GIB, MIB
from memserve.store.disks import events as ev
from memserve.store.disks.disks import Disks, DisksConfig
from memserve.store.host.disks import DiskHost

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import geometries

EXTENTS = 64


class Store:
    """A machine, its host and an arena of blocks."""

    def __init__(self, folder: Path, nbytes: int, block_bytes: int, sync: str, engine: str) -> None:
        self.block_bytes = block_bytes
        config = DisksConfig(sync=sync, admission="all", writes_max=EXTENTS, move_share=0.0)
        self.arena = _core.Arena(EXTENTS * block_bytes)
        rng = np.random.default_rng(1)
        np.frombuffer(self.arena, np.uint8)[:] = rng.integers(0, 256, self.arena.nbytes, np.uint8)
        self.refresh()
        self.host = DiskHost([(folder, nbytes)], config, engine=engine)
        self.disks = Disks(self.host.logs, config)
        self.done: queue.SimpleQueue[ev.DiskDone] = queue.SimpleQueue()
        self.host.start(self.done.put, self.arena.address, self.arena.nbytes, block_bytes)
        self.rng = random.Random(2)
        self.settle()

    def take(self) -> list[ev.DiskOutcome]:
        for action in self.disks.take_actions():
            self.host.perform(action)
        return self.disks.take_outcomes()

    def step(self) -> list[ev.DiskOutcome]:
        outcomes = self.take()
        if outcomes:
            return outcomes
        self.disks.handle(self.done.get(timeout=60), time.monotonic_ns())
        return self.take()

    def settle(self) -> None:
        self.take()
        while not self.disks.idle:
            self.step()

    def write_for(self, seconds: float, depth: int) -> float:
        """Bytes of payload a second."""
        extents, at_of, written = list(range(depth)), {}, 0
        start = time.perf_counter()
        end = start + seconds
        while True:
            now = time.perf_counter()
            while now < end and extents:
                key, extent = self.rng.randbytes(16), extents[-1]
                offset = extent * self.block_bytes
                if not self.disks.write(key, offset, self.block_bytes, time.monotonic_ns(), seal=self.seals[extent]):
                    break  # a segment is being prepared
                at_of[key] = extents.pop()
            if now >= end and not at_of:
                return written / (time.perf_counter() - start)
            for outcome in self.step():
                if isinstance(outcome, ev.Written):
                    extents.append(at_of.pop(outcome.key))
                    written += outcome.ok * self.block_bytes

    def read_for(self, seconds: float, depth: int) -> float:
        """Bytes of payload a second."""
        keys = self.disks.keys()
        all_keys = [keys[at : at + 16] for at in range(0, len(keys), 16)]
        extents, at_of, count = list(range(depth)), {}, 0
        start = time.perf_counter()
        end = start + seconds
        while True:
            now = time.perf_counter()
            while now < end and extents:
                read_id = self.disks.read(self.rng.choice(all_keys), extents[-1] * self.block_bytes, 0, 1 << 62)
                if read_id is None:
                    break
                at_of[read_id] = extents.pop()
            if now >= end and not at_of:
                break
            for outcome in self.step():
                if isinstance(outcome, ev.ReadEnded):
                    if not outcome.ok:
                        sys.exit(f"a block was not read back: {outcome.why}")
                    extents.append(at_of.pop(outcome.id))
                    count += 1
        return count * self.block_bytes / (time.perf_counter() - start)

    def refresh(self) -> None:
        """After writes, the extents hold what their checksums say again."""
        offsets = np.arange(EXTENTS, dtype=np.int64) * self.block_bytes
        self.seals = [int(seal) for seal in _core.seal_ranges(self.arena.address, offsets, self.block_bytes)]

    def fill(self, nbytes: int) -> None:
        while self.disks.counters()["payload_bytes_written"] < nbytes:
            self.write_for(1.0, 32)

    def close(self) -> None:
        self.settle()
        self.host.close()


def fio(path: Path, nbytes: int, block_bytes: int, kind: str, depth: int, seconds: float) -> float:
    """Bytes a second."""
    command = ["fio", "--name=blocks", f"--filename={path}", f"--size={nbytes}", f"--bs={block_bytes}"]
    command += [f"--rw={'randread' if kind == 'read' else 'write'}", "--blockalign=4096", "--direct=1"]
    command += ["--ioengine=io_uring", f"--iodepth={depth}", f"--runtime={seconds}", "--time_based", "--randrepeat=0"]
    done = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True)
    if done.returncode != 0:
        command[command.index("--ioengine=io_uring")] = "--ioengine=libaio"
        done = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0][kind]["bw_bytes"])


def lay_out(path: Path, nbytes: int) -> None:
    """A file whose every page was written."""
    made = _core.DiskQueue(str(path), nbytes, 4)
    data = os.urandom(8 * MIB)
    for at in range(0, nbytes, len(data)):
        made.write_bytes(at, at, data)
        while made.under_way >= 4:
            made.take()
    while made.under_way:
        made.take()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    nbytes, block_bytes = options.gib * GIB, geometries.SHAPES[options.geometry].kv.block_bytes
    with_fio = shutil.which("fio") is not None
    if not with_fio:
        print("fio is not installed: there is nothing to compare with")
    else:
        lay_out(folder / "fio.dat", nbytes)
    store = Store(folder / "store", nbytes, block_bytes, options.sync, options.engine)
    store.fill(nbytes + GIB // 2)
    figures: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for depth in options.depths:
            for kind in ("read", "write"):
                ours: Callable[[float, int], float] = store.read_for if kind == "read" else store.write_for
                store.refresh()
                sides: list[tuple[str, Callable[[], float]]] = [
                    ("memserve", lambda ours=ours, depth=depth: ours(options.seconds, depth))
                ]
                if with_fio:
                    sides.append(
                        (
                            "fio",
                            lambda kind=kind, depth=depth: fio(
                                folder / "fio.dat", nbytes, block_bytes, kind, depth, options.seconds
                            ),
                        )
                    )
                for name, run in sides if number % 2 else reversed(sides):
                    figures.setdefault(f"{kind} {depth} {name}", []).append(run())
    counters = store.disks.counters()
    print(f"engine {options.engine or 'the better one'}, sync {options.sync}, ", end="")
    print(f"{counters['reads_ok']:,} blocks read and compared, amplification {store.disks.write_amplification:.3f}")
    store.close()
    return table(figures, options.depths)


def table(figures: dict[str, list[float]], depths: list[int]) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for kind in ("read", "write"):
        for depth in depths:
            ours, theirs = figures[f"{kind} {depth} memserve"], figures.get(f"{kind} {depth} fio")
            row = {"memserve_mb_s": statistics.median(ours) / 1e6}
            text = f"{kind:5} depth {depth:2}: memserve {row['memserve_mb_s']:6.0f} MB/s"
            if theirs is not None:
                row["fio_mb_s"] = statistics.median(theirs) / 1e6
                row["ratio"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
                text += f", fio {row['fio_mb_s']:6.0f} MB/s, ratio {row['ratio']:.2f}"
            rows[f"{kind} {depth}"] = row
            print(text)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary folder")
    parser.add_argument("--gib", type=int, default=4, help="size of each of both files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--depths", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--sync", choices=("none", "segment", "always"), default="segment")
    parser.add_argument("--engine", choices=("", "io_uring", "threads"), default="")
    parser.add_argument("--json", type=Path)
    geometries.add_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="memserve-store-disk-") as name:
        probe = _core.DiskQueue(str(Path(name) / "probe"), MIB, 1)
        if not probe.direct:
            print("this file system has no O_DIRECT: memory is measured, not a disk; give --folder")
        del probe
        rows = measure(options, Path(name))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
