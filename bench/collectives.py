"""What workers of one instance pay to add up their parts: our collective in shared memory beside gloo.

    python bench/collectives.py [--ranks 2] [--rounds 5] [--json FILE]

Each rank is a process with one thread, pinned to a core. In each round both add up the same float32 vectors, in turn:
of one row of SmolLM2-135M (576), of 8 rows, of 64, and of 2,048. Printed: microseconds of one operation, the medians of
the rounds, and how many times gloo takes as long. A decode step of that model has 60 of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from itertools import product

from harness.flags import options, save
from harness.rounds import Samples, seconds, turns
from harness.tables import show

from ports import free_port

HIDDEN = 576
SIZES = {1: 3000, 8: 3000, 64: 1000, 2048: 40}
"""Rows, and how often they are added up in a round."""
SLOT_BYTES = 1 << 20


def run_rank(args: Namespace) -> None:
    """One rank; rank 0 writes its figures to stdout."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[args.rank % len(cores)]})
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from memserve import _core, _kernels

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{args.port}"
    dist.init_process_group("gloo", init_method=address, rank=args.rank, world_size=args.ranks)
    region = _core.SharedArena.attach(args.fd, _kernels.Collective.region_bytes(args.ranks, SLOT_BYTES))
    collective = _kernels.Collective(region.address, args.rank, args.ranks, SLOT_BYTES, 60.0)
    adds = {
        "ours": lambda x: collective.all_reduce(x.data_ptr(), x.data_ptr(), x.numel(), 0),
        "gloo": lambda x: dist.all_reduce(x),
    }
    results = {rows: Samples() for rows in SIZES}
    for _, (rows, name) in turns(args.rounds, product(SIZES, adds)):
        x = torch.full((rows, HIDDEN), float(args.rank + 1))
        adds[name](x)
        if not bool((x == args.ranks * (args.ranks + 1) / 2).all()):
            raise SystemExit(f"{name}: a wrong sum")
        collective.meet()
        spent_s = seconds(lambda name=name, x=x, rows=rows: [adds[name](x) for _ in range(SIZES[rows])])
        results[rows][name].append(spent_s / SIZES[rows] * 1e6)
    if args.rank == 0:
        print(json.dumps({rows: {name: times.median(name) for name in adds} for rows, times in results.items()}))
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, and print what the first one has measured."""
    args = options(__doc__, hidden="rank fd port", ranks=2, rounds=5, rank=-1, fd=-1, port=0)
    if args.rank >= 0:
        return run_rank(args)
    from memserve import _core, _kernels

    region = _core.SharedArena(_kernels.Collective.region_bytes(args.ranks, SLOT_BYTES), sealed=False)
    command = [sys.executable, __file__, "--ranks", str(args.ranks), "--rounds", str(args.rounds)]
    command += ["--port", str(free_port()), "--fd", str(region.fd)]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], pass_fds=[region.fd], stdout=subprocess.PIPE, text=True)
        for rank in range(args.ranks)
    ]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank has failed")
    record = {int(rows): us for rows, us in json.loads(outputs[0].strip().splitlines()[-1]).items()}
    print(f"{args.ranks} ranks, float32 rows of {HIDDEN}, microseconds an operation:")
    show(({"rows": rows, **us, "times": us["gloo"] / us["ours"]} for rows, us in record.items()),
         {"rows": "{rows}", "ours": "{ours:.1f}", "gloo": "{gloo:.1f}", "times": "{times:.1f}"})  # fmt: skip
    save(args, record)
    return None


if __name__ == "__main__":
    main()
