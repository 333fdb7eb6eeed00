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

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from memserve import _core
from memserve.base.types import KVGeometry, Role, Tier
from memserve.kv.transfer.events import PagesPulled, PagesSealed, SealPages
from memserve.protocol import codec as wire
from memserve.protocol.messages import Join
from memserve.protocol.peers import Peer, PeerInfo
from memserve.transport.data_port import open_data_port
from memserve.transport.links.nixl import NixlLink
from memserve.transport.links.nixl_agent import Agent, nixl_is_installed
from memserve.transport.links.shared_memory import ShmLink
from memserve.transport.ports import PageLink
from memserve.transport.ranges import Ranges
from memserve_lab.experiments.pool_moves import shuffled

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import geometries

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


def own(nbytes: int, kv: KVGeometry, link: str) -> None:
    """Child process: memory that the other one reads over ``link``. Each line on stdin seals a page, as before real
    reads."""
    arena = shared(nbytes)
    np.frombuffer(arena, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    sealed: list[PagesSealed | PagesPulled] = []
    port = open_data_port(link, kv, {Tier.HBM: arena}, sealed.append)
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


class Child:
    """A process that answers lines with lines."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self.read()

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self.read()

    def read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a child process ended")
        return line.strip()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


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
    agent.register(target.address, nbytes)
    name = agent.add_peer(owner.nixl_agent)

    def copy(ranges: Ranges) -> None:
        transfer = agent.read(name, owner.arenas[0].address, target.address, ranges)
        while not transfer.is_over():
            pass
        assert transfer.succeeded
        transfer.release()

    return copy


def one_by_one(contender: Contender) -> Contender:
    """A call for each piece, as in MemServe's discrete layout (5.2)."""

    def copy(ranges: Ranges) -> None:
        for i in range(len(ranges)):
            contender(ranges.part(i, i + 1))

    return copy


def mooncake(python: str, nbytes: int, stack: ExitStack) -> Contender:
    """Mooncake's engine between two processes."""
    script = str(Path(__file__).with_name("transfer_mooncake.py"))
    target = Child(python, script, "target", str(nbytes))
    stack.callback(target.close)
    session, address = json.loads(target.hello)
    reader = Child(python, script, "reader", str(nbytes), session, str(address))
    stack.callback(reader.close)

    def copy(ranges: Ranges) -> float:
        work = [ranges.src_offsets.tolist(), ranges.dst_offsets.tolist(), ranges.range_bytes]
        return float(reader.ask(json.dumps(work)))

    return copy


# -- measuring


def measure(
    contenders: dict[str, Contender], works: dict[str, Ranges], rounds: int, owner: Child
) -> list[dict[str, Any]]:
    """Median seconds of each contender with each work, one round after another."""
    seconds: dict[tuple[str, str], list[float]] = {(w, c): [] for w in works for c in contenders}
    for number in range(rounds + 1):  # the first one warms up
        for work, ranges in works.items():
            for name, copy in contenders.items():
                owner.ask("seal")
                begin = time.perf_counter()
                spent = copy(ranges)
                spent = time.perf_counter() - begin if spent is None else spent
                if number:
                    seconds[work, name].append(spent)
    return [
        {
            "work": work,
            "contender": name,
            "piece_bytes": works[work].range_bytes,
            "bytes": works[work].total_bytes,
            "ms": round(statistics.median(times) * 1e3, 3),
            "gb_s": round(works[work].total_bytes / statistics.median(times) / 1e9, 2),
            "gb_s_min": round(works[work].total_bytes / max(times) / 1e9, 2),
            "gb_s_max": round(works[work].total_bytes / min(times) / 1e9, 2),
        }
        for (work, name), times in seconds.items()
    ]


def show(records: list[dict[str, Any]], works: list[str], unit: str) -> None:
    """Print a row per contender, a column per work."""
    names = list(dict.fromkeys(record["contender"] for record in records))
    cell = {(record["contender"], record["work"]): record[unit] for record in records}
    print(f"| {unit} | " + " | ".join(works) + " |\n|---|" + "---|" * len(works))
    for name in names:
        print(f"| {name} | " + " | ".join(f"{cell[name, work]}" for work in works) + " |")
    print()


def report(records: list[dict[str, Any]], works: dict[str, Ranges]) -> None:
    """Print the tables (medians; for the sizes also the best round), and the ratios of interest."""
    sizes = [work for work in works if work not in LAYOUTS]
    show(records, sizes, "gb_s")
    show(records, sizes, "gb_s_max")
    show(records, list(LAYOUTS), "gb_s")
    show(records, list(LAYOUTS), "ms")
    cell = {(record["contender"], record["work"]): record for record in records}
    for work in works:
        print(f"shm link / memcpy, {work}: {cell['shm link', work]['gb_s'] / cell['memcpy', work]['gb_s']:.2f}")
    for name in dict.fromkeys(record["contender"] for record in records):
        whole = cell[name, "aggregated"]["ms"]
        ratios = [f"{cell[name, layout]['ms'] / whole:.1f} ({layout})" for layout in ("by page", "8 KiB pieces")]
        print(f"{name}: aggregated is faster than discrete by {', '.join(ratios)}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="MiB moved at a time in the table of sizes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ucx", help="transports that UCX may use (UCX_TLS), e.g. tcp")
    parser.add_argument("--without-nixl", action="store_true")
    parser.add_argument("--small-pages", action="store_true", help="leave the shared memory on pages of 4 KiB")
    parser.add_argument("--mooncake", help="a Python that has mooncake-transfer-engine")
    parser.add_argument("--json", type=Path)
    geometries.add_option(parser)
    parser.add_argument("--own", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--links", default="shm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kv = geometries.SHAPES[options.geometry].kv
    if options.own:
        return own(options.own, kv, options.links)
    if options.ucx:
        os.environ["UCX_TLS"] = options.ucx
    if options.small_pages:
        os.environ["TRANSFER_PAGES"] = "small"
    prompt_bytes = PROMPT_TOKENS * kv.token_bytes
    nbytes = max(options.mib << 20, prompt_bytes)
    works = {f"{size >> 10} KiB": shuffled((options.mib << 20) // size, size) for size in PIECES}
    pieces = zip(LAYOUTS, (kv.block_bytes, kv.page_bytes, 8 << 10), strict=True)
    works |= {name: shuffled(prompt_bytes // size, size) for name, size in pieces}
    with ExitStack() as stack:
        links = "trusted" if has_nixl(options) else "shm"
        owned = ("--own", str(nbytes), "--geometry", options.geometry, "--links", links)
        owner = Child(sys.executable, __file__, *owned)
        stack.callback(owner.close)
        records = measure(contenders(owner, nbytes, options, stack), works, options.rounds, owner)
    report(records, works)
    if options.json:
        options.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    return None


def has_nixl(options: Namespace) -> bool:
    """Whether NIXL takes part."""
    return nixl_is_installed() and not options.without_nixl


def contenders(owner: Child, nbytes: int, options: Namespace, stack: ExitStack) -> dict[str, Contender]:
    """Contenders that work on this machine."""
    join = wire.decode(bytes.fromhex(owner.hello))
    assert isinstance(join, Join)
    arena = {Tier.HBM: shared(nbytes)}
    found = {"memcpy": memcpy(nbytes), "shm link": link_contender(ShmLink(arena), join.info, stack)}
    if has_nixl(options):
        found["nixl link"] = link_contender(NixlLink(arena, join.info.geometry.block_bytes), join.info, stack)
        found["nixl alone"] = nixl_alone(join.info, nbytes)
        found["nixl alone, a call each"] = one_by_one(found["nixl alone"])
    if options.mooncake:
        found["mooncake tcp"] = mooncake(options.mooncake, nbytes, stack)
    return found


if __name__ == "__main__":
    main()
