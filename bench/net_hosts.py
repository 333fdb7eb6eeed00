"""KV between two hosts: the encrypted channel and NIXL over TCP beside iperf3, over one network that delays, loses and
paces.

    python bench/net_hosts.py [--mib 64] [--rounds 5] [--delay-ms 1] [--loss 0.01] [--gbit 1]
        [--links curve,curve-auto,nixl] [--geometry llama3] [--kv kv.npy]

Needs root, iperf3 (Debian's package) and, for its part, NIXL. Both hosts are network namespaces that the script
makes, with a process between them as the network (``tests/support/net_hosts.py``). Contenders take turns in every
round: iperf3 moves as many bytes over one connection; a link reads the KV of as many whole blocks, checksummed, by as
many readers as it has (``--readers``: one peer of an instance is read by one). A figure is the median over the
rounds; ``of iperf3`` is the ratio of the medians; CPU seconds a GB are those of both processes of a link.
``curve-auto`` and ``curve-always`` are the encrypted channel with ``--kv-codec`` (``curve``: ``none``), ``sent`` what
travelled of the KV: that of ``--kv``, which ``bench/kv_codec.py --save`` writes, or random floats.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness.flags import Commas, options, save
from harness.processes import LineChild
from harness.rounds import median, turns
from harness.tables import show

import geometries
from kv_floats import floats
from memserve import _core
from memserve.base.types import KV_CODECS, KVGeometry, Role, Tier
from memserve.base.units import MIB
from memserve.protocol import codec as wire
from memserve.protocol.messages import Join
from memserve.protocol.peers import Peer, PeerInfo
from memserve.transport.links.encrypted import CurveLink
from memserve.transport.links.nixl import NixlLink
from memserve.transport.network_devices import ListenAddress
from memserve.transport.ports import PageLink, Travelled
from memserve.transport.ranges import Ranges
from net_hosts import Host, Network, Quality, Wired, why_none

TCP = ("env", "UCX_TLS=tcp,self")
IPERF_S = 10.0


SECRET = "a secret of this script alone"


def _describe(link: PageLink, name: str, arena: Any, kv: KVGeometry) -> PeerInfo:
    from memserve.protocol.peers import ArenaPlace

    place = ArenaPlace(Tier.HBM, arena.address, arena.nbytes)
    info = PeerInfo(Peer(name, 1), Role.PREFILL, "", "", kv, 0, 0, 0, True, arenas=(place,))
    return link.describe(info)


def _link(name: str, address: str, nbytes: int, kv: KVGeometry) -> tuple[PageLink, Any]:
    arena = _core.SharedArena(nbytes)
    arena.generation = 1
    if name == "nixl":
        return NixlLink({Tier.HBM: arena}, kv.block_bytes, host=address), arena
    mode = name.partition("-")[2] or "none"
    listen_address = ListenAddress(SECRET, address)
    return CurveLink({Tier.HBM: arena}, listen_address, kv.block_bytes, kv_codec=KV_CODECS[mode]), arena


def own(name: str, address: str, nbytes: int, kv: KVGeometry, values: Path | None) -> None:
    """On one host: memory that the other one reads, until stdin ends. Prints for each line its CPU seconds so far."""
    link, arena = _link(name, address, nbytes, kv)
    values_there = floats(kv.dtype, 8 * MIB) if values is None else np.load(values).reshape(-1).view(np.uint8)
    np.frombuffer(arena, np.uint8)[:] = np.resize(values_there, nbytes)
    print(wire.encode(Join(_describe(link, "owner", arena, kv))).hex(), flush=True)
    link.add_peer(_describe(link, "reader", arena, kv))
    for _ in sys.stdin:
        link.expect_reads()
        print(time.process_time(), flush=True)


def read(name: str, address: str, nbytes: int, kv: KVGeometry, owner: str, readers: int) -> None:
    """On the other host: reads all of it for each line on stdin, and prints the seconds, and those of the CPU."""
    link, _arena = _link(name, address, nbytes, kv)
    hello = wire.decode(bytes.fromhex(owner))
    assert isinstance(hello, Join)
    link.add_peer(hello.info)
    blocks = np.random.default_rng(1).permutation(nbytes // kv.block_bytes).astype(np.int64)
    parts = [part * kv.block_bytes for part in np.array_split(blocks, readers)]
    with ThreadPoolExecutor(readers) as workers:

        def pull(offsets: Any) -> int:
            travelled = Travelled()
            link.read(hello.info.peer, Tier.HBM, Tier.HBM, Ranges(offsets, offsets, kv.block_bytes), travelled)
            return travelled.saved_bytes

        print("ready", flush=True)
        for _ in sys.stdin:
            started, started_cpu = time.perf_counter(), time.process_time()
            saved_bytes = sum(workers.map(pull, parts))
            spent = time.perf_counter() - started, time.process_time() - started_cpu
            print(*spent, 1 - saved_bytes / nbytes, flush=True)


def _side(host: Host, *words: str) -> LineChild:
    return LineChild(*TCP, sys.executable, str(Path(__file__).resolve()), *words, start=host.popen)


def _iperf(source: Host, target: Host, nbytes: int) -> float:
    """Bytes a second, as the receiver counts them."""
    server = target.popen(["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE)
    assert server.stdout is not None
    while "listening" not in (line := server.stdout.readline()):
        if not line:
            raise SystemExit("iperf3 does not start")
    iperf_report = json.loads(source.run("iperf3", "-c", target.address, "-J", "-n", str(nbytes)))
    server.wait(IPERF_S)
    return float(iperf_report["end"]["sum_received"]["bits_per_second"]) / 8


@contextmanager
def _network(quality: Quality) -> Iterator[Network | Wired]:
    """Two hosts."""
    if quality.bits_per_s:
        with Wired(quality, "owner", "reader") as wired:
            yield wired
        return
    with Network() as network:
        for name in ("owner", "reader"):
            network.add(name)
        yield network


class Sides:
    """Both processes of one link."""

    def __init__(self, link: str, network: Network | Wired, nbytes: int, args: Namespace) -> None:
        source, target = network.hosts["owner"], network.hosts["reader"]
        common_flags = (
            "--links",
            link,
            "--bytes",
            str(nbytes),
            "--geometry",
            args.geometry,
            "--readers",
            str(args.readers),
        )
        values = ("--kv", str(args.kv)) if args.kv is not None else ()
        self._nbytes, self._owner = nbytes, _side(source, "--own", source.address, *common_flags, *values)
        self._reader = _side(target, "--read", target.address, "--owner", self._owner.hello, *common_flags)
        assert self._reader.hello == "ready"
        self.read()  # the first read connects

    def read(self) -> tuple[float, ...]:
        """Bytes a second; CPU seconds a GB; the share of bytes that travelled."""
        before_s = float(self._owner.ask("cpu"))
        spent_s, cpu_s, travelled = map(float, self._reader.ask("read").split())
        return (
            self._nbytes / spent_s,
            (cpu_s + float(self._owner.ask("cpu")) - before_s) / self._nbytes * 1e9,
            travelled,
        )


def measure(args: Namespace, nbytes: int) -> dict[str, list[tuple[float, ...]]]:
    """By contender: what each round gave."""
    results: dict[str, list[tuple[float, ...]]] = {name: [] for name in ("iperf3", *args.links)}
    quality = Quality(args.delay_ms / 1000, args.loss, args.gbit * 1e9)
    with _network(quality) as network:
        sides = {link: Sides(link, network, nbytes, args) for link in args.links}
        for _, name in turns(args.rounds, results):
            if name in sides:
                results[name].append(sides[name].read())
            else:
                results[name].append(
                    (_iperf(network.hosts["owner"], network.hosts["reader"], nbytes), float("nan"), 1.0)
                )
    return results


def main() -> None:
    args = options(
        __doc__, hidden="own read bytes owner", mib=64, rounds=5, delay_ms=(1.0, "each way"),
        loss=(0.01, "share of frames, each way"), gbit=(1.0, "0: as the kernel moves it, without delay and loss"),
        links=Commas("curve", "curve-auto", "nixl"), readers=4,
        geometry="smollm2", kv=(Path, "KV that travels: an array of numpy's"), own=str, read=str, bytes=int, owner=str,
    )  # fmt: skip
    kv = geometries.SHAPES[args.geometry].kv
    if args.own:
        return own(args.links[0], args.own, args.bytes, kv, args.kv)
    if args.read:
        return read(args.links[0], args.read, args.bytes, kv, args.owner, args.readers)
    if (why := why_none(wired=True)) is not None:
        raise SystemExit(f"no hosts here: {why}")
    nbytes = args.mib * MIB // kv.block_bytes * kv.block_bytes
    results = measure(args, nbytes)
    shaped = f"{args.delay_ms:g} ms, {100 * args.loss:g} % lost, {args.gbit:g} Gbit/s"
    print(
        f"{shaped if args.gbit else 'the kernel'};"
        f" {args.mib} MiB in blocks of {kv.block_bytes >> 10:,} KiB ({args.geometry}), {args.rounds} rounds,"
        f" {args.readers} readers"
    )
    rows = [
        {"name": name, "ms": nbytes / rate * 1e3, "mb_s": rate / 1e6, "cpu_s": cpu_s, "sent": travelled}
        for name, measurements in results.items()
        for rate, cpu_s, travelled in [[median(column) for column in zip(*measurements, strict=True)]]
    ]
    show((row | {"ratio": row["mb_s"] / rows[0]["mb_s"]} for row in rows),
         {"": "{name}", "ms": "{ms:.0f}", "MB/s": "{mb_s:.1f}", "of iperf3": "{ratio:.2f}", "CPU, s/GB": "{cpu_s:.2f}",
          "sent": "{sent:.0%}"})  # fmt: skip
    save(args, results)
    return None


if __name__ == "__main__":
    main()
