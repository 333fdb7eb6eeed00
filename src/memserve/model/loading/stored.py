"""Which weights of a module lie quantised in the file that it comes from: they are computed with as they are there.

A GGUF file is converted to numbers, and a module is loaded, probed and compared with them. When its linears are packed,
those that the file holds quantised are packed from the file instead, tensor by tensor. A tensor counts as a weight's
only if a sample of its rows, as numbers, is that of the weight to the bit: whatever else a conversion does with names
and orders, no other weight is taken for it.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memserve import _kernels
from memserve.base.errors import UserError, check
from memserve.base.types import FINE_BITS
from memserve.model.loading.cache import STORED
from memserve.model.loading.conversion import tensor_names
from memserve.model.loading.formats.checkpoint import EXPERT, QuantisedCheckpoint
from memserve.model.loading.formats.headers import gguf_reader
from memserve.model.loading.formats.samples import has_sample
from memserve.model.loading.formats.weights import PackedOnce, StoredForm
from memserve.model.loading.pages import drop_file_pages, reserve_weight
from memserve.model.quantised import (
    FORMATS,
    QuantisedLinear,
    QuantisedWeight,
    StoredLinear,
    can_follow,
    mark_quantised,
    rounds_activations,
)

log = logging.getLogger(__name__)

_ATTRIBUTE = "memserve_stored"


@dataclass(frozen=True, slots=True)
class StoredWeight(PackedOnce):
    """A tensor of a GGUF file: ``blocks`` uint8 ``[n, bytes of a row]``, mapped; ``order``: see
    :meth:`QuantisedWeight.of_blocks`."""

    format: str
    k: int
    blocks: Tensor
    order: Tensor | None = None
    inputs: Tensor | None = None
    #: ``blocks`` lie in a map of their file: pages of them may be dropped
    is_mapped: bool = False
    _packs: list[QuantisedWeight] = field(default_factory=list, compare=False, repr=False)

    @property
    def n(self) -> int:
        """Outputs."""
        return len(self.blocks)

    def pack_weight(self) -> QuantisedWeight:
        """See :class:`PackedOnce`."""
        weight = QuantisedWeight.of_blocks(self.format, self.blocks, self.k, self.order)
        if self.is_mapped:
            drop_file_pages(self.blocks)
        return weight

    def sampled(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights of some outputs as numbers."""
        rows = outputs if self.order is None else self.order[outputs]
        return QuantisedLinear([QuantisedWeight.of_blocks(self.format, self.blocks[rows], self.k)]).dequantised(dtype)


