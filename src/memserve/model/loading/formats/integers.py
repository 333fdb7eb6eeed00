"""GPTQ and AWQ checkpoints: integers of few bits, packed in words of 32, with a scale and a zero point a group.

GPTQ (``quant_method: gptq``) packs along the inputs: ``qweight [k * bits / 32, n]``, ``scales [groups, n]``, ``qzeros
[groups, n * bits / 32]`` packed along the outputs, and ``g_idx [k]``, the group of each input, which is any with
``desc_act``. The first version of the format stores zero points less one, by an addition to whole words.

AWQ (``quant_method: awq``, version ``gemm``) packs along the outputs in an order of its own: ``qweight [k, n * bits /
32]``, ``qzeros [groups, n * bits / 32]``, ``scales [groups, n]``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from memserve.base.errors import UserError
from memserve.model.loading.formats.files import FLOATS, Outputs, TensorFiles, unpacked
from memserve.model.loading.formats.weights import CheckpointTensor, GroupedTensor

_GPTQ_BITS, _AWQ_BITS = (2, 3, 4, 8), (4, 8)
_WORD = 32
_GPTQ_VERSIONS = ("gptq", "gptq_v2")
_ORDERS = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 1, 2, 3)}
"""Where in a word each of its outputs lies, by bits: an order of AWQ's own for 4 alone."""


def gptq_tensors(config: dict[str, Any], files: TensorFiles) -> list[CheckpointTensor]:
    """The quantised weights of a GPTQ checkpoint. Raises :class:`UserError`."""
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in _GPTQ_VERSIONS or config.get("pack_dtype", "int32") != "int32":
        raise unserved("checkpoint_format" if version not in _GPTQ_VERSIONS else "pack_dtype", config, _GPTQ_VERSIONS)
    bits, size = number_of(config, "bits", _GPTQ_BITS), number_of(config, "group_size")
    return [
        _gptq_tensor(files, name.removesuffix(".qweight"), bits, size, version == "gptq", bool(config.get("dynamic")))
        for name in files.entries
        if name.endswith(".qweight")
    ]


