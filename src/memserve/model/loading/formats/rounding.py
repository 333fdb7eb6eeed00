"""Quantises the linears of a checkpoint whose weights are numbers, once, into a folder of the cache.

The folder is one of compressed-tensors, as llm-compressor would write it, so that what comes after is as for any other
(:mod:`memserve.model.loading.formats.compressed`). Weights are read and written one at a time. Rounding is to nearest,
without data: :data:`SETTINGS` says how, and which script has measured it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memserve.base.errors import UserError
from memserve.model.loading.cache import MARKER, cached_folder, fingerprint
from memserve.model.loading.conversion import SafetensorsWriter
from memserve.model.loading.formats.files import FLOATS, TensorFiles, row_chunks
from memserve.model.loading.formats.headers import is_beside, quantisation_of, read_header
from memserve.model.loading.pages import drop_file_pages
from memserve.model.loading.sources import ModelFolder

log = logging.getLogger(__name__)

VERSION = 1
"""Raise this when a weight would be rounded differently: cached folders are then made again."""

_WEIGHTS = "model.safetensors"
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
_SHRINKS = tuple(1 - step / 20 for step in range(7))
"""Of a group's range, those that are tried: what lies outside is cut off, and all else is finer."""
_WORD = 32


@dataclass(frozen=True, slots=True)
class Rounding:
    """How weights become integers."""

    bits: int
    groups: tuple[int, ...] = ()
    """Inputs with one scale: the first of these that divides those of a weight. None: all of an output."""
    symmetric: bool = True
    """Zero is in the middle; else each group has a zero point."""
    head_bits: int | None = None
    """Of the output head, and an embedding that is tied to it; 0: they are left alone; None: as of all others."""

    def size_for(self, inputs: int) -> int:
        """Of a group of a weight with so many inputs; 0: it cannot be rounded so."""
        if not self.groups:
            return inputs if inputs % _WORD == 0 else 0
        return next((size for size in self.groups if inputs % size == 0), 0)

    def scheme(self, size: int) -> dict[str, Any]:
        """In the words of compressed-tensors, of weights with groups of ``size``."""
        scope = {"strategy": "group", "group_size": size} if self.groups else {"strategy": "channel"}
        return {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, **scope}


SETTINGS = {"int8": Rounding(8, (128, 32)), "int4": Rounding(4, (32,), symmetric=False, head_bits=8)}
"""By ``--quantization``. Groups of 128 inputs cost the kernels no more than one scale for an output, and groups of 32 a
little. A head of 4 bits costs a third more divergence than all other weights of 4 bits together, one of 8 bits nothing
(``bench/quantised_quality.py``)."""

Chosen = dict[str, tuple[Rounding, int]]
"""Weights to be rounded: how, and the size of their groups."""


def rounded_folder(folder: ModelFolder, kind: str, setting: Rounding | None = None) -> ModelFolder:
    """The quantised copy of ``folder`` in the cache, made on first use. ``setting``: another one than that of ``kind``.
    Raises :class:`UserError` for a model that is quantised already, and where the cache cannot be written."""
    if folder.gguf is not None or quantisation_of(folder.path, folder.name) is not None:
        raise UserError(
            f"{folder.name} is quantised already",
            hint=f"leave out --quantization {kind}, or give the checkpoint that it was made from",
            param="quantization",
        )
    setting = SETTINGS[kind] if setting is None else setting
    way = hashlib.blake2b(repr(setting).encode(), digest_size=4).hexdigest()
    key = f"{folder.path.resolve().name}-{fingerprint(folder.path)[:16]}-{kind}-{way}"
    entry = cached_folder(key, VERSION, lambda empty: _round_into(empty, folder, setting))
    try:
        read_header(entry / _WEIGHTS)
    except UserError as error:
        log.warning("the quantised copy of %s is made again: %s", folder.name, error)
        with suppress(OSError):
            (entry / MARKER).unlink()
        entry = cached_folder(key, VERSION, lambda empty: _round_into(empty, folder, setting))
    return ModelFolder(entry, folder.name)


def _round_into(empty: Path, folder: ModelFolder, setting: Rounding) -> None:
    files = TensorFiles(folder.path, folder.name)
    chosen = _linears(folder.path, files, setting)
    if not chosen:
        raise files.refused("none of its weights is of a linear layer that can be quantised")
    plain = [name for name in files.entries if name not in chosen and not is_beside(name)]
    with SafetensorsWriter(empty / _WEIGHTS, len(plain) + 4 * len(chosen)) as writer:
        for name in plain:
            value = files.read(name)
            writer.write(name, value)
            drop_file_pages(value)
        for name in chosen:
            value = files.read(name)
            module = name.removesuffix("weight")
            for end, part in rounded_parts(value, chosen[name][0]).items():
                writer.write(module + end, part)
            drop_file_pages(value)
    _copy_rest(empty, folder, chosen)


