"""Moves KV between two processes of this machine: our links beside memcpy, NIXL alone and Mooncake over TCP.

    python bench/transfer.py [--mib 128] [--rounds 9] [--ucx tcp] [--mooncake VENV/bin/python] [--json out.json]
        [--geometry llama3]

All contenders take turns inside every round, each with the same pieces: piece ``i`` of another process's memory goes to
place ``perm[i]`` of ours, so that nothing can be merged. First pieces of 8 KiB to 4 MiB, then the KV of a 2,048-token
prompt of SmolLM2-135M in bfloat16 (64 blocks of 737,280 bytes), or of another ``--geometry``: *aggregated* = whole
blocks, *by page* = a layer of a block each (24,576 bytes), *8 KiB pieces* = the pieces of layouts that keep K and V of
each layer apart.

``memcpy`` copies inside one process, one thread, piece by piece (numpy's row assignment). Our links checksum what they
copy, so a wrong read cannot go unnoticed; the others do not. ``nixl alone`` reads straight into registered memory, with
new descriptors each time: all pieces in one call, or a call each. ``--ucx tcp`` lets UCX use TCP only, as between two
hosts; without it the kernel may copy from process to process.

``memserve bench pool`` measures our links by the paper's figure 11; this script compares them with other libraries.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any

import numpy as np
from harness import BENCH
from harness.flags import options
from harness.processes import LineChild
from harness.rounds import Samples, median, turns
from harness.tables import show

import geometries
from memserve import _core
from memserve.base.types import KVGeometry, Role, Tier
from memserve.kv.transfer.events import PagesPulled, PagesSealed, SealPages
from memserve.protocol import codec as wire
from memserve.protocol.messages import Join
from memserve.protocol.peers import Peer, PeerInfo
from memserve.transport.data_port import PagePort
from memserve.transport.links.nixl import NixlLink
from memserve.transport.links.nixl_agent import Agent, nixl_is_installed
from memserve.transport.links.shared_memory import ShmLink
from memserve.transport.ports import PageLink
from memserve.transport.ranges import Ranges
from memserve_lab.experiments.pool_moves import shuffled

PIECES = (8 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20)
PROMPT_TOKENS = 2048
LAYOUTS = ("aggregated", "by page", "8 KiB pieces")
Contender = Callable[[Ranges], float | None]
"""Copies, and returns None (the call is timed) or the seconds measured elsewhere."""


# -- the other process


def shared(nbytes: int) -> _core.SharedArena:
    """Memory like an instance's: touched, and on huge pages if the kernel has any."""
    arena = _core.SharedArena(nbytes)
    np.frombuffer(arena, np.uint8)[:] = 1
    if "small" not in os.environ.get("TRANSFER_PAGES", ""):
        arena.collapse(0, nbytes)
    return arena


