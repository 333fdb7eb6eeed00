"""A quantised checkpoint as the tensors of the model that it was made from.

transformers reads a folder of safetensors file by file and name by name. Through this it sees the weights under their
usual names, and gets their numbers when it takes them, one at a time: neither its own quantisers nor their packages are
used, and the module is that of the architecture.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memserve import _kernels
from memserve.base.errors import UserError
from memserve.model.loading.formats.compressed import compressed_tensors
from memserve.model.loading.formats.files import BYTES, FLOATS, TensorFiles
from memserve.model.loading.formats.floats import fp8_tensors, mxfp4_tensors, torchao_tensors
from memserve.model.loading.formats.headers import errors_named, is_beside, quantisation_of
from memserve.model.loading.formats.integers import awq_tensors, gptq_tensors, unserved
from memserve.model.loading.formats.samples import (
    ROWS_OF_PARTS,
    has_sample,
    sampled_stack,
    sampled_weight,
    stack_has_sample,
)
from memserve.model.loading.formats.weights import CheckpointTensor, Mxfp4Tensor, StoredForm, values_of
from memserve.model.loading.pages import reserve_weight

Reader = Callable[[dict[str, Any], TensorFiles], list[CheckpointTensor]]

READERS: dict[str, Reader] = {
    "compressed-tensors": compressed_tensors,
    "gptq": gptq_tensors,
    "awq": awq_tensors,
    "fp8": fp8_tensors,
    "fbgemm_fp8": fp8_tensors,
    "mxfp4": mxfp4_tensors,
    "torchao": torchao_tensors,
}
"""By ``quant_method``."""

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
"""Weights of which a module has stacks."""

_OF_ACTIVATIONS = re.compile(
    r"(^|[._])(input|output|activation|k|v|q)_(scale|zero_point|global_scale|scale_ub|amax)$|_weight_act_quant_"
)
"""Tensors that say how activations and KV are rounded elsewhere."""


class QuantisedCheckpoint:
    """The tensors of a folder whose weights are quantised."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any]) -> None:
        """``config``: its ``quantization_config``. Raises :class:`UserError` for what is not understood, and for parts
        of weights that do not fit each other, as far as that shows before they are read."""
        method = str(config.get("quant_method") or "").replace("_", "-") or "none"
        method = method if method in READERS else method.replace("-", "_")
        if method not in READERS:
            raise unserved("quant_method", config, tuple(READERS))
        self.method = method
        self._files = TensorFiles(folder, name)
        tensors = READERS[method](config, self._files)
        if not tensors:
            raise self._files.refused(f"quantization_config says {method}, and no weight is quantised")
        self.tensors = {tensor.name: tensor for tensor in tensors}
        parts = {part for tensor in tensors for part in tensor.parts}
        self._plain = {
            key: entry
            for key, entry in self._files.entries.items()
            if key not in parts and not _OF_ACTIVATIONS.search(key) and not key.endswith(".weight_shape")
        }
        self._check_plain()
        self._forms: dict[str, StoredForm | str] = {}
        self._stacks: dict[str, tuple[StoredForm, ...]] = {}
        self._puts_off = False
        self.put_off_names: set[str] = set()
        """Weights of which only a sample was made numbers."""
        self._failure: UserError | None = None
        self._lock = threading.Lock()

    def _check_plain(self) -> None:
        for key, entry in self._plain.items():
            if key in self.tensors:
                raise self._files.refused(f"{key} is there twice, quantised and not")
            if entry.dtype not in FLOATS and key.endswith("weight") and not is_beside(key):
                raise self._files.refused(
                    f"{key} is {entry.dtype}, and nothing says what it means (its scale is missing)"
                )

    @property
    def sizes(self) -> dict[str, int]:
        """How many values each tensor of the model has."""
        plain = {key: values_of(entry.shape) for key, entry in self._plain.items()}
        return plain | {name: values_of(tensor.shape) for name, tensor in self.tensors.items()}

    def names_in(self, file: Path) -> list[str]:
        """Names of tensors of the model, whose values, or the largest parts of them, lie in ``file``."""
        entries = self._files.entries
        plain = [key for key, entry in self._plain.items() if entry.file == file]
        return plain + [name for name, tensor in self.tensors.items() if entries[tensor.parts[0]].file == file]

    def form(self, name: str) -> StoredForm | str:
        """How the kernels compute with the weight ``name``, or why they cannot."""
        if name not in self._forms:
            self._forms[name] = self.tensors[name].form()
        return self._forms[name]

    def stack(self, name: str) -> tuple[StoredForm, ...]:
        """How the kernels compute with each expert of a stack ``name``; none: it is none."""
        if name not in self._stacks:
            tensor = self.tensors[name]
            self._stacks[name] = tensor.experts() if isinstance(tensor, Mxfp4Tensor) else ()
        return self._stacks[name]

    def put_off(self) -> None:
        """From now on weights that the kernels can compute with as they are stored have zeros for numbers, but for a
        sample of their rows, and take no memory (:mod:`memserve.model.loading.formats.samples`); stacks that a module
        makes of such experts take some until :meth:`without_zeros`."""
        self._puts_off = True

    def is_the_same(self, name: str, value: Tensor) -> bool:
        """Whether ``value``, a weight of a module, is ``name``, or what :meth:`numbers` gave for it. Of one that the
        kernels cannot compute with it is not known."""
        if stack := self.stack(name):
            return stack_has_sample(stack, value)
        form = self.form(name)
        return not isinstance(form, str) and has_sample(form, value)

    def resident_bytes(self, value_bytes: int) -> tuple[int, int]:
        """Of all weights that take part in text once those are put off that can be, and of the largest as numbers."""
        total = largest = 0
        for name, size in self.sizes.items():
            if is_beside(name):
                continue
            is_stored = name in self.tensors and self._may_put_off(name)
            parts = self.tensors[name].parts if is_stored else ()
            entries = [self._files.entries[part] for part in parts]
            stored = sum(values_of(entry.shape) * BYTES.get(entry.dtype, 1) for entry in entries)
            total += stored if is_stored else size * value_bytes
            largest = max(largest, 0 if is_stored else size * value_bytes)
        return total, largest

    def _may_put_off(self, name: str) -> bool:
        if self.stack(name):
            return True
        form, expert = self.form(name), EXPERT.fullmatch(name)
        # of an expert what comes first is joined with what comes next
        return not isinstance(form, str) and (expert is None or form.n % _kernels.QUANTISED_STRIP == 0)

    def without_zeros(self, value: Tensor) -> Tensor | None:
        """A stack ``value`` of weights once more, whose zeros take no memory; None: it is no stack, or has numbers in
        more rows than weights that were put off have."""
        if not self.put_off_names or value.dim() != 3 or value.device.type != "cpu":
            return None
        rows = torch.stack([matrix.any(-1) for matrix in value])
        if int(rows.sum(-1).max()) > ROWS_OF_PARTS:
            return None
        sparse = reserve_weight(value.shape, value.dtype)
        sparse[rows] = value[rows]
        return sparse

    def numbers(self, name: str, dtype: torch.dtype) -> Tensor:
        """The weight ``name``, dequantised; one at a time. An error is kept for :meth:`check`: transformers, which
        calls this, lists errors and goes on."""
        with self._lock:
            try:
                sample = self._sample(name, dtype) if self._puts_off else None
                return self.tensors[name].numbers(dtype) if sample is None else sample
            except UserError as error:
                self._failure = self._failure or error
                raise

    def _sample(self, name: str, dtype: torch.dtype) -> Tensor | None:
        if not self._may_put_off(name):
            return None
        stack, form = self.stack(name), self.form(name)
        try:
            value = sampled_stack(stack, dtype) if isinstance(form, str) else sampled_weight(form, dtype)
        except (UserError, KeyError):  # its numbers have the error, or the kernels do not take its size
            self._forms[name], self._stacks[name] = "the kernels do not take its size", ()
            return None
        self.put_off_names.add(name)
        return value

    def check(self) -> None:
        """Raise the :class:`UserError` that a weight has met."""
        if self._failure is not None:
            raise self._failure


def quantised_checkpoint(folder: Path, name: str) -> QuantisedCheckpoint | None:
    """The quantised checkpoint in ``folder``; None: its weights are numbers. ``name``: of the model, for errors. Raises
    :class:`UserError`."""
    config = quantisation_of(folder, name)
    if config is None:
        return None
    hint = f"restore {folder / 'config.json'} and the weights beside it: download them again"
    with errors_named(f"cannot read how {name} is quantised", hint):
        return QuantisedCheckpoint(folder, name, config)


def forget_quantisation(config: Any) -> None:
    """Take what says so out of a config of transformers: the module will have numbers."""
    for part in (config, config.get_text_config()):
        for field in ("quantization_config", "compression_config"):
            if hasattr(part, field):
                delattr(part, field)