def _gptq_tensor(
    files: TensorFiles, module: str, bits: int, size: int, first_version: bool, overridden: bool
) -> GroupedTensor:
    """``overridden``: modules may have other bits and groups than the config says."""
    whose, names = f"{module}.weight", [f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")]
    words, order = files.find(names[0], whose).shape, files.entries.get(names[3])
    groups, n = matrix_of(files, names[2], whose)
    if len(words) != 2:
        raise files.refused(f"{names[0]} is no matrix")
    k = order.shape[0] if order is not None and len(order.shape) == 1 else words[0] * _WORD // bits
    if overridden and k:
        bits = next((bits for bits in _GPTQ_BITS if words[0] * _WORD == k * bits), bits)
        size = size if -(-k // max(size, 1)) == groups else -(-k // max(groups, 1))
    size = size if size > 0 else k
    if k * bits != words[0] * _WORD or -(-k // size) != groups:
        raise files.refused(f"{whose} has {groups} groups and {words[0]} words for {k} inputs of {bits} bits")
    files.expect(names[0], whose, (k * bits // _WORD, n), "I32")
    files.expect(names[1], whose, (groups, -(-n * bits // _WORD)), "I32")
    files.expect(names[2], whose, (groups, n), *FLOATS)
    if order is not None:
        files.expect(names[3], whose, (k,), "I32", "I64")

    def unpack(words: Tensor, outputs: Outputs) -> Tensor:
        return unpacked(words[:, outputs].t(), bits)

    def zeros() -> Tensor:
        return _gptq_zeros(files.read(names[1]), bits, first_version)[:, :n].t()

    return GroupedTensor(
        whose, tuple(name for name in names if name in files.entries), n, k, bits, size, partial(files.read, names[0]),
        unpack, lambda: files.read(names[2]).t(), zeros,
        None if order is None else partial(files.read, names[3]),
    )  # fmt: skip


def _gptq_zeros(words: Tensor, bits: int, first_version: bool) -> Tensor:
    """Zero points ``[groups, outputs]``."""
    if first_version and bits != 3:
        words = words + sum(1 << place for place in range(0, _WORD - 1, bits))  # may carry, as it borrowed
    zeros = unpacked(words, bits)
    return zeros + 1 & (1 << bits) - 1 if first_version and bits == 3 else zeros


def awq_tensors(config: dict[str, Any], files: TensorFiles) -> list[CheckpointTensor]:
    """The quantised weights of an AWQ checkpoint. Raises :class:`UserError`."""
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise unserved("version" if config.get("version") else "format", config, ("gemm",))
    bits = config.get("bits", config.get("w_bit", 4))
    size = config.get("group_size", config.get("q_group_size", 128))
    bits, size = number_of({"bits": bits}, "bits", _AWQ_BITS), number_of({"group_size": size}, "group_size")
    return [
        _awq_tensor(files, name.removesuffix(".qweight"), bits, size)
        for name in files.entries
        if name.endswith(".qweight")
    ]


def _awq_tensor(files: TensorFiles, module: str, bits: int, size: int) -> GroupedTensor:
    whose, names = f"{module}.weight", [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
    k, words = matrix_of(files, names[0], whose)
    groups, n = matrix_of(files, names[2], whose)
    size = size if size > 0 else k
    if -(-k // size) != groups or n * bits != words * _WORD:
        raise files.refused(f"{whose} has {groups} groups and {words} words for {k} inputs, {n} outputs of {bits} bits")
    files.expect(names[0], whose, (k, words), "I32")
    files.expect(names[1], whose, (groups, words), "I32")
    files.expect(names[2], whose, (groups, n), *FLOATS)
    return GroupedTensor(
        whose, tuple(names), n, k, bits, size, partial(files.read, names[0]), partial(_awq_values, bits),
        lambda: files.read(names[2]).t(), lambda: _awq_values(bits, files.read(names[1]), slice(0, n)),
    )  # fmt: skip


def _awq_values(bits: int, words: Tensor, outputs: Outputs) -> Tensor:
    """``words [rows, n * bits / 32]`` -> uint8 ``[outputs, rows]``."""
    indices = torch.arange(outputs.start, outputs.stop) if isinstance(outputs, slice) else outputs
    in_word = _WORD // bits
    shifts = torch.tensor(_ORDERS[bits], dtype=torch.int32)[indices % in_word] * bits
    return (words[:, indices // in_word] >> shifts & (1 << bits) - 1).to(torch.uint8).t().contiguous()


# -- what every format asks of its config and its tensors


def number_of(config: dict[str, Any], field: str, allowed: tuple[int, ...] = ()) -> int:
    """The integer ``field`` of a quantisation config. Raises :class:`UserError`."""
    value = config.get(field)
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value == 0
        or value < -1
        or (allowed and value not in allowed)
    ):
        raise unserved(field, config, allowed)
    return value


def unserved(field: str, config: dict[str, Any], allowed: tuple[Any, ...] = ()) -> UserError:
    """The error for a field of a quantisation config that is not understood."""
    served = f"; served: {', '.join(map(str, allowed))}" if allowed else ""
    message = (
        f"config.json: quantization_config has {field} {str(config.get(field))[:60]!r}, which is not served{served}"
    )
    hint = "serve the model that is not quantised, or one that is quantised in a way that is served"
    return UserError(message, hint=hint, param="model")


def matrix_of(files: TensorFiles, name: str, whose: str) -> tuple[int, int]:
    """The sizes of a part of ``whose`` that has two. Raises :class:`UserError`."""
    shape = files.find(name, whose).shape
    if len(shape) != 2 or 0 in shape:
        raise files.refused(f"{name} is no matrix")
    return shape[0], shape[1]