@dataclass(frozen=True, slots=True)
class JoinedWeight(PackedOnce):
    """Weights that the module has as one, ``parts`` one behind the other, each of which :func:`can_follow` the one
    before."""

    parts: tuple[StoredForm, ...]
    _packs: list[QuantisedWeight] = field(default_factory=list, compare=False, repr=False)

    @property
    def inputs(self) -> Tensor | None:
        """See :class:`QuantisedWeight`."""
        return self.parts[0].inputs

    @property
    def format(self) -> str:
        """Of all parts."""
        return self.parts[0].format

    @property
    def n(self) -> int:
        """Outputs."""
        return sum(part.n for part in self.parts)

    @property
    def k(self) -> int:
        """Inputs."""
        return self.parts[0].k

    def pack_weight(self) -> QuantisedWeight:
        """See :class:`PackedOnce`."""
        packed = torch.cat([part.packed().packed for part in self.parts])
        for part in self.parts:
            part.forget_packed()
        return QuantisedWeight(self.format, self.n, self.k, packed, self.inputs)

    def sampled(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights of some outputs as numbers."""
        numbers = QuantisedLinear([self.packed()]).rows(outputs, dtype)
        self.forget_packed()
        return numbers


def joined(parts: Sequence[StoredForm]) -> StoredForm | None:
    """``parts`` as one weight; None: the kernels cannot have them as one."""
    if len(parts) == 1:
        return parts[0]
    return JoinedWeight(tuple(parts)) if all(can_follow(*pair) for pair in pairwise(parts)) else None


class StoredWeights:
    """The weights of a module that are stored quantised, by the addresses of their numbers, which the module has."""

    def __init__(
        self,
        weights: Sequence[tuple[Tensor, StoredForm]] = (),
        stacks: Sequence[tuple[Tensor, Sequence[StoredForm]]] = (),
        turned: Sequence[tuple[Tensor, Sequence[StoredForm]]] = (),
    ) -> None:
        """Each weight ``[n, k]`` as the module has it, and as its file has it; each stack of them ``[experts, n, k]``,
        contiguous; and stacks that the module has ``turned``, ``[experts, k, n]``."""
        self._weights: dict[int, StoredForm] = {}
        self._stacks: dict[int, tuple[StoredForm, ...]] = {}
        self._turned: set[int] = set()
        for value, weight in weights:
            self.add(value, weight)
        for stack, forms in stacks:
            self.add_stack(stack, forms)
        for stack, forms in turned:
            self.add_stack(stack, forms, is_turned=True)
        #: of layers that round activations: see :mod:`memserve.model.loading.precision`
        self.activation_bits = FINE_BITS

    def __len__(self) -> int:
        return len(self._weights)

    def of(self, value: Tensor) -> StoredForm | None:
        """The stored form of ``value``, a weight of the module; None: it has none, or is a part of one."""
        is_plain = value.device.type == "cpu" and value.layout is torch.strided  # others have no address
        weight = self._weights.get(value.data_ptr()) if is_plain else None
        if weight is None or value.shape != weight.shape:
            return None
        as_kept = value.t() if self.is_turned(value) else value
        return weight if as_kept.is_contiguous() else None

    def is_turned(self, value: Tensor) -> bool:
        """Whether the module has ``value``, an expert or a stack of them, turned."""
        return value.data_ptr() in self._turned

    def stack(self, value: Tensor) -> tuple[StoredForm, ...]:
        """The stored forms of ``value``, a stack of weights; none: it has none."""
        return self._stacks.get(value.data_ptr(), ()) if value.dim() == 3 and value.device.type == "cpu" else ()

    @property
    def rounds_activations(self) -> bool:
        """Whether activations become integers before they meet some of these weights."""
        return any(rounds_activations(form.format) for form in self.forms())

    def forms(self) -> Iterator[StoredForm]:
        """Of all weights."""
        yield from self._weights.values()

    def add(self, value: Tensor, form: StoredForm) -> None:
        """``value`` is a weight of the module that is stored so."""
        self._weights[value.data_ptr()] = form

    def add_stack(self, stack: Tensor, forms: Sequence[StoredForm], *, is_turned: bool = False) -> None:
        """``stack`` are weights of the module that are stored so."""
        self._stacks[stack.data_ptr()] = tuple(forms)
        for value, form in zip(stack, forms, strict=True):
            self.add(value, form)
            if is_turned:
                self._turned.add(value.data_ptr())

    def forget(self, value: Tensor) -> StoredForm | None:
        """From now on ``value``, a weight of the module, or a stack of them, is computed with as it is; what the stored
        form of a weight was."""
        parts = value if self.stack(value) else (value,)
        self._stacks.pop(value.data_ptr(), None)
        form = self.of(value)
        for part in parts:
            self._weights.pop(part.data_ptr(), None)
            self._turned.discard(part.data_ptr())
        return form

    def keep_only(self, values: Iterable[Tensor]) -> None:
        """Forget all but ``values``, weights of the module and stacks of them."""
        places = {part.data_ptr() for value in values for part in (value if self.stack(value) else (value,))}
        self._weights = {place: form for place, form in self._weights.items() if place in places}
        self._stacks = {place: forms for place, forms in self._stacks.items() if place in places}
        self._turned &= places

    def has(self, value: Tensor) -> bool:
        """Whether ``value``, a parameter of the module, is stored otherwise."""
        return self.of(value) is not None or bool(self.stack(value))

    def packed_bytes(self, value: Tensor) -> int:
        """Of ``value``, a weight or a stack of them, in the layout of the kernels; 0: it is not stored otherwise."""
        form = self.of(value)
        forms = self.stack(value) if form is None else (form,)
        return sum(_kernels.quantised_packed_bytes(each.format, each.n, each.k) for each in forms)

    def parts(self, values: Sequence[Tensor]) -> list[int]:
        """How many of ``values``, weights of linears with one input, become a layer: the first so many, the next ..."""
        counts: list[int] = []
        last: StoredForm | None = None
        for place, value in enumerate(values):
            weight = self.of(value)
            alike = can_follow(last, weight) if last is not None and weight is not None else last is weight
            if place and alike:
                counts[-1] += 1
            else:
                counts.append(1)
            last = weight
        return counts

    def layer(self, values: Sequence[Tensor], biases: Sequence[Tensor] | None, *, wide: bool) -> StoredLinear | None:
        """One layer of weights that can be joined; None: they are not stored quantised."""
        weights = [weight for value in values if (weight := self.of(value)) is not None]
        if len(weights) < len(values):
            return None
        bias = None if biases is None else torch.cat(list(biases))
        layer = self.make_layer(weights, bias, dtype=values[0].dtype, wide=wide, bits=self.activation_bits)
        layer.source = values[0].data_ptr() if len(values) == 1 else 0
        for weight in weights:
            weight.forget_packed()
        return layer

    def make_layer(
        self,
        forms: Sequence[StoredForm],
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        wide: bool = False,
        bits: int = 0,
    ) -> StoredLinear:
        """A layer of weights that can be joined. ``dtype``: of activations; ``bits``: to which they are rounded (0: not
        at all); ``wide``: see :class:`QuantisedLinear`."""
        rounding: dict[str, Any] = {"activation_bits": bits} if bits else {"exact": True}
        return QuantisedLinear([form.packed() for form in forms], bias, wide=wide, **rounding)

    @contextmanager
    def computing_as_stored(
        self,
        wide: Tensor | None = None,
        *,
        exact: bool = True,
        activation_bits: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[None]:
        """Inside, a module whose weights these are computes with them, whatever its parameters hold. ``wide``: that of
        the output head, if logits are to be float32; ``exact``, ``activation_bits``: see :class:`QuantisedLinear`
        (None: the bits of this object); ``dtype``: of embeddings, if it is not that of the parameters."""
        if not self._weights:
            yield
            return
        bits = self.activation_bits if activation_bits is None else activation_bits
        with _ComputesAsStored(self, wide, 0 if exact else bits, dtype):
            yield


NOT_STORED = StoredWeights()
"""Of a module whose weights are numbers."""


def remember_stored(module: Any, weights: StoredWeights) -> None:
    """From now on :func:`stored_of` knows the stored weights of ``module``."""
    setattr(module, _ATTRIBUTE, weights)
    if len(weights):
        mark_quantised(module)


def stored_of(module: Any) -> StoredWeights:
    """The stored weights of ``module``."""
    stored = getattr(module, _ATTRIBUTE, NOT_STORED)
    return stored if isinstance(stored, StoredWeights) else NOT_STORED


def number_weights(module: Any, linears: Collection[int]) -> None:
    """Give the ``linears`` of ``module``, by their ids, the numbers of their weights: layers that use a weight without
    calling its linear need numbers, and would make them anew in each step."""
    stored, names = stored_of(module), []
    for name, part in module.named_modules():
        form = stored.forget(part.weight.detach()) if id(part) in linears else None
        if form is not None:
            dtype = part.weight.dtype
            part.weight.data = stored.make_layer([form], dtype=dtype).dequantised(dtype)
            form.forget_packed()
            names.append(name)
    if names:
        log.info("%d weights are computed with as numbers, which their layers need (%s)", len(names), names[0])


def reserve_stored(module: Any, folder: Path, path: Path) -> StoredWeights:
    """The weights of ``module``, loaded from a ``folder`` that holds all but the quantised matrices of the GGUF file
    ``path`` (:data:`memserve.model.loading.sources.STORED`). The module has zeros in their place, which take no memory:
    it computes within :meth:`StoredWeights.computing_as_stored`. Raises :class:`UserError` for a file that has
    changed."""
    description = json.loads((folder / STORED).read_text())
    orders = [torch.tensor(order) for order in description["orders"]]
    size = path.stat().st_size
    mapped = torch.from_file(str(path), size=size, dtype=torch.uint8)
    weights = []
    for name, (format, n, k, offset, order) in description["weights"].items():
        row_bytes = _kernels.quantised_file_bytes(format, 1, k)
        if offset + n * row_bytes > size:
            raise UserError(f"{path.name} ends before its weights do", hint="download it again")
        blocks = mapped[offset : offset + n * row_bytes].view(n, row_bytes)
        weight = StoredWeight(format, k, blocks, None if order is None else orders[order], is_mapped=True)
        parameter = module.get_parameter(name)
        parameter.data = reserve_weight(parameter.shape, parameter.dtype)
        weights.append((parameter.data, weight))
    stacks = []
    for name, (experts, parts) in description.get("stacks", {}).items():
        parameter = module.get_parameter(name)
        parameter.data = reserve_weight(parameter.shape, parameter.dtype)
        pieces = [list(_stacked_weights(mapped, experts, *part)) for part in parts]
        forms = [joined(piece) for piece in zip(*pieces, strict=True)]
        stacks.append((parameter.data, [form for form in forms if form is not None]))
        check(len(stacks[-1][1]) == experts, "what is described can be joined")
    return StoredWeights(weights, stacks)


def _stacked_weights(mapped: Tensor, experts: int, format: str, n: int, k: int, offset: int) -> Iterator[StoredWeight]:
    """The weights ``[n, k]`` of a stack that begins at byte ``offset`` of the file. Raises :class:`UserError`."""
    row_bytes = _kernels.quantised_file_bytes(format, 1, k)
    if offset + experts * n * row_bytes > len(mapped):
        raise UserError("the file ends before its weights do", hint="download it again")
    for first in range(offset, offset + experts * n * row_bytes, n * row_bytes):
        yield StoredWeight(format, k, mapped[first : first + n * row_bytes].view(n, row_bytes), is_mapped=True)


class _ComputesAsStored(TorchFunctionMode):
    """Within it, functions that are given the zeros of a weight compute with the weight."""

    def __init__(self, weights: StoredWeights, wide: Tensor | None, bits: int, dtype: torch.dtype | None) -> None:
        """``bits``: of activations; 0: exact."""
        super().__init__()
        self._weights, self._wide, self._bits, self._dtype = weights, wide, bits, dtype

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if name == "__getitem__" and isinstance(args[1], int):  # a weight of a stack is a part of it
            return function(*args)
        if name in _READS_NO_NUMBERS:
            result = function(*args, **named)
            is_turned = isinstance(result, Tensor) and self._weights.of(result.detach()) is None  # as by weight.T
            return function(*map(self._numbers, args), **named) if is_turned else result
        if function is torch.nn.functional.linear:
            return self._linear(*args, **named)
        if function is torch.nn.functional.embedding:
            return self._embedding(*args, **named)
        return function(*map(self._numbers, args), **{name: self._numbers(value) for name, value in named.items()})

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        stored = self._weights.of(weight.detach())
        if stored is None:
            return torch.nn.functional.linear(self._numbers(input), self._numbers(weight), bias)
        is_wide = self._wide is not None and weight.data_ptr() == self._wide.data_ptr()
        layer = self._weights.make_layer([stored], bias, dtype=input.dtype, wide=is_wide, bits=self._bits)
        return layer(self._numbers(input))

    def _embedding(self, input: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        stored = self._weights.of(weight.detach())
        if stored is None:
            return torch.nn.functional.embedding(input, self._numbers(weight), *rest, **named)
        dtype = self._dtype or weight.dtype
        return self._weights.make_layer([stored], dtype=dtype).rows(input, dtype)

    def _numbers(self, value: Any) -> Any:
        """``value``, or the numbers of a weight that it stands for: what is done with them is not known. In a sequence:
        of each."""
        if type(value) in (list, tuple):
            return type(value)(map(self._numbers, value))
        if not isinstance(value, Tensor) or value.dim() not in (2, 3):
            return value
        dtype = self._dtype or value.dtype
        if forms := self._weights.stack(value.detach()):
            numbers = torch.stack([self._dequantised(form, dtype) for form in forms])
            return numbers.transpose(1, 2).contiguous() if self._weights.is_turned(value) else numbers
        stored = self._weights.of(value.detach())
        return value if stored is None else self._dequantised(stored, dtype)

    def _dequantised(self, stored: StoredForm, dtype: torch.dtype) -> Tensor:
        return self._weights.make_layer([stored], dtype=dtype).dequantised(dtype)


_READS_NO_NUMBERS = ("__get__", "__set__", "size", "dim", "stride", "numel", "element_size", "data_ptr", "detach",
                     "is_contiguous", "is_floating_point", "untyped_storage")  # fmt: skip
"""Names of torch's functions that tell of a tensor what its numbers do not change."""


def stored_in_file(module: Any, path: Path) -> StoredWeights:
    """The weights of ``module``, loaded from a conversion of the GGUF file ``path``, that are quantised there."""
    weights = []
    for name, stored in _tensors(module, path):
        value = module.get_parameter(name).detach()
        match = next((order for order in _orders(module, stored) if has_sample(order, value)), None)
        if match is None:
            log.info("%s is computed with as numbers: its rows in %s are others", name, path.name)
        else:
            weights.append((value, match))
    return StoredWeights(weights)


def stored_in_checkpoint(module: Any, checkpoint: QuantisedCheckpoint) -> StoredWeights | None:
    """The weights of ``module``, loaded from ``checkpoint``, that the kernels can compute with as they are there; of
    those whose numbers were put off (:meth:`QuantisedCheckpoint.put_off`), the module has zeros that take no memory.
    The others are logged in a line: how many, and why. None: numbers were put off of a weight that is not in the
    module as it is in the checkpoint; it is to be loaded again, with all of them."""
    parameters = dict(module.named_parameters())
    linears = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Linear)}
    weights: list[tuple[Tensor, StoredForm]] = []
    reasons: Counter[str] = Counter()
    turned = _turned_stacks(parameters, checkpoint)
    stacks, of_stacks = _joined_stacks(parameters, checkpoint)
    of_stacks |= turned.keys()
    for name, tensor in checkpoint.tensors.items():
        if name in of_stacks:
            continue
        parameter, is_put_off = parameters.get(name_in_module(parameters, name)), name in checkpoint.put_off_names
        is_known = parameter is not None and checkpoint.is_the_same(name, parameter.detach())
        form = checkpoint.form(name) if id(parameter) in linears else "they are of no linear layer of their own"
        if is_known and not isinstance(form, str):
            weights.append((_values_of(parameter, is_put_off), form))
        elif parameter is not None and is_known and is_put_off:
            parameter.data = tensor.numbers(parameter.dtype)
        elif is_put_off:
            return None
        else:
            reasons[form if isinstance(form, str) else "the module has them in another order"] += 1
    if reasons:
        why = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common(4))
        log.info("%d weights are computed with as numbers (%s)", sum(reasons.values()), why)
    return StoredWeights(weights, stacks, list(turned.values()))


