"""Cuts layers with a recurrent state for one worker: by heads, or by channels. Nothing here knows a family.

What a layer is follows from its parts: their names, and sizes that fit together. A gated delta net has heads of keys,
each with some heads of values; Mamba-2 has heads in groups that share B and C; Mamba and short convolutions have
channels that know nothing of one another. A worker has the weights of its heads or channels, and their states; what
leaves the layer is a sum over the workers. A layer that is none of these is whole on every worker, with a whole state.

Weights are changed in place: some of these layers use those of their linears without calling them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from memserve.base.kv_layout import even
from memserve.base.states import StatePart, StateRange
from memserve.model.states.layers import PartKey, StateLayer
from memserve.model.workers import group as crew
from memserve.model.workers.cuts import WeightCuts

Rows = list[tuple[int, int]]
"""Ranges of a dimension: first and count."""


@dataclass(slots=True)
class LayerCut:
    """What one worker has of one layer."""

    states: dict[PartKey, list[StateRange]]
    rows: dict[str, Rows] = field(default_factory=dict)
    """Of modules with weights and of single weights, by name: of the first dimension, or of a vector's only one."""
    columns: dict[str, Rows] = field(default_factory=dict)
    """Of linears whose results are summed over the workers."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Attributes by which the layer divides what it computes."""
    gathered: str = ""
    """A norm over what several workers have: they put that together for it."""
    channels: tuple[int, int, int] = (0, 0, 0)
    """Of that norm: first and count of this worker's, and all."""


def plan_cut(layer: StateLayer, parts: Sequence[StatePart], part: int, count: int) -> LayerCut | None:
    """What worker ``part`` of ``count`` has of ``layer``, whose state has ``parts``. None: it is not known how to cut
    it."""
    shapes = {key: parts[number].shape for key, number in layer.parts.items()}
    for recipe in (_cut_delta_net, _cut_grouped_heads, _cut_channels, _cut_convolution):
        cuts = [cut for own in range(count) if (cut := recipe(layer.module, own, count)) is not None]
        if len(cuts) == count and _cover_all(layer.module, shapes, cuts):
            return cuts[part]
    return None


def apply_cut(module: Any, cut: LayerCut, part: int, cuts: WeightCuts) -> None:
    """Leave of ``module`` what ``cut`` says, cut by ``cuts``; the first worker adds what is added to sums."""
    for name, rows in cut.rows.items():
        owner, _, attribute = name.rpartition(".")
        value = getattr(module.get_submodule(owner), attribute)
        if isinstance(value, nn.Module):
            for own, _ in list(value.named_parameters(recurse=False)):
                _keep_rows(value, own, rows, cuts)
            _tell_sizes(value, _size_of(rows))
        else:
            _keep_rows(module.get_submodule(owner), attribute, rows, cuts)
    for name, columns in cut.columns.items():
        linear = module.get_submodule(name)
        _replace(linear, "weight", cuts.take(linear.weight.detach(), 1, _places_of(columns)))
        linear.in_features = _size_of(columns)
        if part and linear.bias is not None:
            linear.bias = None
        setattr(module, name, SummedLinear(linear))
    for name, size in cut.sizes.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, size)
    if cut.gathered:
        setattr(module, cut.gathered, _WholeNorm(module.get_submodule(cut.gathered), *cut.channels))


# -- the kinds of layers


