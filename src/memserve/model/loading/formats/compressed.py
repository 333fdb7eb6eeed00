"""Checkpoints of compressed-tensors, as llm-compressor writes them.

``config_groups`` says how the weights of which modules are quantised. Integers of 8 bits lie one in a byte
(``weight``), with a sign, or several in words (``weight_packed``), without one; zero points likewise. Numbers of 8 bits
lie one in a byte, of 4 bits (MXFP4) two in a byte. ``weight_scale`` has a number for the tensor, for each output, group
of inputs, or block of both. Activations are not rounded here, whatever the scheme says of them.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memserve.base.errors import UserError
from memserve.model.loading.formats.files import FLOATS, FLOATS_8, Outputs, TensorFiles, unpacked
from memserve.model.loading.formats.integers import number_of, unserved
from memserve.model.loading.formats.weights import CheckpointTensor, GroupedTensor, Mxfp4Tensor, ScaledTensor

FORMATS = (
    "int-quantized", "pack-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "mixed-precision"
)  # fmt: skip
_BITS = (2, 4, 8)
_STRATEGIES = ("tensor", "channel", "group", "block")
_WORD = 32
_REPEATED_PART, _REPETITION = re.compile(r"\)\s*[*+{]"), re.compile(r"[*+{]")


def compressed_tensors(config: dict[str, Any], files: TensorFiles) -> list[CheckpointTensor]:
    """The quantised weights of a checkpoint of compressed-tensors. Raises :class:`UserError`."""
    schemes = _schemes(config)
    parts = [name.rpartition(".") for name in files.entries]
    tensors: list[CheckpointTensor] = []
    for module in dict.fromkeys(module for module, _, part in parts if part in ("weight_scale", "weight_packed")):
        scheme = _scheme_of(module, schemes)
        if scheme is None:
            raise files.refused(f"{module} belongs to no group of quantization_config")
        tensors.append(_tensor(files, module, scheme))
    return tensors


def _schemes(config: dict[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
    """Targets and the scheme of their weights, by group. Raises :class:`UserError`."""
    if config.get("format", "dense") not in FORMATS:
        raise unserved("format", config, FORMATS)
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise unserved("sparsity_config", config, ("dense",))
    if (config.get("transform_config") or {}).get("config_groups"):
        raise unserved("transform_config", config)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise unserved("config_groups", config)
    schemes = []
    for name, group in groups.items():
        weights, targets = group.get("weights"), group.get("targets")
        if not isinstance(weights, dict) or not isinstance(targets, list):
            message = f"config.json: {name} of quantization_config rounds activations alone, which is not served"
            raise UserError(message, hint="serve the model that is not quantised", param="model")
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
        if strategy not in _STRATEGIES:
            raise unserved("strategy", weights, _STRATEGIES)
        if any(_may_take_long(str(target)) for target in targets):
            raise unserved("targets", group)
        schemes.append(([str(target) for target in targets], weights | {"strategy": strategy}))
    return schemes


def _may_take_long(target: str) -> bool:
    """Whether matching a name with a pattern could take very long: the folder is a stranger's."""
    return target.startswith("re:") and bool(_REPEATED_PART.search(target) or len(_REPETITION.findall(target)) > 4)


def _scheme_of(module: str, schemes: list[tuple[list[str], dict[str, Any]]]) -> dict[str, Any] | None:
    """The scheme of a module: of its name before that of its class, which only its targets tell."""
    classes = []
    for targets, scheme in schemes:
        for target in targets:
            if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                return scheme
            if not target.startswith("re:") and "." not in target:
                classes.append((target, scheme))
    is_embedding = "embed" in module
    matching = [scheme for target, scheme in classes if ("Embedding" in target) == is_embedding]
    return matching[0] if matching else None


def _tensor(files: TensorFiles, module: str, scheme: dict[str, Any]) -> CheckpointTensor:
    whose, packed = f"{module}.weight", f"{module}.weight_packed"
    is_packed = packed in files.entries
    entry = files.find(packed if is_packed else whose, whose)
    if scheme.get("type", "int") == "float":
        if is_packed:
            return _float4_tensor(files, module, scheme)
        return _float_tensor(files, module, scheme)
    if not is_packed and entry.dtype in FLOATS:
        hint = "save it with save_pretrained(folder, save_compressed=True), and serve that folder"
        message = f"{files.name}: {whose} is not compressed: its quantisation would have to be computed at each step"
        raise UserError(message, hint=hint, param="model")
    return _integer_tensor(files, module, scheme, is_packed)