def _values_of(parameter: Any, is_put_off: bool) -> Tensor:
    """The values of ``parameter``, which are zeros from now on if its numbers were put off."""
    if is_put_off:
        parameter.data = reserve_weight(parameter.shape, parameter.dtype)
    values: Tensor = parameter.detach()
    return values


_PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}


def _turned_stacks(
    parameters: Mapping[str, Any], checkpoint: QuantisedCheckpoint
) -> dict[str, tuple[Tensor, Sequence[StoredForm]]]:
    """Stacks of experts that a checkpoint has in one tensor."""
    found: dict[str, tuple[Tensor, Sequence[StoredForm]]] = {}
    for name in checkpoint.tensors:
        parameter = parameters.get(name_in_module(parameters, name))
        if parameter is not None and checkpoint.stack(name) and checkpoint.is_the_same(name, parameter.detach()):
            found[name] = _values_of(parameter, name in checkpoint.put_off_names), checkpoint.stack(name)
    return found


def _joined_stacks(
    parameters: Mapping[str, Any], checkpoint: QuantisedCheckpoint
) -> tuple[list[tuple[Tensor, list[StoredForm]]], set[str]]:
    """Stacks of experts whose weights a checkpoint has one by one, as far as the kernels can compute with all of a
    stack; and the names of those weights."""
    found: dict[str, dict[int, dict[int, str]]] = {}
    for name in checkpoint.tensors:
        if match := EXPERT.fullmatch(name):
            found.setdefault(match[1], {}).setdefault(int(match[2]), {})[_PARTS[match[3]]] = name
    stacks, names = [], set()
    for prefix, experts in found.items():
        for stack_name, parts in (("gate_up_proj", (0, 1)), ("down_proj", (2,))):
            parameter = parameters.get(name_in_module(parameters, f"{prefix}.{stack_name}"))
            of_parts = [experts.get(i, {}).get(part, "") for i in range(len(experts)) for part in parts]
            all_forms = [checkpoint.form(name) for name in of_parts if name]
            forms = [form for form in all_forms if not isinstance(form, str)]
            if parameter is None or len(forms) < len(of_parts):
                continue
            each = [forms[i : i + len(parts)] for i in range(0, len(forms), len(parts))]
            whole = [joined(of_expert) for of_expert in each]
            values = parameter.detach()
            if len(values) == len(whole) and None not in whole and all(map(_has_samples, each, values)):
                is_put_off = checkpoint.put_off_names.issuperset(of_parts)
                stacks.append((_values_of(parameter, is_put_off), [form for form in whole if form is not None]))
                names.update(of_parts)
    return stacks, names