def _cut_delta_net(module: Any, part: int, count: int) -> LayerCut | None:
    """A gated delta net: heads of keys, each with as many heads of values."""
    sizes = _integers(module, "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    if sizes is None or not {"conv1d", "A_log", "dt_bias"} <= _names_of(module):
        return None
    key_heads, value_heads, key_dim, value_dim = sizes
    if key_heads < count or value_heads % key_heads:
        return None
    first, own = _own_range(key_heads, part, count)
    group = value_heads // key_heads
    keys, values = (first * key_dim, own * key_dim), (first * group * value_dim, own * group * value_dim)
    heads = (first * group, own * group)
    whole_keys = key_heads * key_dim
    mixed = [keys, _behind(keys, whole_keys), _behind(values, 2 * whole_keys)]
    of_a_key = 2 * (key_dim + group * value_dim)
    layouts: tuple[dict[str, Rows], ...] = (
        {
            "in_proj_qkvz": [(first * of_a_key, own * of_a_key)],
            "in_proj_ba": [(2 * group * first, 2 * group * own)],
        },
        {"in_proj_qkv": mixed, "in_proj_z": [values], "in_proj_b": [heads], "in_proj_a": [heads]},
        {
            "q_proj": [keys], "k_proj": [keys], "v_proj": [values], "g_proj": [values], "a_proj": [heads],
            "b_proj": [heads],
        },
    )  # fmt: skip
    linears = _linears_of(module)
    output = next((name for name in ("out_proj", "o_proj") if name in linears), "")
    rows = next((layout for layout in layouts if layout.keys() | {output} == linears), None)
    if rows is None:
        return None
    return LayerCut(
        states={("conv", 0): _written(mixed), ("recurrent", 0): _written([heads])},
        rows=rows | {"conv1d": mixed, "A_log": [heads], "dt_bias": [heads]},
        columns={output: [values]},
        sizes={
            "num_k_heads": own, "num_v_heads": own * group, "key_dim": keys[1], "value_dim": values[1],
            "conv_dim": _size_of(mixed),
        },
    )  # fmt: skip


def _cut_grouped_heads(module: Any, part: int, count: int) -> LayerCut | None:
    """Mamba-2: heads in groups. Where there is one group, each worker computes its B and C for itself."""
    sizes = _integers(module, "num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size")
    is_known = {"conv1d", "A_log", "D", "dt_bias"} <= _names_of(module)
    if sizes is None or not is_known or _linears_of(module) != {"in_proj", "out_proj"}:
        return None
    heads, head_dim, groups, state_dim, inner = sizes
    if inner != heads * head_dim or heads < count or (groups > 1 and groups % count) or heads % groups:
        return None
    shared = groups == 1
    first, own = _own_range(groups, part, count) if not shared else (0, 1)
    own_heads = _own_range(heads, part, count) if shared else (first * heads // groups, own * heads // groups)
    channels = own_heads[0] * head_dim, own_heads[1] * head_dim
    bc, whole_bc = (first * state_dim, own * state_dim), groups * state_dim
    mixed = [channels, _behind(bc, inner), _behind(bc, inner + whole_bc)]
    projected = [channels, *(_behind(rows, inner) for rows in mixed), _behind(own_heads, 2 * (inner + whole_bc))]
    writes = not shared or part == 0  # of B and C
    cut = LayerCut(
        states={
            ("conv", 0): [StateRange(*rows, place == 0 or writes) for place, rows in enumerate(mixed)],
            ("recurrent", 0): _written([own_heads]),
        },
        rows={
            "in_proj": projected, "conv1d": mixed, "A_log": [own_heads], "D": [own_heads], "dt_bias": [own_heads],
        },
        columns={"out_proj": [channels]},
        sizes={
            "num_heads": own_heads[1], "n_groups": own, "intermediate_size": channels[1], "conv_dim": _size_of(mixed),
        },
    )  # fmt: skip
    whole_sizes = {"groups_time_state_size": own * state_dim}
    cut.sizes |= {name: size for name, size in whole_sizes.items() if hasattr(module, name)}
    width = 2 * (inner + whole_bc) + heads
    cut.rows |= {name: projected for name, value in module.named_buffers(recurse=False) if value.shape[-1] == width}
    norm = getattr(module, "norm", None)
    if isinstance(getattr(norm, "weight", None), Tensor):
        if shared or not hasattr(norm, "group_size"):
            cut.gathered, cut.channels = "norm", (*channels, inner)
        else:
            cut.rows["norm.weight"] = [channels]
    return cut


def _cut_channels(module: Any, part: int, count: int) -> LayerCut | None:
    """Mamba: channels, which share what is computed of all of them: time steps, B and C."""
    sizes = _integers(module, "intermediate_size", "ssm_state_size", "time_step_rank")
    is_known = {"conv1d", "A_log", "D"} <= _names_of(module)
    if sizes is None or not is_known or _linears_of(module) != {"in_proj", "x_proj", "dt_proj", "out_proj"}:
        return None
    inner = sizes[0]
    channels = _own_range(inner, part, count)
    rows: dict[str, Rows] = {name: [channels] for name in ("conv1d", "dt_proj", "A_log", "D")}
    return LayerCut(
        states={("conv", 0): _written([channels]), ("recurrent", 0): _written([channels])},
        rows=rows | {"in_proj": [channels, _behind(channels, inner)]},
        columns={"x_proj": [channels], "out_proj": [channels]},
        sizes={"intermediate_size": channels[1]},
    )


def _cut_convolution(module: Any, part: int, count: int) -> LayerCut | None:
    """A short convolution between two gates: channels."""
    convolution = getattr(module, "conv", None)
    if not isinstance(convolution, nn.Conv1d) or _linears_of(module) != {"in_proj", "out_proj"}:
        return None
    width = convolution.out_channels
    if module.in_proj.out_features != 3 * width or module.out_proj.in_features != width:
        return None
    channels = _own_range(width, part, count)
    return LayerCut(
        states={("conv", 0): _written([channels])},
        rows={"conv": [channels], "in_proj": [_behind(channels, times * width) for times in range(3)]},
        columns={"out_proj": [channels]},
    )


def _cover_all(module: Any, shapes: dict[PartKey, tuple[int, ...]], cuts: Sequence[LayerCut]) -> bool:
    """Whether the workers together have all of each state and of each weight, and write each state once: else the layer
    is another one than its parts say."""
    if any(cut.states.keys() != shapes.keys() for cut in cuts):
        return False
    for key, shape in shapes.items():
        ranges = [rows for cut in cuts for rows in cut.states[key]]
        written = [(rows.first, rows.count) for rows in ranges if rows.is_written]
        if not _covers(shape[0], [(rows.first, rows.count) for rows in ranges]) or _size_of(written) != shape[0]:
            return False
    sizes: dict[str, int] = {name: module.get_submodule(name).in_features for name in cuts[0].columns}
    for name in cuts[0].rows:
        owner, _, attribute = name.rpartition(".")
        value = getattr(module.get_submodule(owner), attribute)
        weights = [value] if isinstance(value, Tensor) else list(value.parameters(recurse=False))
        if len(lengths := {weight.shape[_row_dim(weight)] for weight in weights}) != 1:
            return False
        sizes[name] = lengths.pop()
    return all(
        _covers(size, [rows for cut in cuts for rows in (cut.rows | cut.columns)[name]]) for name, size in sizes.items()
    )


def _covers(size: int, rows: Rows) -> bool:
    """Whether ``rows`` are all of ``size``, and none beyond."""
    end = 0
    for first, count in sorted(rows):
        if first > end:
            return False
        end = max(end, first + count)
    return end == size


def _own_range(size: int, part: int, count: int) -> tuple[int, int]:
    sizes = even(size, count)
    return [*accumulate(sizes, initial=0)][part], sizes[part]


def _behind(rows: tuple[int, int], offset: int) -> tuple[int, int]:
    return rows[0] + offset, rows[1]


def _written(rows: Iterable[tuple[int, int]]) -> list[StateRange]:
    return [StateRange(first, count, True) for first, count in rows]


def _size_of(rows: Rows) -> int:
    return sum(count for _, count in rows)


def _integers(module: Any, *names: str) -> list[int] | None:
    values = [getattr(module, name, None) for name in names]
    return [int(value) for value in values if value] if all(isinstance(value, int) for value in values) else None


def _names_of(module: Any) -> set[str]:
    return {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}


def _linears_of(module: Any) -> set[str]:
    return {name for name, part in module.named_modules() if isinstance(part, nn.Linear)}


# -- weights


def _row_dim(weight: Tensor) -> int:
    """The first dimension that has more than one element: buffers may be shaped for a batch."""
    return next((dim for dim, size in enumerate(weight.shape) if size > 1), 0)


def _keep_rows(owner: Any, name: str, rows: Rows, cuts: WeightCuts) -> None:
    value = getattr(owner, name).detach()
    _replace(owner, name, cuts.take(value, _row_dim(value), _places_of(rows)))


def _places_of(rows: Rows) -> Tensor:
    return torch.cat([torch.arange(first, first + count) for first, count in rows])


def _replace(owner: Any, name: str, value: Tensor) -> None:
    if name in owner._buffers:
        owner._buffers[name] = value
    else:
        setattr(owner, name, nn.Parameter(value, requires_grad=False))


def _tell_sizes(part: nn.Module, size: int) -> None:
    if isinstance(part, nn.Conv1d):
        part.in_channels = part.out_channels = part.groups = size
    elif isinstance(part, nn.Linear):
        part.out_features = size


class SummedLinear(nn.Module):
    """A linear over some of its inputs: the workers' results are summed."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return crew.all_reduce(self.linear(x))


class _WholeNorm(nn.Module):
    """A norm over the channels of all workers, and what gates them: their sum, with zeros for those of the others, is
    the whole."""

    def __init__(self, norm: nn.Module, first: int, count: int, size: int) -> None:
        super().__init__()
        self.norm = norm
        self._first, self._count, self._size = first, count, size

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Both ``[..., own channels]``."""
        whole = x.new_zeros((*x.shape[:-1], 2 * self._size))
        for place, value in ((self._first, x), (self._size + self._first, gate)):
            whole[..., place : place + self._count] = value
        outer = whole.shape
        summed = crew.all_reduce(whole.view(1, -1, outer[-1])).view(outer)
        x, gate = summed.split_with_sizes([self._size, self._size], dim=-1)
        result: Tensor = self.norm(x, gate)
        return result[..., self._first : self._first + self._count]
