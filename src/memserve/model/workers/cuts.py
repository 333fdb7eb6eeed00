"""Cuts weights for one worker, those that stay quantised as well: at any output, and where blocks of inputs begin.

A weight that stays as it is stored has zeros for numbers (:mod:`memserve.model.loading.stored`). What is cut out of it
has such zeros again, and lies as it did: bytes of packed weights in another place, no number is made. Inputs are cut at
the borders of the format's blocks alone, and not where they have an order of their own: then what is cut becomes
numbers, and the log says why.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memserve import _kernels
from memserve.base.kv_layout import COLUMN_UNIT
from memserve.model.loading.formats.weights import PackedOnce, StoredForm
from memserve.model.loading.pages import reserve_weight
from memserve.model.loading.stored import StoredWeights, stored_of
from memserve.model.quantised import QuantisedLinear, QuantisedWeight

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CutWeight(PackedOnce):
    """Some ``outputs``, and some blocks of inputs, of a weight that is stored ``whole``; both int64."""

    whole: StoredForm
    outputs: Tensor
    blocks: Tensor | None = None
    """None: all inputs."""
    _packs: list[QuantisedWeight] = field(default_factory=list, compare=False, repr=False)

    @property
    def format(self) -> str:
        """As of the whole."""
        return self.whole.format

    @property
    def inputs(self) -> Tensor | None:
        """See :class:`QuantisedWeight`."""
        return self.whole.inputs

    @property
    def n(self) -> int:
        """Outputs."""
        return len(self.outputs)

    @property
    def k(self) -> int:
        """Inputs."""
        return self.whole.k if self.blocks is None else len(self.blocks) * _kernels.quantised_block_inputs(self.format)

    def pack_weight(self) -> QuantisedWeight:
        """See :class:`PackedOnce`. The whole is packed meanwhile."""
        return self._cut_out(self.outputs)

    def sampled(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`StoredForm`."""
        return QuantisedLinear([self._cut_out(self.outputs[outputs])]).dequantised(dtype)

    def _cut_out(self, outputs: Tensor) -> QuantisedWeight:
        piece = self.whole.packed().cut(outputs, self.blocks)
        self.whole.forget_packed()
        return piece


class WeightCuts:
    """Cuts weights of one module, whose stored forms follow."""

    def __init__(self, module: Any) -> None:
        self._stored: StoredWeights = stored_of(module)
        self._reasons: Counter[str] = Counter()
        blocks = {_kernels.quantised_block_inputs(form.format) for form in self._stored.forms()}
        #: columns are best cut at multiples of this
        self.column_unit = max([COLUMN_UNIT, *blocks])

    def take(self, weight: Tensor, dim: int, places: Tensor) -> Tensor:
        """``places``, int64, of dimension ``dim`` of ``weight``, in memory of their own."""
        forms = self._stored.stack(weight)
        form = self._stored.of(weight)
        if not forms and form is None:
            return weight.index_select(dim, places.to(weight.device))
        is_turned = self._stored.is_turned(weight)
        of_outputs = dim == weight.dim() - (1 if is_turned else 2)
        cut = [_cut_form(each, places, of_outputs=of_outputs) for each in (forms or (form,)) if each is not None]
        value = self._register(weight, [each for each in cut if isinstance(each, CutWeight)], cut, is_turned)
        if value is None:
            self._reasons[next(each for each in cut if isinstance(each, str))] += len(cut)
            value = _numbers(forms or (form,), weight, dim, places, is_turned)
        self._stored.forget(weight)
        return value

    def take_rows(self, weight: Tensor, first: int, count: int) -> Tensor:
        """``count`` of the first dimension of ``weight``, from ``first`` on."""
        return self.take(weight, 0, torch.arange(first, first + count))

    def take_columns(self, weight: Tensor, first: int, count: int) -> Tensor:
        """As :meth:`take_rows`, of the second dimension."""
        return self.take(weight, 1, torch.arange(first, first + count))

    def finish(self, module: Any) -> None:
        """Forget weights that ``module`` has no more; say what became numbers, and why."""
        self._stored.keep_only(parameter.detach() for parameter in module.parameters())
        if self._reasons:
            why = "; ".join(f"{count}: {reason}" for reason, count in self._reasons.most_common(4))
            log.info("%d weights are computed with as numbers by this worker (%s)", self._reasons.total(), why)

    def _register(
        self, weight: Tensor, forms: list[CutWeight], cut: Sequence[object], is_turned: bool
    ) -> Tensor | None:
        """The zeros of what is cut out; None: some of it becomes numbers."""
        if len(forms) < len(cut):
            return None
        n, k = forms[0].shape
        if weight.dim() == 2:
            value = reserve_weight((n, k), weight.dtype)
            self._stored.add(value, forms[0])
            return value
        value = reserve_weight((len(forms), *((k, n) if is_turned else (n, k))), weight.dtype)
        self._stored.add_stack(value, forms, is_turned=is_turned)
        return value


def _cut_form(form: StoredForm, places: Tensor, *, of_outputs: bool) -> CutWeight | str:
    """Some outputs, or inputs, of ``form``; or why that cannot be."""
    if of_outputs:
        return CutWeight(form, places)
    size = _kernels.quantised_block_inputs(form.format)
    if form.inputs is not None:
        return "inputs in an order of their own (g_idx) are not cut"
    blocks = places[::size] // size
    if len(places) % size or not torch.equal(places, (blocks[:, None] * size + torch.arange(size)).flatten()):
        return f"the worker's inputs are no whole blocks of {size}"
    return CutWeight(form, torch.arange(form.n), blocks)


def _numbers(forms: Sequence[StoredForm | None], weight: Tensor, dim: int, places: Tensor, is_turned: bool) -> Tensor:
    """What is cut out as numbers; one weight of a stack at a time."""
    shape = list(weight.shape)
    shape[dim] = len(places)
    value = torch.empty(shape, dtype=weight.dtype)
    slots = list(value) if weight.dim() == 3 else [value]
    for slot, form in zip(slots, forms, strict=True):
        if form is not None:
            whole = QuantisedLinear([form.packed()]).dequantised(weight.dtype)
            slot.copy_((whole.t() if is_turned else whole).index_select(dim - weight.dim() + 2, places))
            form.forget_packed()
    return value
