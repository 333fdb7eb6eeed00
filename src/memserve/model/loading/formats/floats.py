"""Checkpoints with numbers of 8 and 4 bits: FP8 as of DeepSeek, Qwen and others, MXFP4 as of gpt-oss.

FP8 (``quant_method: fp8`` or ``fbgemm_fp8``): a tensor of 8-bit numbers, and beside it, under the same name with
``_scale_inv`` or ``_scale``, what they are multiplied with: one number, one for each output, or one for each block of
``weight_block_size``. Experts may lie in one tensor.

MXFP4 (``quant_method: mxfp4``): the experts of a layer in one tensor, ``gate_up_proj_blocks [experts, n, k / 32, 16]``
with an exponent for 32 inputs in ``gate_up_proj_scales``; the module has them turned, ``[experts, k, n]``.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memserve.model.loading.formats.compressed import block_of
from memserve.model.loading.formats.files import FLOATS, FLOATS_8, Outputs, TensorEntry, TensorFiles
from memserve.model.loading.formats.integers import unserved
from memserve.model.loading.formats.weights import CheckpointTensor, GroupedTensor, Mxfp4Tensor, ScaledTensor

_SCALES = ("_scale_inv", "_scale")
_EXPONENTS = "F8_E8M0"


def fp8_tensors(config: dict[str, Any], files: TensorFiles) -> list[CheckpointTensor]:
    """The quantised weights of an FP8 checkpoint. Raises :class:`UserError`."""
    if config.get("expert_dtype", "fp8") != "fp8":
        raise unserved("expert_dtype", config, ("fp8",))
    if config.get("fmt", "e4m3") != "e4m3":
        raise unserved("fmt", config, ("e4m3",))
    block = block_of(config, "weight_block_size") if config.get("weight_block_size") else None
    return [_fp8_tensor(files, name, entry, block) for name, entry in files.entries.items() if entry.dtype in FLOATS_8]


def _fp8_tensor(files: TensorFiles, name: str, entry: TensorEntry, block: tuple[int, int] | None) -> CheckpointTensor:
    scale = next((name + end for end in _SCALES if name + end in files.entries), name + _SCALES[0])
    found = files.find(scale, name).shape
    if len(entry.shape) < 2 or 0 in entry.shape:
        raise files.refused(f"{name} is no matrix")
    *outer, n, k = entry.shape
    if found in ((), (1,)):
        size, places = (n, k), (*(1 for _ in outer), 1, 1)
    elif found in ((*outer, n, 1), (*outer, n)):
        size, places = (1, k), (*outer, n, 1)
    else:
        size = block or (n, k)
        places = (*outer, -(-n // size[0]), -(-k // size[1]))
    files.expect(scale, name, found if found in ((), (1,), (*outer, n)) else places, *FLOATS, _EXPONENTS)
    return ScaledTensor(
        name, (name, scale), entry.shape, size, partial(files.read, name),
        lambda: files.read(scale).float().view(places),
    )  # fmt: skip


def mxfp4_tensors(config: dict[str, Any], files: TensorFiles) -> list[CheckpointTensor]:
    """The quantised weights of an MXFP4 checkpoint. Raises :class:`UserError`."""
    tensors: list[CheckpointTensor] = []
    for blocks in files.entries:
        if not blocks.endswith("_blocks"):
            continue
        name = blocks.removesuffix("_blocks")
        shape = files.entries[blocks].shape
        if len(shape) != 4 or shape[3] != 16 or 0 in shape:
            raise files.refused(f"{blocks} has no blocks of 16 bytes for each expert, output and group")
        experts, n, groups, _ = shape
        files.expect(blocks, name, shape, "U8")
        files.expect(f"{name}_scales", name, shape[:3], "U8")
        tensors.append(Mxfp4Tensor(
            name, (blocks, f"{name}_scales"), (experts, groups * 32, n), partial(files.read, blocks),
            partial(files.read, f"{name}_scales"), turned=True,
        ))  # fmt: skip
    return tensors


# -- torchao


_INTEGERS = {"Int8Tensor": 8, "IntxUnpackedToInt8Tensor": 8}
_TORCHAO = (*_INTEGERS, "Float8Tensor")


def torchao_tensors(config: dict[str, Any], files: TensorFiles) -> list[CheckpointTensor]:
    """The quantised weights of a checkpoint that transformers has saved with torchao. Each lies in several tensors,
    ``_weight_qdata``, ``_weight_scale`` and maybe ``_weight_zero_point``; the header of its file says of which class
    and block size it is. Raises :class:`UserError`."""
    tensors: list[CheckpointTensor] = []
    for name, text in files.metadata.items():
        try:
            described = json.loads(text)
        except ValueError:
            continue  # of another writer
        if "." not in name or not isinstance(described, dict) or described.get("_type") in (None, "Tensor"):
            continue
        kind, attributes = described["_type"], described.get("_data") or {}
        if kind not in _TORCHAO:
            raise unserved("quant_type", {"quant_type": kind}, _TORCHAO)
        tensors.append(_torchao_tensor(files, name, kind, attributes))
    return tensors


def _torchao_tensor(files: TensorFiles, name: str, kind: str, attributes: dict[str, Any]) -> CheckpointTensor:
    module, _, weight = name.rpartition(".")
    prefix = f"{module}._{weight}_"
    main, scale, zero_point = (prefix + part for part in ("qdata", "scale", "zero_point"))
    if prefix + "act_pre_scale" in files.entries:
        raise unserved("act_pre_scale", {"act_pre_scale": name})
    shape, size = files.find(main, name).shape, attributes.get("block_size")
    if len(shape) != 2 or 0 in shape:
        raise files.refused(f"{main} is no matrix")
    n, k = shape
    rows, inputs = block_of({"block_size": size or [n, k]}, "block_size")
    places = -(-n // rows), -(-k // inputs)
    found = files.find(scale, name).shape
    is_flat = found in ((), (1,), (places[0] * places[1],))
    files.expect(scale, name, found if is_flat else places, *FLOATS)
    if kind == "Float8Tensor":
        files.expect(main, name, shape, *FLOATS_8)
        return ScaledTensor(
            name, (main, scale), shape, (rows, inputs), partial(files.read, main),
            lambda: files.read(scale).view(places),
        )  # fmt: skip
    files.expect(main, name, shape, "I8")
    if zero_point in files.entries:
        files.expect(zero_point, name, found, "I8", "I32", "I64", *FLOATS)

    def by_output(part: Tensor) -> Tensor:
        return part.view(places).repeat_interleave(rows, 0)[:n]

    def zeros() -> Tensor:
        if zero_point not in files.entries:
            return torch.full((n, places[1]), 128.0)
        return by_output(files.read(zero_point)).float() + 128

    def unpack(words: Tensor, outputs: Outputs) -> Tensor:
        return (words[outputs].short() + 128).to(torch.uint8)

    parts = tuple(part for part in (main, scale, zero_point) if part in files.entries)
    return GroupedTensor(
        name, parts, n, k, _INTEGERS[kind], inputs, partial(files.read, main), unpack,
        lambda: by_output(files.read(scale)), zeros,
    )  # fmt: skip
