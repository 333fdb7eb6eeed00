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

import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from argparse import Namespace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from harness.disks import EXTENTS, DiskRig
from harness.flags import Commas, options, save
from harness.rounds import Samples, turns
from harness.tables import show

import geometries
from memserve import _core
from memserve.base.units import GIB, MIB
from memserve.store.disks import events as ev
from memserve.store.disks.disks import DisksConfig

SIZES = {"gib": (4, "size of each of both files"), "seconds": (1.0, "of each measurement")}
SYNCS, ENGINES = ("none", "segment", "always"), ("", "io_uring", "threads")
COLUMNS = {
    "what": "{kind}", "depth": "{depth}", "memserve": "{memserve_mb_s:.0f} MB/s", "fio": "{fio_mb_s:.0f} MB/s",
    "ratio": "{ratio:.2f}",
}  # fmt: skip


class Store(DiskRig):
    """Keeps a number of writes, or reads, under way."""

    def __init__(self, folder: Path, nbytes: int, block_bytes: int, sync: str, engine: str) -> None:
        config = DisksConfig(sync=sync, admission="all", writes_max=EXTENTS, move_share=0.0)
        super().__init__(folder, nbytes, config, block_bytes, engine=engine)
        self.rng = random.Random(2)

    def run(self, kind: str, seconds: float, depth: int) -> float:
        """Bytes of payload a second."""
        keys = self.disks.all_keys()
        key_list = [keys[place : place + 16] for place in range(0, len(keys), 16)]
        self.seal(range(EXTENTS))
        extents, under_way, count = list(range(depth)), dict[bytes | int, int](), 0
        start = time.perf_counter()
        while True:
            is_over = time.perf_counter() - start > seconds
            while extents and not is_over:
                job_begun = self._begin(kind, key_list, extents[-1])
                if job_begun is None:
                    break
                under_way[job_begun] = extents.pop()
            if is_over and not under_way:
                return count * self.block_bytes / (time.perf_counter() - start)
            for outcome in self.step():
                if isinstance(outcome, ev.Written | ev.ReadEnded):
                    extents.append(under_way.pop(outcome.key if isinstance(outcome, ev.Written) else outcome.id))
                    count += outcome.ok

    def _begin(self, kind: str, keys: list[bytes], extent: int) -> bytes | int | None:
        if kind == "read":
            return self.read(self.rng.choice(keys), extent)
        key = self.rng.randbytes(16)
        return key if self.write(key, extent) else None

    def fill(self, nbytes: int) -> None:
        while self.disks.counters()["payload_bytes_written"] < nbytes:
            self.run("write", 1.0, 32)


def fio(path: Path, nbytes: int, block_bytes: int, kind: str, seconds: float, depth: int) -> float:
    """Bytes a second."""
    command = ["fio", "--name=blocks", f"--filename={path}", f"--size={nbytes}", f"--bs={block_bytes}"]
    command += [f"--rw={'randread' if kind == 'read' else 'write'}", "--blockalign=4096", "--direct=1"]
    command += ["--ioengine=io_uring", f"--iodepth={depth}", f"--runtime={seconds}", "--time_based", "--randrepeat=0"]
    fio_run = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True)
    if fio_run.returncode != 0:
        command[command.index("--ioengine=io_uring")] = "--ioengine=libaio"
        fio_run = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True, check=True)
    report = json.loads(fio_run.stdout[fio_run.stdout.index("{") :])
    return float(report["jobs"][0][kind]["bw_bytes"])


def lay_out(path: Path, nbytes: int) -> None:
    """A file whose every page was written."""
    queue = _core.DiskQueue(str(path), nbytes, 4)
    data = os.urandom(8 * MIB)
    for offset in range(0, nbytes, len(data)):
        queue.write_bytes(offset, offset, data)
        while queue.under_way >= 4:
            queue.take()
    while queue.under_way:
        queue.take()


def measure(args: Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each kind and depth."""
    nbytes, block_bytes = args.gib * GIB, geometries.SHAPES[args.geometry].kv.block_bytes
    sides = ["memserve", "fio"] if shutil.which("fio") else ["memserve"]
    if "fio" in sides:
        lay_out(folder / "fio.dat", nbytes)
    else:
        print("fio is not installed: there is nothing to compare with")
    store, figures = Store(folder / "store", nbytes, block_bytes, args.sync, args.engine), Samples()
    store.fill(nbytes + GIB // 2)
    for number, (kind, depth) in turns(args.rounds, product(("read", "write"), args.depths)):
        for side in sides if number % 2 else reversed(sides):
            run = store.run if side == "memserve" else partial(fio, folder / "fio.dat", nbytes, block_bytes)
            figures[kind, depth, side].append(run(kind, args.seconds, depth))
    counters = store.disks.counters()
    print(f"engine {args.engine or 'the better one'}, sync {args.sync}, ", end="")
    print(f"{counters['reads_ok']:,} blocks read and compared, amplification {store.disks.write_amplification:.3f}")
    store.close()
    rows = []
    for kind, depth in product(("read", "write"), args.depths):
        row = {f"{side}_mb_s": figures.median((kind, depth, side)) / 1e6 for side in sides}
        row |= {"ratio": figures.ratio((kind, depth, "memserve"), (kind, depth, "fio"))} if "fio" in sides else {}
        rows.append({"kind": kind, "depth": depth, **row})
    return rows


def main() -> None:
    args = options(
        __doc__, folder=Path, rounds=5, **SIZES, depths=Commas(1, 8, 32), sync=("segment", "", SYNCS),
        engine=("", "default: the better one", ENGINES), geometry="smollm2",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="memserve-store-disk-") as name:
        probe = _core.DiskQueue(str(Path(name) / "probe"), MIB, 1)
        if not probe.direct:
            print("this file system has no O_DIRECT: memory is measured, not a disk; give --folder")
        del probe
        rows = measure(args, Path(name))
    show(rows, COLUMNS)
    save(args, rows)


if __name__ == "__main__":
    main()
