"""Linears over quantised weights beside bfloat16's, at the sizes of a Llama of 1.2 billion weights.

Usage: ``python bench/quantised_linears.py [--formats Q4_0,Q4_K] [--rows 1,8,512] [--threads 2] [--cpu-time]``.

Each figure of a format, and of a number of bits of activations (``--bits 8,15``; 0: weights become numbers, and
activations stay such), is how many times as fast as the packed bfloat16 linear it is; behind those of one row, how fast
weights were read, beside what the machine reads in the same rounds. Contenders take turns, figures are medians; a layer
has several copies, so that its weights come from memory. ``--cpu-time``: the time that one thread computed, for a
machine that other work shares; it implies one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memserve import _kernels
from memserve.model.linears import PackedLinear
from memserve.model.quantised import QuantisedLinear, QuantisedWeight

SIZES = {"attention 2048x2048": (2048, 2048), "up 8192x2048": (8192, 2048), "down 2048x8192": (2048, 8192),
         "head 128256x2048": (128256, 2048)}  # fmt: skip
"""``(outputs, inputs)``; a model has 16 layers of 2 attention's, 2 up's and a down's, and a head."""
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
CACHE_BYTES = 48 << 20
"""Copies of a layer are more than this together."""
READ_BYTES = 1 << 28

Contender = Callable[[Tensor], object]


def random_weight(kind: str, n: int, k: int) -> QuantisedWeight:
    """A packed weight of random bits: finite scales are not needed to take time."""
    if kind.startswith("FP8"):
        codes = torch.from_numpy(np.resize(np.random.default_rng(0).integers(0, 127, 64 * k, dtype=np.uint8), (n, k)))
        scales = torch.ones(n, k // int(kind.rpartition("_")[2]))
        return QuantisedWeight.of_floats(kind, codes.view(torch.float8_e4m3fn), scales)
    size = _kernels.quantised_file_bytes(kind, 1, k)
    pattern = np.random.default_rng(0).integers(0, 32, (min(n, 64), size), dtype=np.uint8)  # exponents stay small
    blocks = torch.from_numpy(np.resize(pattern, (n, size)))
    return QuantisedWeight.of_blocks(kind, blocks, k)


def own_copy(weight: QuantisedWeight) -> QuantisedWeight:
    """The same weight elsewhere in memory."""
    return replace(weight, packed=weight.packed.clone())


def copies_of(make: Callable[[], Contender], nbytes: int) -> Contender:
    """Calls copies of a layer in turns."""
    layers = [make() for _ in range(1 + CACHE_BYTES // nbytes)]
    turn = [0]

    def call(x: Tensor) -> object:
        turn[0] += 1
        return layers[turn[0] % len(layers)](x)

    return call


def medians(contenders: dict[str, Contender], x: Tensor, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each contender; the first round only warms up."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, call in contenders.items():
            start = clock()
            call(x)
            if turn:
                samples[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in samples.items()}


def compare(
    size: str, kinds: list[str], bits: list[int], rows: list[int], rounds: int, clock: Callable[[], float]
) -> None:
    """Print the lines of one size."""
    n, k = SIZES[size]
    dense = torch.empty(n, k, dtype=torch.bfloat16).normal_()
    packs = {kind: random_weight(kind, n, k) for kind in kinds}
    read = torch.ones(READ_BYTES // 4)
    contenders: dict[str, Contender] = {
        "bfloat16": copies_of(lambda: PackedLinear([dense], None), dense.nbytes), "read": lambda _: read.sum()
    }  # fmt: skip

    def layer(weight: QuantisedWeight, size: int) -> Contender:
        how: dict[str, Any] = {"activation_bits": size} if size else {"exact": True}
        return copies_of(lambda: QuantisedLinear([own_copy(weight)], **how), weight.packed.numel())

    quantised = {f"{kind}/{size}": (weight, size) for kind, weight in packs.items() for size in bits}
    contenders |= {name: layer(*pair) for name, pair in quantised.items()}
    for count in rows:
        x = torch.randn(count, k).bfloat16()
        took = medians(contenders, x, rounds if count < 128 else max(3, rounds // 4), clock)
        line = f"{size:20} rows {count:<4} bfloat16 {took['bfloat16'] * 1e3:8.3f} ms"
        for name, (weight, _) in quantised.items():
            line += f"   {name} x{took['bfloat16'] / took[name]:.2f}"
            if count == 1:
                line += f" ({weight.packed.numel() / took[name] / 1e9:.0f} GB/s)"
        if count == 1:
            rates = dense.nbytes / took["bfloat16"] / 1e9, READ_BYTES / took["read"] / 1e9
            line += f"   bfloat16 {rates[0]:.0f}, read {rates[1]:.0f} GB/s"
        print(line, flush=True)


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="Q4_0,Q4_K,Q6_K,Q8_0")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--bits", default="8,15")
    parser.add_argument("--sizes", default="", help="parts of the sizes' names, with commas; all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.cpu_time else args.threads)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    print(f"kernels {_kernels.quantised_set()}, isa {_kernels.isa()}, {torch.get_num_threads()} threads")
    for size in SIZES:
        if any(part in size for part in args.sizes.split(",")):
            bits, rows = ([int(count) for count in numbers.split(",")] for numbers in (args.bits, args.rows))
            compare(size, args.formats.split(","), bits, rows, args.rounds, clock)


if __name__ == "__main__":
    main()
