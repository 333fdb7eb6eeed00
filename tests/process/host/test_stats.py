"""Statistics of several clusters in one process, each of which has a thread of its own."""

from __future__ import annotations

import subprocess
import sys

from memserve.host.stats import EngineStats

FIRST_READS = """
import os, sys, threading
from memserve.host.stats import RouterStats
from memserve.base.types import Role
from memserve.protocol.peers import Load, Peer
from memserve.router.report import ClusterStats, Counters, InstanceView

data = bytes.fromhex(sys.argv[1])
VIEW = InstanceView(
    Peer("c1", 1), Role.COLOCATED, "live", "", "", Load(), data, 0, 0, requests=0, prefill_tokens=0, context_tokens=0,
    hbm_blocks=0, dram_blocks=0, tree_blocks=0, next_event=0, events_aside=0,
)

def read_first():
    barrier.wait()
    assert RouterStats.from_cluster(ClusterStats(1, 0, 0, 0, 0, 0, 0, Counters()), [VIEW], router_ns=1).steps == 3

sys.setswitchinterval(1e-6)
for _ in range(60):
    child = os.fork()
    if not child:
        barrier = threading.Barrier(8)
        threads = [threading.Thread(target=read_first) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"it ended with {status}"
"""


def test_clusters_read_their_first_statistics_at_once() -> None:
    command = [sys.executable, "-c", FIRST_READS, EngineStats(steps=3).encode().hex()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
