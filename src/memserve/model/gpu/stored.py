"""The weights of a module that stay quantised on a GPU: a module has a number for each output in a weight's place."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memserve.base.units import MIB
from memserve.model.gpu.quantised import DeviceQuantisedLinear
from memserve.model.gpu.weights import DeviceWeight, unpack_weight
from memserve.model.loading.stored import StoredWeights, remember_stored, stored_of
from memserve.model.quantised import StoredLinear

log = logging.getLogger(__name__)

PANEL_BYTES = 32 * MIB
"""Of numbers of a weight that many rows meet at a time: few enough for a cache, and enough for the device's cores."""


class DeviceForm:
    """As :class:`memserve.model.loading.formats.weights.StoredForm`, but that it lies on a device."""

    def __init__(self, weight: DeviceWeight) -> None:
        self._weight = weight
        self.format, self.n, self.k, self.inputs = weight.format, weight.n, weight.k, weight.inputs

    @property
    def shape(self) -> tuple[int, int]:
        """``(n, k)``"""
        return self.n, self.k

    def packed(self) -> Any:
        """A :class:`DeviceWeight`."""
        return self._weight

    def move(self, weight: DeviceWeight) -> None:
        """``weight``, which is equal, has taken the place of this one: as a part of a larger one, say."""
        self._weight = weight

    def forget_packed(self) -> None:
        """Nothing to do: there is no other copy."""


class DeviceWeights(StoredWeights):
    """Weights of a module that lie quantised on a device. The module has tensors of their shapes, of a number for each
    output: their strides tell them from all others, and from themselves transposed."""

    def __init__(self, weights: Sequence[tuple[Tensor, Any]], place: torch.device) -> None:
        """Each weight ``[n, k]`` as the module has it, and its :class:`DeviceForm`."""
        super().__init__(weights)
        #: of all layers, which are computed one after the other
        self._panel = torch.empty(PANEL_BYTES if weights else 0, dtype=torch.uint8, device=place)

    @property
    def rounds_activations(self) -> bool:
        """See :class:`StoredWeights`."""
        return False

    def of(self, value: Tensor) -> Any:
        """See :class:`StoredWeights`."""
        if value.layout is not torch.strided or value.device.type == "meta" or value.stride() != (1, 0):
            return None
        form = self._weights.get(value.data_ptr())
        return form if form is not None and form.shape == value.shape else None

    def stack(self, value: Tensor) -> tuple[Any, ...]:
        """None: see :func:`keep_on_device`."""
        return ()

    def packed_bytes(self, value: Tensor) -> int:
        """See :class:`StoredWeights`."""
        form = self.of(value)
        return 0 if form is None else int(form.packed().nbytes)

    def make_layer(
        self, forms: Sequence[Any], bias: Tensor | None = None, *, dtype: torch.dtype, wide: bool = False, bits: int = 0
    ) -> StoredLinear:
        """See :class:`StoredWeights`. Activations are not rounded, whatever ``bits`` are. Weights that are joined are
        parts of the joined one afterwards, so that a model is held once."""
        if len(forms) > 1:
            joined, first = DeviceWeight.joined([form.packed() for form in forms]), 0
            for form in forms:
                form.move(joined.cut(first, form.n))
                first += form.n
        else:
            joined = forms[0].packed()
        return DeviceQuantisedLinear(replace(joined, dtype=dtype), bias, self._panel, wide=wide)


def stand_in(weight: DeviceWeight) -> Tensor:
    """What a module has in the place of ``weight``."""
    return torch.zeros((weight.n, 1), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def keep_on_device(module: Any, place: torch.device) -> None:
    """Move ``module`` to ``place``, a weight after the other; those that are stored quantised stay so, but experts in
    stacks, which transformers multiplies there, become numbers."""
    stored, weights = stored_of(module), []
    stack_count = 0
    for parameter in module.parameters():
        value = parameter.detach()
        form = stored.of(value)
        if form is not None:
            weight = unpack_weight(form.packed(), place, value.dtype)
            form.forget_packed()
            parameter.data = stand_in(weight)
            weights.append((parameter.data, DeviceForm(weight)))
        elif stored.stack(value):
            with stored.computing_as_stored():
                parameter.data = value.to(place)
            stack_count += 1
    if stack_count:
        log.info("%d stacks of experts are dequantised: no kernel of a GPU takes them", stack_count)
    module.to(place)
    remember_stored(module, DeviceWeights(weights, place))
