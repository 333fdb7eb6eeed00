"""Blocks of quantised weights as in GGUF files, with random integers and scales of a usual size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from memserve.model.loading.stored import StoredWeight, StoredWeights
from memserve.model.quantised import QuantisedWeight

FILE_FORMATS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"
)  # fmt: skip
_SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q3_K": (108,),
           "Q6_K": (208,)}  # fmt: skip
"""Where a block has float16 numbers; elsewhere it has one, in front."""


def inputs_of(kind: str) -> int:
    """Inputs of a block."""
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])


def random_blocks(kind: str, n: int, k: int, seed: int = 0, times: float = 1.0) -> Tensor:
    """``n`` rows of ``k`` weights, all bits random but those of the scales: uint8 ``[n, bytes of a row]``. ``times``:
    how many times as large as usual."""
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (n, k // inputs, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = random.integers(116, 124, blocks.shape[:2])
    else:
        for place in _SCALES.get(kind, (0,)):
            numbers = ((random.random((*blocks.shape[:2], 1)) * 0.01 + 1e-3) * times).astype(np.float16)
            numbers *= random.choice([-1, 1], numbers.shape).astype(np.float16)
            blocks[..., place : place + 2] = numbers.view(np.uint8)
    return torch.from_numpy(blocks.reshape(n, -1))


def numbers_of(kind: str, blocks: Tensor) -> Tensor:
    """The same weights as float32 ``[n, k]``, by the ``gguf`` package."""
    return torch.from_numpy(np.array(dequantize(blocks.numpy(), GGMLQuantizationType[kind])))


def sized_blocks(kind: str, n: int, k: int, size: float, seed: int = 0) -> Tensor:
    """As :func:`random_blocks`, of weights with this root mean square."""
    usual = numbers_of(kind, random_blocks(kind, n, k, seed)).square().mean().sqrt()
    return random_blocks(kind, n, k, seed, size / float(usual))


def quantise_matrices(module: Any, kind_of: Callable[[str], str]) -> StoredWeights:
    """Give the matrices of ``module`` random weights that a file may hold, each of the format that ``kind_of`` its name
    says, and what the file would say of them."""
    weights = []
    for seed, (name, value) in enumerate(module.named_parameters()):
        if value.dim() == 2:
            kind, (n, k) = kind_of(name), value.shape
            blocks = sized_blocks(kind, n, k, float(value.square().mean().sqrt()), seed)
            value.data = numbers_of(kind, blocks)
            weights.append((value.detach(), StoredWeight(kind, k, blocks)))
    return StoredWeights(weights)


def random_packed(kind: str, n: int, k: int, seed: int = 0) -> QuantisedWeight:
    """A packed weight of any of the kernels' formats."""
    if kind in FILE_FORMATS:
        return random_weight(kind, n, k, seed)[0]
    random, size = torch.Generator().manual_seed(seed), int(kind.rpartition("_")[2])
    shape = n, k // size
    if kind.startswith("FP8"):
        values = torch.randn(n, k, generator=random).to(torch.float8_e4m3fn)
        return QuantisedWeight.of_floats(kind, values, torch.rand(shape, generator=random) + 0.5)
    most = 16 if kind.startswith("INT4") else 256
    values = torch.randint(0, most, (n, k), generator=random, dtype=torch.uint8)
    zeros = torch.randint(0, most, shape, generator=random).half()
    scales = (torch.rand(shape, generator=random) * 0.01 + 1e-3).half()
    return QuantisedWeight.of_groups(kind, values, scales, zeros, torch.randperm(k, generator=random))


def random_weight(kind: str, n: int, k: int, seed: int = 0) -> tuple[QuantisedWeight, Tensor]:
    """A packed weight, and its numbers."""
    blocks = random_blocks(kind, n, k, seed)
    return QuantisedWeight.of_blocks(kind, blocks, k), numbers_of(kind, blocks)