def _integer_tensor(files: TensorFiles, module: str, scheme: dict[str, Any], is_packed: bool) -> CheckpointTensor:
    whose, bits = f"{module}.weight", number_of(scheme, "num_bits", _BITS)
    main = f"{module}.weight_packed" if is_packed else whose
    size, zero_points = files.find(main, whose).shape, f"{module}.weight_zero_point"
    if len(size) != 2 or 0 in size:
        raise files.refused(f"{main} is no matrix")
    n, k = _packed_shape(files, module, size, bits) if is_packed else size
    files.expect(main, whose, (n, -(-k * bits // _WORD)) if is_packed else (n, k), "I32" if is_packed else "I8")
    if scheme["strategy"] == "block":
        raise unserved("strategy", scheme, ("tensor", "channel", "group"))
    group = number_of(scheme, "group_size") if scheme["strategy"] == "group" else k
    groups = -(-k // group)
    _check_scale(files, module, scheme["strategy"], (n, groups))
    is_symmetric, has_words = bool(scheme.get("symmetric", True)), is_packed and scheme["strategy"] != "tensor"
    if not is_symmetric and has_words:
        files.expect(zero_points, whose, (-(-n * bits // _WORD), groups), "I32")
    elif not is_symmetric:
        files.expect(zero_points, whose, files.find(f"{module}.weight_scale", whose).shape, "I8")
    middle, order = 1 << bits - 1, f"{module}.weight_g_idx"

    def unpack(words: Tensor, outputs: Outputs) -> Tensor:
        if is_packed:
            return unpacked(words[outputs], bits)[:, :k]
        return (words[outputs].short() + middle).to(torch.uint8)

    def zeros() -> Tensor:
        if is_symmetric:
            return torch.full((n, groups), middle, dtype=torch.uint8)
        if has_words:
            return unpacked(files.read(zero_points).t(), bits)[:, :n].t()
        return (files.read(zero_points).short() + middle).view(-1, groups).expand(n, groups)

    parts = (main, f"{module}.weight_scale", *(part for part in (zero_points, order) if part in files.entries))
    if order in files.entries:
        files.expect(order, whose, (k,), "I32", "I64")
    return GroupedTensor(
        whose, parts, n, k, bits, group, partial(files.read, main), unpack,
        lambda: files.read(f"{module}.weight_scale").view(-1, groups).expand(n, groups), zeros,
        partial(files.read, order) if order in files.entries else None,
    )  # fmt: skip


def _packed_shape(files: TensorFiles, module: str, packed: tuple[int, ...], bits: int) -> tuple[int, int]:
    """What ``weight_shape`` says, if it can be."""
    name = f"{module}.weight_shape"
    files.expect(name, f"{module}.weight", (2,), "I64", "I32")
    n, k = files.read(name).tolist()
    if n != packed[0] or k < 1 or -(-k * bits // _WORD) != packed[1]:
        raise files.refused(f"{name} is {n} x {k}, which {packed[0]} x {packed[1]} words do not hold")
    return n, k


def _float_tensor(files: TensorFiles, module: str, scheme: dict[str, Any]) -> CheckpointTensor:
    whose, scale = f"{module}.weight", f"{module}.weight_scale"
    number_of(scheme, "num_bits", (8,))
    shape, strategy = files.find(whose, whose).shape, scheme["strategy"]
    if len(shape) != 2 or files.entries[whose].dtype not in FLOATS_8:
        raise files.refused(f"{whose} is no matrix of 8-bit numbers")
    n, k = shape
    block = {"tensor": (n, k), "channel": (1, k)}.get(strategy)
    if strategy == "group":
        block = 1, number_of(scheme, "group_size")
    elif strategy == "block":
        block = block_of(scheme, "block_structure")
    rows, inputs = block or (n, k)
    places = -(-n // rows), -(-k // inputs)
    _check_scale(files, module, strategy, places)
    return ScaledTensor(
        whose, (whose, scale), (n, k), (rows, inputs), partial(files.read, whose),
        lambda: files.read(scale).view(places),
    )  # fmt: skip


def _float4_tensor(files: TensorFiles, module: str, scheme: dict[str, Any]) -> CheckpointTensor:
    """MXFP4; other numbers of 4 bits are refused by their groups."""
    whose, main, scale = f"{module}.weight", f"{module}.weight_packed", f"{module}.weight_scale"
    number_of(scheme, "num_bits", (4,))
    group = number_of(scheme, "group_size", (32,))
    size = files.find(main, whose).shape
    if len(size) != 2 or size[1] * 2 % group or 0 in size:
        raise files.refused(f"{main} is no matrix of whole groups")
    n, groups = size[0], size[1] * 2 // group
    files.expect(main, whose, size, "U8")
    files.expect(scale, whose, (n, groups), "U8")
    return Mxfp4Tensor(
        whose, (main, scale), (n, groups * group), lambda: files.read(main).view(n, groups, group // 2),
        partial(files.read, scale),
    )  # fmt: skip


def block_of(config: dict[str, Any], field: str) -> tuple[int, int]:
    """The outputs and inputs of a block. Raises :class:`UserError`."""
    block = config.get(field)
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise unserved(field, config)
    return block[0], block[1]


def _check_scale(files: TensorFiles, module: str, strategy: str, places: tuple[int, int]) -> None:
    """Raise :class:`UserError` unless ``weight_scale`` has a number for each place."""
    name = f"{module}.weight_scale"
    shape = files.find(name, f"{module}.weight").shape
    one_a_row = strategy == "channel" and shape == places[:1]
    one_at_all = strategy == "tensor" and shape in ((), (1,), (1, 1))
    files.expect(name, f"{module}.weight", shape if one_a_row or one_at_all else places, *FLOATS)