def _has_samples(parts: Sequence[StoredForm], value: Tensor) -> bool:
    """Whether the rows of ``value`` are those of ``parts``, one behind the other."""
    sizes = [part.n for part in parts]
    return sum(sizes) == len(value) and all(map(has_sample, parts, value.split_with_sizes(sizes)))


def name_in_module(parameters: Collection[str], name: str) -> str:
    """The name in a module of a tensor of a checkpoint, which may lack, or add, the name of the part with layers."""
    bare = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
    candidates = (name, bare, *(start + bare for start in ("model.", "language_model.", "model.language_model.")))
    return next((candidate for candidate in candidates if candidate in parameters), name)


def _tensors(module: Any, path: Path) -> Iterator[tuple[str, StoredWeight]]:
    """Quantised matrices of the file, with the names of the module's parameters."""
    reader = gguf_reader()(path, "c")  # mapped, and writable for torch, which warns otherwise
    names, _ = tensor_names(reader, module, module.config.to_dict())
    known = {name for name, _ in module.named_parameters()}
    for tensor in reader.tensors:
        name, format = names.get(tensor.name), tensor.tensor_type.name
        if name is not None and name in known and format in FORMATS and len(tensor.shape) == 2:
            yield name, StoredWeight(format, int(tensor.shape[0]), torch.from_numpy(tensor.data))


def _orders(module: Any, stored: StoredWeight) -> Iterator[StoredWeight]:
    """The tensor with its rows as they are, and as llama.cpp orders those of queries and keys: in its rotary embedding
    a pair are neighbours, in transformers' they are half a head apart."""
    yield stored
    text, n = module.config.get_text_config(), len(stored.blocks)
    counts = dict.fromkeys(getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    for heads in counts:
        if heads and n % (2 * heads) == 0:
            order = torch.arange(n).view(heads, n // heads // 2, 2).transpose(1, 2).reshape(n)
            yield StoredWeight(stored.format, stored.k, stored.blocks, order.contiguous())
