"""Quantised Hugging Face folders of tiny models, and the same models with the dequantised values as plain folders.

compressed-tensors rounds, packs and dequantises by itself. GPTQ and AWQ are packed here as their formats are published:
``test_packages.py`` compares :func:`gptq_parts` and :func:`awq_parts` with the words that gptqmodel and autoawq make of
the same integers. FP8 and MXFP4 are dequantised by transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_models import save_folder

Parts = dict[str, Tensor]
Quantise = Callable[[Tensor], tuple[Parts, Tensor]]
"""A weight ``[n, k]`` -> its parts by the ends of their names (``weight``, ``qweight`` ...), and its numbers."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def is_linear(name: str) -> bool:
    """Whether a tensor of a checkpoint is what packages quantise: linears of layers, without the output head."""
    return name.endswith("_proj.weight")


def quantised_folder(
    module: Any, folder: Path, config: dict[str, Any], quantise: Quantise, *, which: Callable[[str], bool] = is_linear
) -> tuple[Path, Path]:
    """Save ``module`` with the weights that ``which`` chooses quantised: the folder, and that of the numbers."""
    plain = save_folder(module, folder / "numbers")
    quantised = Path(shutil.copytree(plain, folder / "quantised"))
    tensors = load_file(plain / "model.safetensors")
    numbers, stored = dict(tensors), {}
    for name, value in tensors.items():
        if which(name):
            parts, numbers[name] = quantise(value.float())
            stored |= {f"{name.removesuffix('weight')}{end}": part.contiguous() for end, part in parts.items()}
        else:
            stored[name] = value
    numbers = {name: value.float().contiguous() for name, value in numbers.items()}
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((quantised / "config.json").read_text()) | {"quantization_config": config}
    (quantised / "config.json").write_text(json.dumps(described))
    return quantised, plain


def change_tensors(folder: Path, change: Callable[[Parts], None]) -> None:
    """Let ``change`` edit the tensors of a folder."""
    tensors = {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}
    change(tensors)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **fields: Any) -> None:
    """Set fields of the quantisation's config; None: take them out."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    config["quantization_config"] = {key: value for key, value in config["quantization_config"].items() if value != ()}
    (folder / "config.json").write_text(json.dumps(config))


# -- integers in groups


def rounded(weight: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers ``[n, k]``, scales (float16) and zero points ``[n, groups]`` of a weight."""
    groups, most = weight.view(len(weight), -1, size), (1 << bits) - 1
    least, largest = groups.amin(-1), groups.amax(-1)
    scales = ((largest - least) / most).clamp(min=1e-4).half()
    zeros = (-least / scales.float()).round().clamp(1, most)
    integers = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    return integers.view_as(weight).int(), scales, zeros.int()


def packed(values: Tensor, bits: int) -> Tensor:
    """Integers ``[..., m]`` densely in int32 words, the lowest bits first."""
    stream = (values[..., None].long() >> torch.arange(bits) & 1).flatten(-2)
    words = (stream.view(*stream.shape[:-1], -1, 32) << torch.arange(32)).sum(-1)
    return (words - ((words >> 31) << 32)).int()


def gptq_parts(integers: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, bits: int, *, first: bool) -> Parts:
    """The tensors of a GPTQ layer; ``groups``: of each input; ``first``: the first version, with zeros less one."""
    stored = zeros - 1 if first else zeros
    return {
        "qweight": packed(integers.t().contiguous().t(), bits).t(), "qzeros": packed(stored.t(), bits),
        "scales": scales.t(), "g_idx": groups.int(),
    }  # fmt: skip


def awq_parts(integers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Parts:
    """The tensors of an AWQ layer."""

    def in_order(values: Tensor) -> Tensor:
        turned = values.t()
        return packed(turned.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2) if bits == 4 else turned, bits)

    return {"qweight": in_order(integers), "qzeros": in_order(zeros), "scales": scales.t()}