def own(nbytes: int, kv: KVGeometry, *, with_nixl: bool) -> None:
    """Child process: memory that the other one reads. Each line on stdin seals a page, as before real reads."""
    arena = shared(nbytes)
    np.frombuffer(arena, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    sealed: list[PagesSealed | PagesPulled] = []
    arenas = {Tier.HBM: arena}
    links: list[PageLink] = [ShmLink(arenas), *([NixlLink(arenas, kv.block_bytes)] if with_nixl else [])]
    port = PagePort(kv, arenas, links, sealed.append)
    info = PeerInfo(Peer("owner", 1), Role.PREFILL, "", "", kv, 0, 0, 0, True)
    print(wire.encode(Join(port.describe(info))).hex(), flush=True)
    reader = PeerInfo(Peer("reader", 1), Role.DECODE, "", "", kv, 0, 0, 0, True, nixl_agent=b"-")
    port.add_peer(reader)
    for _ in sys.stdin:
        port.start(SealPages(1, Tier.HBM, (0,), 0, 1))
        while not sealed:
            time.sleep(0.0001)
        sealed.clear()
        print("sealed", flush=True)


# -- contenders


def memcpy(nbytes: int) -> Contender:
    """Inside this process, one thread, glibc's memcpy for each piece."""
    source, target = (np.frombuffer(_core.Arena(nbytes), np.uint8) for _ in range(2))
    source[:] = 3
    target[:] = 4

    def copy(ranges: Ranges) -> None:
        rows = ranges.dst_offsets // ranges.range_bytes
        count = len(ranges) * ranges.range_bytes
        target[:count].reshape(-1, ranges.range_bytes)[rows] = source[:count].reshape(-1, ranges.range_bytes)

    return copy


def link_contender(link: PageLink, owner: PeerInfo, stack: ExitStack) -> Contender:
    """One of our links: copied and checksummed."""
    link.add_peer(owner)
    stack.callback(link.close)

    def copy(ranges: Ranges) -> None:
        link.read(owner.peer, Tier.HBM, Tier.HBM, ranges)

    return copy


def nixl_alone(owner: PeerInfo, nbytes: int) -> Contender:
    """NIXL alone: straight into registered memory, unchecked."""
    agent, target = Agent(f"alone {os.getpid()}"), _core.Arena(nbytes)
    np.frombuffer(target, np.uint8)[:] = 0
    agent.register_memory(target.address, nbytes)
    name = agent.add_peer(owner.nixl_agent)

    def copy(ranges: Ranges) -> None:
        transfer = agent.post_read(name, owner.arenas[0].address, target.address, ranges)
        while not transfer.is_over():
            pass
        assert transfer.has_succeeded
        transfer.release_handle()

    return copy


def one_by_one(contender: Contender) -> Contender:
    """A call for each piece, as in MemServe's discrete layout (5.2)."""

    def copy(ranges: Ranges) -> None:
        for i in range(len(ranges)):
            contender(ranges.slice_ranges(i, i + 1))

    return copy


def mooncake(python: str, nbytes: int, stack: ExitStack) -> Contender:
    """Mooncake's engine between two processes."""
    script = str(BENCH / "transfer_mooncake.py")
    target = LineChild(python, script, "target", str(nbytes))
    stack.callback(target.close)
    session, address = json.loads(target.hello)
    reader = LineChild(python, script, "reader", str(nbytes), session, str(address))
    stack.callback(reader.close)

    def copy(ranges: Ranges) -> float:
        work = [ranges.src_offsets.tolist(), ranges.dst_offsets.tolist(), ranges.range_bytes]
        return float(reader.ask(json.dumps(work)))

    return copy


# -- measuring


def measure(
    contenders: dict[str, Contender], works: dict[str, Ranges], rounds: int, owner: LineChild
) -> list[dict[str, Any]]:
    """A record of each work and contender, one round after another."""
    spent = Samples()
    for number, name in turns(rounds, contenders, warm=1):
        for work, ranges in works.items():
            owner.ask("seal")
            begin = time.perf_counter()
            own_s = contenders[name](ranges)
            spent_s = time.perf_counter() - begin if own_s is None else own_s
            spent[work, name] += [spent_s] if number >= 0 else []
    records = []
    for work, name in product(works, contenders):
        nbytes, times = works[work].total_bytes, spent[work, name]
        figures = {"gb_s": median(times), "gb_s_min": max(times), "gb_s_max": min(times)}
        records.append({
            "work": work, "contender": name, "piece_bytes": works[work].range_bytes, "bytes": nbytes,
            "ms": round(median(times) * 1e3, 3),
            **{figure: round(nbytes / spent_s / 1e9, 2) for figure, spent_s in figures.items()},
        })  # fmt: skip
    return records


def show_by_work(records: list[dict[str, Any]], works: list[str], unit: str) -> None:
    """Print a row per contender, a column per work."""
    names = list(dict.fromkeys(record["contender"] for record in records))
    cell = {(record["contender"], record["work"]): record[unit] for record in records}
    rows = ({unit: name, **{work: cell[name, work] for work in works}} for name in names)
    show(rows, [unit, *works])
    print()


def report(records: list[dict[str, Any]], works: dict[str, Ranges]) -> None:
    """Print the tables (medians; for the sizes also the best round), and the ratios of interest."""
    sizes = [work for work in works if work not in LAYOUTS]
    for names, unit in ((sizes, "gb_s"), (sizes, "gb_s_max"), (list(LAYOUTS), "gb_s"), (list(LAYOUTS), "ms")):
        show_by_work(records, names, unit)
    cell = {(record["contender"], record["work"]): record for record in records}
    for work in works:
        print(f"shm link / memcpy, {work}: {cell['shm link', work]['gb_s'] / cell['memcpy', work]['gb_s']:.2f}")
    for name in dict.fromkeys(record["contender"] for record in records):
        whole = cell[name, "aggregated"]["ms"]
        ratios = [f"{cell[name, layout]['ms'] / whole:.1f} ({layout})" for layout in ("by page", "8 KiB pieces")]
        print(f"{name}: aggregated is faster than discrete by {', '.join(ratios)}")


def main() -> None:
    args = options(
        __doc__, hidden="own", mib=(128, "MiB moved at a time in the table of sizes"), rounds=9,
        ucx=(str, "transports that UCX may use (UCX_TLS), e.g. tcp"), without_nixl=False,
        small_pages=(False, "leave the shared memory on pages of 4 KiB"), geometry="smollm2",
        mooncake=(str, "a Python that has mooncake-transfer-engine"), own=int,
    )  # fmt: skip
    kv = geometries.SHAPES[args.geometry].kv
    if args.own:
        return own(args.own, kv, with_nixl=has_nixl(args))
    if args.ucx:
        os.environ["UCX_TLS"] = args.ucx
    if args.small_pages:
        os.environ["TRANSFER_PAGES"] = "small"
    prompt_bytes = PROMPT_TOKENS * kv.token_bytes
    nbytes = max(args.mib << 20, prompt_bytes)
    works = {f"{size >> 10} KiB": shuffled((args.mib << 20) // size, size) for size in PIECES}
    pieces = zip(LAYOUTS, (kv.block_bytes, kv.page_bytes, 8 << 10), strict=True)
    works |= {name: shuffled(prompt_bytes // size, size) for name, size in pieces}
    with ExitStack() as stack:
        words = ("--own", str(nbytes), "--geometry", args.geometry)
        words += () if has_nixl(args) else ("--without-nixl",)
        owner = LineChild(sys.executable, __file__, *words)
        stack.callback(owner.close)
        records = measure(contenders(owner, nbytes, args, stack), works, args.rounds, owner)
    report(records, works)
    if args.json:
        args.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    return None


def has_nixl(args: Namespace) -> bool:
    return nixl_is_installed() and not args.without_nixl


def contenders(owner: LineChild, nbytes: int, args: Namespace, stack: ExitStack) -> dict[str, Contender]:
    """Contenders that work on this machine."""
    join = wire.decode(bytes.fromhex(owner.hello))
    assert isinstance(join, Join)
    arena = {Tier.HBM: shared(nbytes)}
    results = {"memcpy": memcpy(nbytes), "shm link": link_contender(ShmLink(arena), join.info, stack)}
    if has_nixl(args):
        results["nixl link"] = link_contender(NixlLink(arena, join.info.geometry.block_bytes), join.info, stack)
        results["nixl alone"] = nixl_alone(join.info, nbytes)
        results["nixl alone, a call each"] = one_by_one(results["nixl alone"])
    if args.mooncake:
        results["mooncake tcp"] = mooncake(args.mooncake, nbytes, stack)
    return results


if __name__ == "__main__":
    main()
