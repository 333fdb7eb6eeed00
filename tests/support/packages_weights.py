"""Writes ``packages_weights.json``: small weights that the packages themselves have quantised and packed.

Run it where gptqmodel, autoawq and torchao are installed (they pull in more than the tests' environment should have):
``python tests/support/packages_weights.py``. A case holds the tensors as a checkpoint has them, its
``quantization_config``, and a digest of the weight as the package dequantises it, in the dtype in which it does so:
``tests/unit/model/loading/formats/test_packages.py`` compares the reader's numbers with it to the bit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_suffix(".json")
N, K, GROUP = 32, 64, 32

Case = dict[str, Any]


def digest(value: Tensor) -> str:
    """Of the bytes of a tensor."""
    return hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def encoded(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Tensors as JSON."""
    return {
        name: {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "data": base64.b64encode(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).decode(),
        }
        for name, value in tensors.items()
    }


def decoded(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """What :func:`encoded` was given."""
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(entry["data"])), dtype=torch.uint8)
        .view(getattr(torch, entry["dtype"]))
        .view(entry["shape"])
        for name, entry in tensors.items()
    }


def case(
    name: str, package: str, config: dict[str, Any], tensors: dict[str, Tensor], dequantised: Tensor,
    metadata: dict[str, str] | None = None,
) -> Case:  # fmt: skip
    """A case of the file."""
    return {
        "name": name, "made_by": f"{package} {version(package)}", "config": config, "tensors": encoded(tensors),
        "metadata": metadata or {}, "dtype": str(dequantised.dtype).removeprefix("torch."),
        "sha256": digest(dequantised),
    }  # fmt: skip


def parts(bits: int, seed: int) -> tuple[Tensor, Tensor, Tensor, torch.nn.Linear]:
    """Scales and zero points ``[n, groups]`` and the group of each input in order, and a linear layer that they fit."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(0, 1 << bits, (N, K), generator=generator)
    scales = (torch.rand(N, K // GROUP, generator=generator) * 0.01 + 1e-3).half().float()
    zeros = torch.randint(1, 1 << bits, (N, K // GROUP), generator=generator).float()
    groups = torch.arange(K) // GROUP
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = (integers - zeros[:, groups]) * scales[:, groups]
    return scales, zeros, groups, linear


def gptq_cases() -> list[Case]:
    """Every number of bits, both versions of the format, with and without an order of inputs."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    cases = []
    for seed, (bits, kind, ordered) in enumerate(
        [(4, "gptq", False), (4, "gptq", True), (4, "gptq_v2", False), (8, "gptq", True), (3, "gptq", False),
         (3, "gptq_v2", True), (2, "gptq", False)]
    ):  # fmt: skip
        scales, zeros, groups, linear = parts(bits, seed)
        if ordered:
            turn = torch.randperm(K, generator=torch.Generator().manual_seed(seed))
            groups, linear.weight.data = groups[turn], linear.weight.data[:, turn]
        layer = TorchLinear(bits, GROUP, False, ordered, K, N)
        layer.pack(linear, scales, zeros, groups.int())
        layer.post_init()
        dequantised = layer.dequantize_weight().t()
        if kind == "gptq":
            config = QuantizeConfig(bits=bits, group_size=GROUP)
            convert_gptq_v2_to_v1_format_module(layer, config)
        config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": False}
        config["checkpoint_format"] = kind
        tensors = {f"layer.{part}": getattr(layer, part) for part in ("qweight", "qzeros", "scales", "g_idx")}
        order = "_ordered" if ordered else ""
        cases.append(case(f"{kind}_{bits}{order}", "gptqmodel", config, tensors, dequantised))
    return cases


def awq_cases() -> list[Case]:
    """4 bits by the package that the format comes from, 8 bits by the one that writes them."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm as dequantize_any

    scales, zeros, _, linear = parts(4, 20)
    four = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    scales, zeros, _, linear = parts(8, 21)
    eight = AwqTorchLinear(8, GROUP, False, False, K, N)
    eight.pack(linear, scales, zeros)
    cases = []
    for bits, layer, package, dequantise in (
        (4, four, "autoawq", dequantize_gemm), (8, eight, "gptqmodel", dequantize_any)
    ):  # fmt: skip
        config = {"quant_method": "awq", "bits": bits, "group_size": GROUP, "zero_point": True, "version": "gemm"}
        tensors = {f"layer.{part}": getattr(layer, part) for part in ("qweight", "qzeros", "scales")}
        value = dequantise(layer.qweight, layer.qzeros, layer.scales, bits, GROUP).t()
        cases.append(case(f"awq_{bits}", package, config, tensors, value))
    return cases


def torchao_cases() -> list[Case]:
    """Integers of 8 and 4 bits, by output and by group, and numbers of 8 bits by output and by tensor."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    configs = {
        "int8": Int8WeightOnlyConfig(),
        "int8_dynamic": Int8DynamicActivationInt8WeightConfig(),
        "int4_groups": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP)),
        "float8": Float8WeightOnlyConfig(),
    }
    cases = []
    for seed, (name, config) in enumerate(configs.items()):
        *_, linear = parts(8, 30 + seed)
        module = torch.nn.ModuleDict({"layer": linear.bfloat16()})
        quantize_(module, config)
        tensors, metadata = flatten_tensor_state_dict(module.state_dict())
        value = module["layer"].weight.dequantize()
        cases.append(case(f"torchao_{name}", "torchao", {"quant_method": "torchao"}, tensors, value, metadata))
    return cases


def main() -> int:
    """Write the file."""
    cases = [*gptq_cases(), *awq_cases(), *torchao_cases()]
    FILE.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
    print(*(entry["name"] + " by " + entry["made_by"] for entry in cases), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
