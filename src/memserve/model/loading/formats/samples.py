"""A few rows of a weight: enough to know it again in a module, and to leave the rest of its numbers out.

Names and orders of weights change between a checkpoint and a module. A weight of the module counts as one of the
checkpoint only if these rows of both are equal to the bit. So where the kernels compute with a weight as it is stored,
the module is loaded with zeros but for these rows: no more of it is ever made numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memserve.base.errors import UserError
from memserve.model.loading.formats.weights import StoredForm
from memserve.model.loading.pages import reserve_weight

_ROWS = 24
ROWS_OF_PARTS = 2 * _ROWS
"""Of a weight that is joined of two."""


def sampled_weight(form: StoredForm, dtype: torch.dtype) -> Tensor:
    """Zeros ``[n, k]`` that take no memory, but for some rows, which are those of ``form``."""
    value = reserve_weight(form.shape, dtype)
    outputs = _places(form.n)
    value[outputs] = form.sampled(outputs, dtype)
    return value


def has_sample(form: StoredForm, value: Tensor) -> bool:
    """Whether the rows of ``value``, a weight of a module, are those of ``form``."""
    if value.shape != form.shape or value.device.type != "cpu":
        return False
    outputs = _places(form.n)
    try:
        return torch.equal(form.sampled(outputs, value.dtype), value[outputs])
    except (UserError, KeyError):  # a size or dtype that the kernels do not take
        return False


def sampled_stack(forms: Sequence[StoredForm], dtype: torch.dtype) -> Tensor:
    """As :func:`sampled_weight`, of a stack that is turned, ``[experts, k, n]``: some rows of two experts."""
    n, k = forms[0].shape
    value = reserve_weight((len(forms), k, n), dtype)
    for expert in _two_of(forms):
        value[expert, _places(k)] = _rows_of_turned(forms[expert], dtype)
    return value


def stack_has_sample(forms: Sequence[StoredForm], value: Tensor) -> bool:
    """As :func:`has_sample`, of such a stack."""
    n, k = forms[0].shape
    if value.shape != (len(forms), k, n) or value.device.type != "cpu":
        return False
    places = _places(k)
    return all(torch.equal(_rows_of_turned(forms[i], value.dtype), value[i, places]) for i in _two_of(forms))


def _places(count: int) -> Tensor:
    return torch.linspace(0, count - 1, min(_ROWS, count)).long()


def _two_of(forms: Sequence[StoredForm]) -> list[int]:
    return sorted({0, len(forms) - 1})


def _rows_of_turned(form: StoredForm, dtype: torch.dtype) -> Tensor:
    return form.sampled(torch.arange(form.n), dtype)[:, _places(form.k)].t()