def _copy_rest(empty: Path, folder: ModelFolder, chosen: Chosen) -> None:
    """Tokenizer and configs."""
    for file in {file for pattern in _COPIED for file in folder.path.glob(pattern)}:
        if file.is_file() and not file.name.endswith(".index.json"):
            shutil.copyfile(file, empty / file.name)
    config = json.loads((folder.path / "config.json").read_bytes())
    groups: dict[str, Any] = {}
    for name, (setting, size) in chosen.items():
        scheme = setting.scheme(size)
        group = groups.setdefault(json.dumps(scheme), {"targets": [], "weights": scheme})
        group["targets"].append(name.removesuffix(".weight"))
    formats = {"pack-quantized" if setting.bits < 8 else "int-quantized" for setting, _ in chosen.values()}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{place}": group for place, group in enumerate(groups.values())},
    }  # fmt: skip
    (empty / "config.json").write_text(json.dumps(config, indent=1))


def _linears(folder: Path, files: TensorFiles, setting: Rounding) -> Chosen:
    """The tensors that are weights of linear layers of their own."""
    from memserve.model.loading.skeleton import empty_module
    from memserve.model.loading.stored import name_in_module

    module = empty_module(folder)
    module.tie_weights()  # a head that is the embedding has its name
    parameters = dict(module.named_parameters())
    head = module.get_output_embeddings()
    weights = {id(part.weight): setting for part in module.modules() if isinstance(part, torch.nn.Linear)}
    if head is not None and setting.head_bits == 0:
        weights.pop(id(head.weight), None)
    elif head is not None and setting.head_bits == 8:
        weights[id(head.weight)] = SETTINGS["int8"]
    chosen: Chosen = {}
    for name, entry in files.entries.items():
        parameter = parameters.get(name_in_module(parameters, name))
        way = weights.get(id(parameter))
        if parameter is None or way is None or tuple(parameter.shape) != entry.shape:
            continue
        if (size := way.size_for(entry.shape[-1])) and entry.dtype in FLOATS and name.endswith(".weight"):
            chosen[name] = way, size
    return chosen


def rounded_parts(weight: Tensor, setting: Rounding) -> dict[str, Tensor]:
    """The parts of a weight ``[n, k]`` as compressed-tensors stores them, by the ends of their names."""
    n, k = weight.shape
    size = setting.size_for(k)
    integers = torch.empty((n, k), dtype=torch.uint8)
    scales = torch.empty((n, k // size), dtype=torch.float16)
    zeros = torch.empty((n, k // size), dtype=torch.uint8)
    for rows in row_chunks((n, k)):
        groups = weight[rows].float().view(-1, k // size, size)
        rounded = (_symmetric if setting.symmetric else _asymmetric)(groups, setting.bits)
        integers[rows], scales[rows], zeros[rows] = rounded[0].view(-1, k), rounded[1], rounded[2]
    middle = 1 << setting.bits - 1
    if setting.bits == 8:
        parts = {"weight": (integers.short() - middle).to(torch.int8), "weight_scale": scales}
        return parts if setting.symmetric else parts | {"weight_zero_point": (zeros.short() - middle).to(torch.int8)}
    parts = {
        "weight_packed": packed(integers, setting.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if not setting.symmetric:
        parts["weight_zero_point"] = packed(zeros.t(), setting.bits).t().contiguous()
    return parts


def packed(values: Tensor, bits: int) -> Tensor:
    """Numbers of 2 or 4 bits, uint8 ``[n, m]``, in int32 words ``[n, words]``, the lowest bits first."""
    n, m = values.shape
    padded = torch.nn.functional.pad(values, (0, -m % (_WORD // bits))).view(n, -1, 8 // bits)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (padded << shifts).sum(-1, dtype=torch.uint8).view(torch.int32)


def _symmetric(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers ``[rows, groups, size]``, scales and zero points ``[rows, groups]``; the middle is zero."""
    middle, most = 1 << bits - 1, (1 << bits - 1) - 1
    scales = _scales(groups.abs().amax(-1) / most)
    integers = (groups / scales[..., None]).round_().clamp_(-most - 1, most) + middle
    return integers.to(torch.uint8), scales.half(), torch.full_like(scales, middle, dtype=torch.uint8)


def _asymmetric(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_symmetric`, from the least to the largest: of the ranges that are tried, what errs least."""
    most = (1 << bits) - 1
    least, largest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    error = torch.full_like(least, torch.inf)
    for shrink in _SHRINKS:
        scales = _scales((largest - least) * shrink / most)
        zeros = (-least * shrink / scales).round_().clamp_(0, most)
        integers = (groups / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, most)
        errors = ((integers - zeros[..., None]) * scales[..., None] - groups).double().square().sum(-1).float()
        found = integers.to(torch.uint8), scales.half(), zeros.to(torch.uint8)
        if best is None:
            best, error = found, errors
            continue
        better = errors < error
        error = torch.where(better, errors, error)
        best = (
            torch.where(better[..., None], found[0], best[0]),
            torch.where(better, found[1], best[1]),
            torch.where(better, found[2], best[2]),
        )
    assert best is not None
    return best


def _scales(values: Tensor) -> Tensor:
    """Rounded as they are stored, and none is zero: the least positive one stands for all that are smaller."""
    return values.half().float().clamp(min=2**-24)
