"""Where the values of a graph lie when its fused operations run natively.

A step of few tokens spends as long in Python between its operations as inside them. So runs of fused operations become
one native call (``_kernels.Program``), with values at fixed places in one workspace. A :class:`StoragePlace` says where
a value lies and with which strides; views are places too and cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

TOKENS, LOGITS_ROWS = 0, 1  # what a dimension of rows counts


@dataclass(frozen=True)
class Dim:
    """One dimension: ``size`` (None: the rows of this step) and ``stride`` in elements."""

    size: int | None
    stride: int


@dataclass(frozen=True)
class StoragePlace:
    """A strided view of a buffer. Exactly one dimension counts rows; dimensions of size 1 may be added and removed."""

    buffer: Any  # the Buffer or External it lies in
    offset: int  # elements
    dims: tuple[Dim, ...]
    count: int  # TOKENS or LOGITS_ROWS

    def core_dims(self) -> tuple[Dim, ...]:
        """The dimensions with a size other than 1."""
        return tuple(dim for dim in self.dims if dim.size != 1)

    def view_as(self, shape: tuple[int | None, ...]) -> StoragePlace | None:
        """The place under another shape (None: rows), if rows stay rows and the rest is dense or only regrouped."""
        tail, new_tail = _after_rows(self.shape()), _after_rows(shape)
        head = [size for size in shape[: len(shape) - len(new_tail) - 1] if size != 1]
        own_head = [dim for dim in self.dims[: len(self.dims) - len(tail) - 1] if dim.size != 1]
        inner = self.dims[len(self.dims) - len(tail) :]
        if head or own_head or not _is_dense(inner):
            return None
        rows = self.dims[len(self.dims) - len(tail) - 1]
        lead = (Dim(1, 0),) * (len(shape) - len(new_tail) - 1)
        return replace(self, dims=(*lead, rows, *_dense(new_tail)))

    def shape(self) -> tuple[int | None, ...]:
        """Sizes, None for the rows."""
        return tuple(dim.size for dim in self.dims)

    def transposed(self, a: int, b: int) -> StoragePlace:
        """Two dimensions swapped."""
        dims = list(self.dims)
        dims[a], dims[b] = dims[b], dims[a]
        return replace(self, dims=tuple(dims))

    def unsqueezed(self, dim: int) -> StoragePlace:
        """A dimension of size 1 put in at ``dim``."""
        dims = list(self.dims)
        dims.insert(dim if dim >= 0 else len(dims) + 1 + dim, Dim(1, 0))
        return replace(self, dims=tuple(dims))

    def columns(self, start: int, width: int) -> StoragePlace:
        """``[..., start : start + width]``"""
        last = self.dims[-1]
        return replace(self, offset=self.offset + start * last.stride, dims=(*self.dims[:-1], Dim(width, last.stride)))

    def as_tensor(self, workspace: Tensor, rows: int) -> Tensor:
        """The value as a tensor of ``workspace`` (flat, of the value's dtype), for operations that are not native."""
        sizes = [rows if dim.size is None else dim.size for dim in self.dims]
        return workspace.as_strided(sizes, [dim.stride for dim in self.dims], self.buffer.offset + self.offset)


@dataclass(eq=False)
class Buffer:
    """A value computed natively. ``offset`` in the workspace (elements) is known once all lifetimes are."""

    elements_per_row: int
    last_read: int = -1  # place in the graph's order
    offset: int = -1


@dataclass(eq=False)
class External:
    """A dense tensor made by an operation outside the program. ``index``: its number, given when it is first read."""

    node: Any
    index: int = -1


class Workspace:
    """Gives buffers their offsets, and takes the room back when a value was read for the last time."""

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self.elements = 0
        self._free: list[tuple[int, int]] = []  # (elements, offset)
        self._taken: dict[Buffer, tuple[int, int]] = {}

    def assign_room(self, buffer: Buffer) -> None:
        """Give ``buffer`` the smallest free room that is large enough, else new room."""
        need = -(-buffer.elements_per_row * self.rows_max // 64) * 64
        room = min((free for free in self._free if free[0] >= need), default=None)
        if room is None:
            room = (need, self.elements)
            self.elements += need
        else:
            self._free.remove(room)
        self._taken[buffer], buffer.offset = room, room[1]

    def release_dead(self, now_ns: int) -> None:
        """Free the room of every buffer that is read neither now nor later."""
        for buffer in [b for b in self._taken if b.last_read <= now_ns]:
            self._free.append(self._taken.pop(buffer))


def dense_place(buffer: Any, shape: tuple[int | None, ...], count: int) -> StoragePlace | None:
    """A dense value of this shape; None unless its only leading dimensions are of size 1 and rows come next."""
    lead = 0
    while lead < len(shape) and shape[lead] == 1:
        lead += 1
    if lead == len(shape) or shape[lead] is not None:
        return None
    tail = _after_rows(shape)
    width = 1
    for size in tail:
        width *= size
    return StoragePlace(buffer, 0, (*(Dim(1, 0),) * lead, Dim(None, width), *_dense(tail)), count)


def _after_rows(shape: tuple[int | None, ...]) -> tuple[int, ...]:
    tail = shape[shape.index(None) + 1 :]
    return tuple(size for size in tail if size is not None)


def _dense(sizes: tuple[int, ...]) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    stride = 1
    for size in reversed(sizes):
        dims.insert(0, Dim(size, stride))
        stride *= size
    return tuple(dims)


def _is_dense(dims: tuple[Dim, ...]) -> bool:
    stride = 1
    for dim in reversed(dims):
        if dim.size != 1 and dim.stride != stride:
            return False
        stride *= dim.size or 1
    return True


def row_shape(value: Tensor, sizes: tuple[int, int]) -> tuple[tuple[int | None, ...], int] | None:
    """The shape of a recorded value with its rows as None, and what they count; None if rows do not come first.

    ``sizes``: how many tokens and logits rows the recording had.
    """
    shape = tuple(value.shape)
    lead = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    if lead == len(shape) or shape[lead] not in sizes:
        return None
    return (*shape[:lead], None, *shape[lead + 1 :]), sizes.index(shape[lead])
