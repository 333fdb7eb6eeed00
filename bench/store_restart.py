"""How long a store's disk takes to be known again after a kill.

    python bench/store_restart.py [--records 1000000] [--folder DIR] [--rounds 3] [--sparse] [--json FILE]

A process writes records of 100 bytes, a page of 4 KiB each, and is killed in the middle of a segment. Then the file's
pages leave the page cache, and the disk is opened as a store does it: superblock, heads of segments, footers, and a
scan of the segment that has none. A sample of 1,000 records is read through the machine and its host afterwards.

``--sparse``: pages of records that no recovery reads (of segments with a footer) are not written, nothing is taken from
the file system for them, and the sample is left out: for ten million records on a small disk.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from memserve import _core
from memserve.base.units import MIB
from memserve.store.disks import events as ev
from memserve.store.disks.disks import Disks, DisksConfig
from memserve.store.disks.events import SYNC_CODES, segment_bytes_for
from memserve.store.host.disks import DiskHost
from memserve.store.host.files import FILE

PAYLOAD_BYTES = 100
PAGE = ev.PAGE_BYTES
CONFIG = DisksConfig(admission="all")
SAMPLE = 1000
_WRITE = 0


def keys_of(count: int) -> Iterator[bytes]:
    """Random keys, the same in each process."""
    rng = random.Random(7)
    while count > 0:
        block = rng.randbytes(16 * min(count, 4096))
        yield from (block[at : at + 16] for at in range(0, len(block), 16))
        count -= 4096


def payload_of(key: bytes) -> bytes:
    return (key * 7)[:PAYLOAD_BYTES]


def disk_bytes_for(records: int) -> int:
    pages = records + records // 80 + 8192
    return -(-pages * PAGE * 13 // 10 // MIB) * MIB


def write(folder: Path, records: int, sparse: bool) -> None:
    """Write, say so, and go on until the kill."""
    nbytes = disk_bytes_for(records)
    segment_bytes = segment_bytes_for(nbytes)
    log = _core.SegmentLog(nbytes // segment_bytes - 1, segment_bytes, os.urandom(16), sync=SYNC_CODES[CONFIG.sync])
    log.format()
    fd = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, nbytes)
    if not sparse:
        os.posix_fallocate(fd, 0, nbytes)
    open_pages: list[tuple[int, bytes]] = []
    payload = np.zeros(PAYLOAD_BYTES, np.uint8)
    none = np.zeros(1, np.int64)

    def perform() -> None:
        while commands := log.take_commands():
            for command, kind, offset, data in commands:
                if kind == _WRITE:
                    os.pwrite(fd, data, offset)
                log.finish_command(command, True)

    perform()
    last = -1
    for number, key in enumerate(keys_of(2 * records)):
        value = payload_of(key)
        payload[:] = np.frombuffer(value, np.uint8)
        seal = int(_core.seal_ranges(payload.ctypes.data, none, PAYLOAD_BYTES)[0])
        ticket = log.place(key, PAYLOAD_BYTES, b"", 0, seal)
        while ticket is None:
            perform()
            ticket = log.place(key, PAYLOAD_BYTES, b"", 0, seal)
        if ticket.offset // segment_bytes != last:
            last = ticket.offset // segment_bytes
            open_pages.clear()
        page = log.head(ticket.id, b"", value)
        if sparse:
            open_pages.append((ticket.offset, page))
        else:
            os.pwrite(fd, page, ticket.offset)
        log.finish_record(ticket.id, True)
        perform()
        log.take_ended()
        if number == records - 1:
            for offset, kept in open_pages:
                os.pwrite(fd, kept, offset)
            os.fdatasync(fd)
            print("written", flush=True)
            if sparse:
                time.sleep(600)


def killed(folder: Path, records: int, sparse: bool) -> None:
    command = [sys.executable, __file__, "--write", str(folder), "--records", str(records)]
    child = subprocess.Popen(command + ["--sparse"] * sparse, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "written\n", "the writer has failed"
    child.send_signal(signal.SIGKILL)
    child.wait()


def forget_pages(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def recover_sparse(path: Path) -> tuple[float, _core.SegmentLog]:
    start = time.perf_counter()
    fd = os.open(path, os.O_RDWR)
    known = _core.SegmentLog.read_superblock(fd)
    assert known is not None
    log = _core.SegmentLog(*known)
    log.recover(fd)
    os.close(fd)
    return time.perf_counter() - start, log


def recover(folder: Path, records: int, *, is_last: bool) -> tuple[float, _core.SegmentLog]:
    """Nothing is written before the last round: each finds what the kill has left."""
    start = time.perf_counter()
    host = DiskHost([(folder, disk_bytes_for(records))], CONFIG)
    spent_s = time.perf_counter() - start
    log = host.logs[0]
    found = len(log)
    if not is_last:
        host.close()
        return spent_s, log
    disks = Disks(host.logs, CONFIG)
    arena = _core.Arena(PAGE)
    done: queue.SimpleQueue[ev.DiskDone] = queue.SimpleQueue()
    host.start(done.put, arena.address, arena.nbytes, PAGE)
    sample = set(random.Random(1).sample(range(records), SAMPLE))
    good = 0
    for key in (key for number, key in enumerate(keys_of(records)) if number in sample):
        if disks.read(key, 0, 0, 1 << 62) is None:
            continue
        while not any(isinstance(outcome, ev.ReadEnded) for outcome in disks.take_outcomes()):
            for action in disks.take_actions():
                host.perform(action)
            disks.handle(done.get(timeout=60), 0)
        good += bytes(memoryview(arena)[:PAYLOAD_BYTES]) == payload_of(key)
    print(f"  {found:,} records found; {good:,} of a sample of {SAMPLE:,} read back")
    host.close()
    return spent_s, log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.write:
        write(options.write, options.records, options.sparse)
        return
    times: list[float] = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="memserve-store-restart-") as name:
        killed(Path(name), options.records, options.sparse)
        path = Path(name) / FILE
        for number in range(options.rounds):
            forget_pages(path)
            if options.sparse:
                spent_s, log = recover_sparse(path)
            else:
                spent_s, log = recover(path.parent, options.records, is_last=number == options.rounds - 1)
            times.append(spent_s)
    if options.sparse:
        print(f"  {len(log):,} records found")
    median_s = statistics.median(times)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{options.records:,} records known again after {median_s:.2f} s (median of {options.rounds}: ", end="")
    print(", ".join(f"{spent_s:.2f}" for spent_s in times), end="")
    print(f"); index {log.nbytes / MIB:,.0f} MiB, the process at most {peak:,.0f} MiB")
    if options.json:
        options.json.write_text(json.dumps({"records": options.records, "seconds": times, "index_bytes": log.nbytes}))


if __name__ == "__main__":
    main()
