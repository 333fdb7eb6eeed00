"""KV between two hosts: NIXL over TCP beside iperf3, over one network that delays, loses and paces.

    python bench/net_hosts.py [--mib 64] [--rounds 5] [--delay-ms 1] [--loss 0.01] [--gbit 1]

Needs root, iperf3 (Debian's package) and NIXL. Both hosts are network namespaces that the script makes, with a process
between them as the network (``tests/support/net_hosts.py``). Contenders take turns in every round: iperf3 moves as many
bytes over one connection; the link reads the KV of as many whole blocks, checksummed, as an instance would. A figure is
the median over the rounds; ``of iperf3`` is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from memserve import _core
from memserve.messages import Join, Peer, PeerInfo
from memserve.runtime.links import wire
from memserve.runtime.links.nixl import NixlLink
from memserve.runtime.links.ranges import Ranges
from memserve.types import KVGeometry, Role, Tier
from memserve.units import MIB

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from net_hosts import Host, Quality, Wired, why_none

GEOMETRY = KVGeometry(num_layers=30, num_kv_heads=3, head_dim_k=64, head_dim_v=64, dtype="bfloat16")
TCP = ("env", "UCX_TLS=tcp,self")
IPERF_S = 10.0


def _describe(link: NixlLink, name: str, arena: Any) -> PeerInfo:
    from memserve.messages import ArenaPlace

    place = ArenaPlace(Tier.HBM, arena.address, arena.nbytes)
    info = PeerInfo(Peer(name, 1), Role.PREFILL, "", "", GEOMETRY, 0, 0, 0, True, arenas=(place,))
    return link.describe(info)


def _link(address: str, nbytes: int) -> tuple[NixlLink, Any]:
    arena = _core.SharedArena(nbytes)
    np.frombuffer(arena, np.uint8)[:] = 7
    return NixlLink({Tier.HBM: arena}, GEOMETRY.block_bytes, host=address), arena


def own(address: str, nbytes: int) -> None:
    """On one host: memory that the other one reads, until stdin ends."""
    link, arena = _link(address, nbytes)
    print(wire.encode(Join(_describe(link, "owner", arena))).hex(), flush=True)
    link.add_peer(_describe(link, "reader", arena))
    for _ in sys.stdin:
        link.expect_reads()


def read(address: str, nbytes: int, owner: str) -> None:
    """On the other host: reads all of it for each line on stdin, and prints the seconds."""
    link, _arena = _link(address, nbytes)
    hello = wire.decode(bytes.fromhex(owner))
    assert isinstance(hello, Join)
    link.add_peer(hello.info)
    blocks = np.random.default_rng(1).permutation(nbytes // GEOMETRY.block_bytes).astype(np.int64)
    parts = [part * GEOMETRY.block_bytes for part in np.array_split(blocks, link.workers)]
    with ThreadPoolExecutor(link.workers) as workers:

        def pull(offsets: Any) -> None:
            link.read(hello.info.peer, Tier.HBM, Tier.HBM, Ranges(offsets, offsets, GEOMETRY.block_bytes))

        print("ready", flush=True)
        for _ in sys.stdin:
            started = time.perf_counter()
            list(workers.map(pull, parts))
            print(time.perf_counter() - started, flush=True)


def _side(host: Host, *words: str) -> subprocess.Popen[str]:
    command = [*TCP, sys.executable, str(Path(__file__).resolve()), *words]
    return host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _ask(side: subprocess.Popen[str], line: str) -> str:
    assert side.stdin is not None and side.stdout is not None
    print(line, file=side.stdin, flush=True)
    return side.stdout.readline().strip()


def _iperf(source: Host, target: Host, nbytes: int) -> float:
    """Bytes a second, as the receiver counts them."""
    server = target.popen(["iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    told = json.loads(source.run("iperf3", "-c", target.address, "-J", "-n", str(nbytes)))
    server.wait(IPERF_S)
    return float(told["end"]["sum_received"]["bits_per_second"]) / 8


def measure(quality: Quality, nbytes: int, rounds: int) -> dict[str, float]:
    """Medians: bytes a second of both."""
    rates: dict[str, list[float]] = {"iperf3": [], "nixl": []}
    with Wired(quality, "owner", "reader") as network:
        source, target = network["owner"], network["reader"]
        owner = _side(source, "--own", source.address, "--bytes", str(nbytes))
        assert owner.stdout is not None
        hello = owner.stdout.readline().strip()
        reader = _side(target, "--read", target.address, "--bytes", str(nbytes), "--owner", hello)
        assert reader.stdout is not None and reader.stdout.readline().strip() == "ready"
        _ask(reader, "warm up: the first read connects")
        for _ in range(rounds):
            rates["iperf3"].append(_iperf(source, target, nbytes))
            rates["nixl"].append(nbytes / float(_ask(reader, "read")))
    return {name: statistics.median(found) for name, found in rates.items()}


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=1.0, help="each way")
    parser.add_argument("--loss", type=float, default=0.01, help="share of frames, each way")
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--own", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--read", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--owner", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own:
        own(args.own, args.bytes)
    elif args.read:
        read(args.read, args.bytes, args.owner)
    elif (why := why_none(wired=True)) is not None:
        raise SystemExit(f"no hosts here: {why}")
    else:
        nbytes = args.mib * MIB // GEOMETRY.block_bytes * GEOMETRY.block_bytes
        quality = Quality(args.delay_ms / 1000, args.loss, args.gbit * 1e9)
        found = measure(quality, nbytes, args.rounds)
        print(
            f"{args.delay_ms:g} ms, {100 * args.loss:g} % lost, {args.gbit:g} Gbit/s;"
            f" {args.mib} MiB, {args.rounds} rounds"
        )
        for name, rate in found.items():
            print(f"{name:8} {rate / 1e6:8.1f} MB/s   of iperf3 {rate / found['iperf3']:.2f}")


if __name__ == "__main__":
    main()
