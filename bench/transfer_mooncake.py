"""Mooncake's transfer engine over TCP, for ``transfer.py``: one process owns memory, another reads it when told to.

    python transfer_mooncake.py target BYTES               prints [session, address]
    python transfer_mooncake.py reader BYTES SESSION ADDRESS
        reads lines [src_offsets, dst_offsets, range_bytes], prints the seconds that each took

Runs in its own environment (``pip install mooncake-transfer-engine-non-cuda numpy``), without memserve.
"""

import json
import os
import sys
import time

import numpy as np

BATCH = 512
"""Larger batches overflow the engine's queue, which breaks it for good."""


def engine(memory):
    from mooncake.engine import TransferEngine

    transfer_engine = TransferEngine()
    assert transfer_engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert transfer_engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    return transfer_engine


def read(engine, session, src, dst, range_bytes):
    for begin in range(0, len(src), BATCH):
        part = slice(begin, begin + BATCH)
        lengths = [range_bytes] * len(src[part])
        assert engine.batch_transfer_sync_read(session, dst[part], src[part], lengths) == 0


def main():
    out = os.fdopen(os.dup(1), "w")  # the engine logs to stdout
    os.dup2(2, 1)
    memory = np.full(int(sys.argv[2]), 1, np.uint8)
    transfer_engine = engine(memory)
    if sys.argv[1] == "target":
        print(json.dumps([f"127.0.0.1:{transfer_engine.get_rpc_port()}", memory.ctypes.data]), file=out, flush=True)
        sys.stdin.read()
        os._exit(0)
    session, address = sys.argv[3], int(sys.argv[4])
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        src, dst, range_bytes = json.loads(line)
        src, dst = [address + offset for offset in src], [memory.ctypes.data + offset for offset in dst]
        begin = time.perf_counter()
        read(transfer_engine, session, src, dst, range_bytes)
        print(time.perf_counter() - begin, file=out, flush=True)
    os._exit(0)


main()
