"""Quantised weights on a CUDA device: their kernels against float64, and an 8B's shape in 4 bits beside the same in
bfloat16. Parts of ``scripts/gpu_check.py``; without a CUDA device the kernels are interpreted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_models import EIGHT_B, steps
from gpu_report import Row, has_device

SUPPORT = Path(__file__).resolve().parent.parent / "tests" / "support"
FORMAT, GROUP, ZERO = "INT4_128", 128, 8
"""What the shape is rounded to: as most GPTQ and AWQ checkpoints have it."""
ROWS = (1, 3, 16, 64, 200)
ROWS_INTERPRETED, FORMATS_INTERPRETED = (1, 20), ("Q4_K", "INT4_128", "FP8_128")
FEW = 64
"""Up to so many rows meet integers."""


def kernels() -> Iterator[Row]:
    """Weights of every format: to the bit those of the host, and products of few rows and of many."""
    from memserve.model.quantised import FORMATS

    for kind in FORMATS if has_device() else FORMATS_INTERPRETED:
        yield {"what": f"{kind}: numbers and products", **_checked(kind)}


def four_bits() -> Iterator[Row]:
    """A model of 8B, whose linears have 4 bits: its figures have targets."""
    return steps(replace(EIGHT_B, name="8B in 4 bits"), round_weights)


def round_weights(module: Any) -> None:
    """Put random integers in the place of the linears' weights of ``module``, a linear after the other."""
    from memserve.model.gpu.stored import DeviceForm, DeviceWeights, stand_in
    from memserve.model.gpu.weights import DeviceWeight
    from memserve.model.loading.stored import remember_stored

    weights, head = [], module.get_output_embeddings()
    for linear in (part for part in module.modules() if isinstance(part, torch.nn.Linear) and part is not head):
        (n, k), like = linear.weight.shape, {"device": linear.weight.device}
        values = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, **like)
        scales = torch.full((n, k // GROUP), 0.02 / ZERO, dtype=torch.float16, **like)
        weight = DeviceWeight(FORMAT, k, linear.weight.dtype, values, scales, torch.full_like(scales, ZERO))
        linear.weight.data = stand_in(weight)
        weights.append((linear.weight.detach(), DeviceForm(weight)))
    remember_stored(module, DeviceWeights(weights, module.device))


def _checked(kind: str) -> Row:
    from memserve import _kernels
    from memserve.model.gpu.quantised import FEW_ROWS_STORED, ONE_ROW_STORED, few_rows_stored, one_row_stored
    from memserve.model.gpu.stored import DeviceForm, DeviceWeights, stand_in
    from memserve.model.gpu.weights import unpack_weight
    from memserve.model.quantised import QuantisedLinear

    sys.path.insert(0, str(SUPPORT))
    from quantised_blocks import random_packed

    place, dtype, limit = torch.device("cpu"), torch.float16, 2e-3
    n, k, all_rows = 33, 2 * _kernels.quantised_block_inputs(kind), ROWS_INTERPRETED
    if has_device():
        place, dtype, limit = torch.device("cuda"), torch.bfloat16, 2e-2
        n, k, all_rows = 1000, 4096, ROWS
    packed = random_packed(kind, n, k)
    numbers, weight = QuantisedLinear([packed]).dequantised(), unpack_weight(packed, place, dtype)
    layer: Any = DeviceWeights([(stand_in(weight), form := DeviceForm(weight))], place).make_layer([form], dtype=dtype)
    error = 0.0
    for rows in all_rows:
        x = torch.randn(rows, k, device=place).to(dtype)
        want = x.double() @ numbers.to(place).double().t()
        tried: list[Any] = [(few_rows_stored, options) for options in FEW_ROWS_STORED if rows <= FEW]
        tried += [(one_row_stored, options) for options in ONE_ROW_STORED if rows == 1]
        results = [layer(x), *(kernel(x, weight, None, dtype, options) for kernel, options in tried)]
        error = max(error, *(float((y.double() - want).abs().max() / want.abs().max()) for y in results))
    same = torch.equal(layer.dequantised().cpu(), numbers)
    return {"ok": same and error <= limit, "same": same, "error": error}
