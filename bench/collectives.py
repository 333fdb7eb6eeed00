"""What workers of one instance pay to add up their parts: our collective in shared memory beside gloo.

    python bench/collectives.py [--ranks 2] [--rounds 5] [--json FILE]

Each rank is a process with one thread, pinned to a core. In each round both add up the same float32 vectors, in turn:
of one row of SmolLM2-135M (576), of 8 rows, of 64, and of 2,048. Printed: microseconds of one operation, the medians of
the rounds, and how many times gloo takes as long. A decode step of that model has 60 of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HIDDEN = 576
SIZES = {1: 3000, 8: 3000, 64: 1000, 2048: 40}
"""Rows, and how often they are added up in a round."""
SLOT_BYTES = 1 << 20


def rank_main(rank: int, ranks: int, fd: int, port: int, rounds: int) -> None:
    """One rank; rank 0 writes its figures to stdout."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from memserve import _core, _kernels

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    region = _core.SharedArena.attach(fd, _kernels.Collective.region_bytes(ranks, SLOT_BYTES))
    collective = _kernels.Collective(region.address, rank, ranks, SLOT_BYTES, 60.0)
    found: dict[int, dict[str, list[float]]] = {rows: {"ours": [], "gloo": []} for rows in SIZES}
    for turn in range(rounds):
        for rows, count in SIZES.items():
            x = torch.full((rows, HIDDEN), float(rank + 1))

            def ours(x: Any = x) -> None:
                collective.all_reduce(x.data_ptr(), x.data_ptr(), x.numel(), 0)

            def gloo(x: Any = x) -> None:
                dist.all_reduce(x)

            for name, add in (("ours", ours), ("gloo", gloo))[:: 1 if turn % 2 else -1]:
                x.fill_(rank + 1)
                add()
                if not bool((x == ranks * (ranks + 1) / 2).all()):
                    raise SystemExit(f"{name}: a wrong sum")
                collective.meet()
                begin = time.perf_counter()
                for _ in range(count):
                    add()
                found[rows][name].append((time.perf_counter() - begin) / count * 1e6)
    if rank == 0:
        print(
            json.dumps({rows: {name: statistics.median(us) for name, us in by.items()} for rows, by in found.items()})
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        rank_main(args.rank, args.ranks, args.fd, args.port, args.rounds)
        return
    import socket
    import subprocess

    from memserve import _core, _kernels

    region = _core.SharedArena(_kernels.Collective.region_bytes(args.ranks, SLOT_BYTES), sealed=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--ranks", str(args.ranks), "--rounds", str(args.rounds), "--port", str(port)]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--fd", str(region.fd)],
            pass_fds=[region.fd],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(args.ranks)
    ]
    said = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank has failed")
    record = {int(rows): by for rows, by in json.loads(said[0].strip().splitlines()[-1]).items()}
    print(f"{args.ranks} ranks, float32 rows of {HIDDEN}, microseconds an operation:")
    for rows, by in record.items():
        print(f"  {rows:5d} rows: ours {by['ours']:8.1f}, gloo {by['gloo']:8.1f}: {by['gloo'] / by['ours']:.1f} times")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
