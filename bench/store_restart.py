"""How long a store's disk takes to be known again after a kill.

    python bench/store_restart.py [--records 1000000] [--folder DIR] [--rounds 3] [--sparse] [--json FILE]

A process writes records of 100 bytes, a page of 4 KiB each, and is killed in the middle of a segment. Then the file's
pages leave the page cache, and the disk is opened as a store does it: superblock, heads of segments, footers, and a
scan of the segment that has none. A sample of 1,000 records is read through the machine and its host afterwards.

``--sparse``: pages of records that no recovery reads (of segments with a footer) are not written, nothing is taken from
the file system for them, and the sample is left out: for ten million records on a small disk.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from harness.disks import DiskRig
from harness.flags import options, save
from harness.processes import LineChild, kill, resident_bytes
from harness.rounds import median
from harness.tables import show

from memserve import _core
from memserve.base.units import MIB
from memserve.store.disks import events as ev
from memserve.store.disks.disks import DisksConfig
from memserve.store.disks.events import SYNC_CODES, segment_bytes_for
from memserve.store.host.backends import FILE
from memserve.store.host.disks import DiskHost

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
        yield from (block[place : place + 16] for place in range(0, len(block), 16))
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
    no_blocks = np.zeros(1, np.int64)

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
        seal = int(_core.seal_ranges(payload.ctypes.data, no_blocks, PAYLOAD_BYTES)[0])
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
            for offset, page_kept in open_pages:
                os.pwrite(fd, page_kept, offset)
            os.fdatasync(fd)
            print("written", flush=True)
            if sparse:
                time.sleep(600)


def write_and_kill(folder: Path, records: int, sparse: bool) -> None:
    """A process that writes, killed in the middle."""
    child = LineChild(
        sys.executable, __file__, "--write", str(folder), "--records", str(records), *["--sparse"] * sparse
    )
    assert child.hello == "written", "the writer has failed"
    kill(child.process)


def forget_pages(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def recover_sparse(path: Path) -> tuple[float, _core.SegmentLog]:
    start = time.perf_counter()
    fd = os.open(path, os.O_RDWR)
    superblock = _core.SegmentLog.read_superblock(fd)
    assert superblock is not None
    log = _core.SegmentLog(*superblock)
    log.recover(fd)
    os.close(fd)
    return time.perf_counter() - start, log


def recover(folder: Path, records: int, *, is_last: bool) -> tuple[float, _core.SegmentLog]:
    """Nothing is written before the last round: each finds what the kill has left."""
    start = time.perf_counter()
    if not is_last:
        host = DiskHost([(folder, disk_bytes_for(records))], CONFIG)
        spent_s, log = time.perf_counter() - start, host.logs[0]
        host.close()
        return spent_s, log
    rig = DiskRig(folder, disk_bytes_for(records), CONFIG, PAGE, 1)
    spent_s, log, good = time.perf_counter() - start, rig.host.logs[0], 0
    print(f"  {len(log):,} records found")
    sample = set(random.Random(1).sample(range(records), SAMPLE))
    for key in (key for number, key in enumerate(keys_of(records)) if number in sample):
        if rig.read(key, 0) is None:
            continue
        while not any(isinstance(outcome, ev.ReadEnded) for outcome in rig.step()):
            continue
        good += bytes(memoryview(rig.arena)[:PAYLOAD_BYTES]) == payload_of(key)
    print(f"  {good:,} of a sample of {SAMPLE:,} read back")
    rig.close()
    return spent_s, log


def main() -> None:
    args = options(
        __doc__, records=1_000_000, folder=Path, rounds=3, sparse=False, write=Path, hidden="write"
    )  # fmt: skip
    if args.write:
        write(args.write, args.records, args.sparse)
        return
    times: list[float] = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="memserve-store-restart-") as name:
        write_and_kill(Path(name), args.records, args.sparse)
        path = Path(name) / FILE
        for number in range(args.rounds):
            forget_pages(path)
            if args.sparse:
                spent_s, log = recover_sparse(path)
            else:
                spent_s, log = recover(path.parent, args.records, is_last=number == args.rounds - 1)
            times.append(spent_s)
    peak_mib = resident_bytes(os.getpid(), "VmHWM") / MIB
    show(
        [{"seconds": times, "median_s": median(times), "found": len(log), "index_mib": log.nbytes / MIB,
          "peak_mib": peak_mib, "rounds": ", ".join(f"{spent_s:.2f}" for spent_s in times)}],
        {"records known again": "{found:,}", "median": "{median_s:.2f} s", "rounds": "{rounds}",
         "index": "{index_mib:,.0f} MiB", "the process at most": "{peak_mib:,.0f} MiB"},
    )  # fmt: skip
    save(args, {"records": args.records, "seconds": times, "index_bytes": log.nbytes})


if __name__ == "__main__":
    main()