def gptq(bits: int = 4, size: int = 32, *, order: bool = False, version: str = "gptq") -> tuple[dict, Quantise]:
    """GPTQ's config and layers; ``order``: inputs belong to groups in an order of their own (``desc_act``)."""

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        k = weight.shape[1]
        turn = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if order else torch.arange(k)
        integers, scales, zeros = rounded(weight[:, turn], bits, size)
        back = turn.argsort()
        groups, integers = (torch.arange(k) // size)[back], integers[:, back]
        numbers = (integers - zeros[:, groups]).float() * scales.float()[:, groups]
        return gptq_parts(integers, scales, zeros, groups, bits, first=version == "gptq"), numbers

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": order, "sym": False}
    return config | {"checkpoint_format": version}, quantise


def awq(bits: int = 4, size: int = 32) -> tuple[dict, Quantise]:
    """AWQ's config and layers."""

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        integers, scales, zeros = rounded(weight, bits, size)
        groups = torch.arange(weight.shape[1]) // size
        return awq_parts(integers, scales, zeros, bits), (integers - zeros[:, groups]) * scales.float()[:, groups]

    config = {"quant_method": "awq", "bits": bits, "group_size": size, "zero_point": True, "version": "gemm"}
    return config, quantise


# -- compressed-tensors, by the package


def compressed(
    weights: dict[str, Any], activations: dict[str, Any] | None = None, dtype: torch.dtype = torch.float16
) -> tuple[dict, Quantise]:
    """A config with one group, and layers rounded, packed and dequantised by the package. ``weights``: arguments of its
    ``QuantizationArgs``; ``dtype``: of the scales."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    of_activations = None if activations is None else QuantizationArgs(**activations)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=of_activations)
    kind = infer_module_format(torch.nn.Linear, scheme).value
    compressor = BaseCompressor.get_value_from_registry(kind)

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        scale, zero_point = calculate_qparams(*_ranges(weight, args), args)
        state = {"weight": weight.to(dtype), "weight_scale": scale.to(dtype), "weight_zero_point": zero_point}
        parts = compressor.compress(state, scheme)
        wide = {name: part.float() if part.dtype == dtype else part for name, part in parts.items()}
        numbers = compressor.decompress(wide, scheme)["weight"].float()  # scales in float32: nothing is rounded
        return parts, numbers

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=kind, quantization_status="compressed", ignore=["lm_head"]
    )
    return json.loads(config.model_dump_json()), quantise


def _ranges(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Least and largest values of what has one scale."""
    match args.strategy:
        case "tensor":
            parts = weight.reshape(1, -1)
        case "channel":
            parts = weight[:, None]
        case "group":
            parts = weight.view(len(weight), -1, args.group_size)
        case "block":
            rows, inputs = args.block_structure
            parts = weight.unfold(0, rows, rows).unfold(1, inputs, inputs).flatten(-2)
    return parts.amin(-1), parts.amax(-1)


# -- numbers of 8 and 4 bits


def fp8(block: tuple[int, int] | None = (32, 32), scale: str = "weight_scale_inv") -> tuple[dict, Quantise]:
    """FP8 by blocks, as DeepSeek and Qwen have it, dequantised by transformers; or with one scale."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        rows, inputs = block or weight.shape
        places = weight.unfold(0, rows, rows).unfold(1, inputs, inputs).flatten(-2)
        scales = places.abs().amax(-1) / 448
        wide = scales.repeat_interleave(rows, 0).repeat_interleave(inputs, 1)
        values = (weight / wide).to(torch.float8_e4m3fn)
        numbers = Fp8Dequantize(None)._dequantize_one(values, scales, output_dtype=torch.float32)
        return {"weight": values, scale: scales if block else scales.reshape(())}, numbers

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return config | ({"weight_block_size": list(block)} if block else {}), quantise


def mxfp4_folder(module: Any, folder: Path) -> tuple[Path, Path]:
    """Save a gpt-oss model with its experts in MXFP4, dequantised by transformers: the folder, and the numbers'."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    plain = save_folder(module, folder / "numbers")
    quantised = Path(shutil.copytree(plain, folder / "quantised"))

    def pack(tensors: Parts) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, k, n = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, n, k // 32, 16), generator=generator).to(torch.uint8)
            exponents = torch.randint(121, 125, (experts, n, k // 32), generator=generator).to(torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}

    def unpack(tensors: Parts) -> None:
        packed = load_file(quantised / "model.safetensors")
        for name in tensors:
            if f"{name}_blocks" in packed:
                parts = packed[f"{name}_blocks"], packed[f"{name}_scales"]
                tensors[name] = convert_moe_packed_tensors(*parts, dtype=torch.float32)

    change_tensors(quantised, pack)
    change_tensors(plain, unpack)
    described = json.loads((quantised / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (quantised / "config.json").write_text(json.dumps(described))
    return quantised, plain
