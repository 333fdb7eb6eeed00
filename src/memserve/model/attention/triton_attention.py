"""Paged attention on a CUDA device: the same calls as the CPU kernels' ``PagedBatch`` and ``attend``.

The package ``triton`` is imported on first use, so that a machine without it can import this module and ask
:func:`available`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import types

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve.base.errors import UserError, check
from memserve.base.types import INT4_GROUP, KVGeometry
from memserve.base.units import ceil_div
from memserve.model.attention.context import BlockSpan, StepRows

_DECODE_ROWS = 16  # query rows of a tile: the least that a tensor core takes
_PREFILL_ROWS = 64
# Bytes of K, and of V, that a program loads at a time, how many such loads are under way, and warps. Of what
# scripts/gpu_check.py times for decodes (its part "settings"), this was the quickest on an H200.
_DECODE_LOADS = 1 << 13, 5, 4
_PREFILL_LOADS = 1 << 14, 4, 4
_SHARED_BYTES = 96 << 10  # of a program, that every device of compute capability 8.0 and above has
_BLOCKS_A_SPLIT = 8  # a shorter piece of a row costs more in the merge than it gains
_SPLITS_MAX = 32


def available() -> bool:
    """Whether the package ``triton`` is installed."""
    return importlib.util.find_spec("triton") is not None


def _kernels() -> types.ModuleType:
    if not available():
        raise UserError("attention on this device needs the package triton", hint="pip install triton")
    return importlib.import_module("memserve.model.attention.triton_kernels")


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """What of a program's shared memory its loads may take on ``device``."""
    if device.type != "cuda":
        return _SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", _SHARED_BYTES) * 7 // 8  # queries take the rest


def _power_of_two(least: int, count: int) -> int:
    return max(least, 1 << (count - 1).bit_length())


class TritonBatch:
    """One step's ragged batch on the device. Built once per step, used by every layer.

    ``arena``: flat uint8 tensor, the whole KV arena. ``splits``: pieces into which a row's blocks are divided among
    programs; ``None``: enough to fill the device.
    """

    def __init__(
        self,
        arena: Tensor,
        geometry: KVGeometry,
        rows: StepRows,
        splits: int | None = None,
        *,
        span: BlockSpan | None = None,
    ) -> None:
        tables, table_rows, q_starts, contexts = rows.tables, rows.table_rows, rows.q_starts, rows.contexts
        check(arena.dtype == torch.uint8 and arena.dim() == 1, "the arena is a flat uint8 tensor")
        counts = np.diff(q_starts)
        check(bool((counts >= 1).all() and (counts <= contexts).all()), "every row computes 1 to `context` tokens")
        self._see_pages(arena, geometry, span)
        self.device = arena.device
        self.tables = tables if isinstance(tables, Tensor) else torch.from_numpy(tables).to(self.device)
        self.tokens = int(q_starts[-1])
        self._q_starts, self._counts = q_starts, counts
        self._context_max = int(contexts.max())
        self._splits = splits
        token_rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self.table_rows, self.q_starts, self.contexts, self.token_rows = self._upload_arrays(
            table_rows, q_starts, contexts, token_rows
        )
        self._tiles: dict[int, tuple[int, int, Tensor, Tensor]] = {}
        #: the rows' numbers, of a batch that has one token of each
        self._decodes: Tensor | None = None

    @classmethod
    def of_decodes(
        cls,
        arena: Tensor,
        geometry: KVGeometry,
        tables: Tensor,
        table_rows: Tensor,
        contexts: Tensor,
        context_max: int,
        *,
        span: BlockSpan | None = None,
    ) -> TritonBatch:
        """One token of each row, all of it known to the device alone, so that a graph can hold it: ``table_rows`` and
        ``contexts`` int32 ``[rows]``. ``context_max``: the most that a row may come to have."""
        rows = len(table_rows)
        batch = cls.__new__(cls)
        batch._see_pages(arena, geometry, span)
        batch.device, batch.tables, batch.tokens = arena.device, tables, rows
        batch._q_starts, batch._counts = np.arange(rows + 1, dtype=np.int32), np.ones(rows, np.int64)
        batch._context_max, batch._splits, batch._tiles = context_max, None, {}
        numbers = torch.arange(rows + 1, dtype=torch.int32, device=arena.device)
        batch.table_rows, batch.contexts = table_rows, contexts
        batch.q_starts, batch.token_rows = numbers, numbers[:rows]
        batch._decodes = numbers[:rows]
        return batch

    def _see_pages(self, arena: Tensor, geometry: KVGeometry, span: BlockSpan | None) -> None:
        """``span``: where in a block they lie; None: it has no others."""
        span = span or BlockSpan(0, geometry.block_bytes)
        kind = torch.int32 if geometry.code_depth else getattr(torch, geometry.dtype)  # codes lie in words
        self.geometry, self._stride = geometry, span.block_bytes // kind.itemsize
        self.arena = arena[span.first_byte :].view(kind)

    def _upload_arrays(self, *arrays: NDArray[np.int32]) -> tuple[Tensor, ...]:
        """The arrays on the device, sent as one copy: a launch is cheaper than a transfer."""
        joined = torch.from_numpy(np.concatenate(arrays, dtype=np.int32))
        if self.device.type == "cuda":
            joined = joined.pin_memory()
        return tuple(torch.split(joined.to(self.device, non_blocking=True), [len(a) for a in arrays]))

    def tile_layout(self, group: int) -> tuple[int, int, Tensor, Tensor]:
        """``(query rows of a tile, tiles, row of each, first token of each)`` for ``group`` heads per KV head."""
        if group not in self._tiles:
            decode = int(self._counts.max()) == 1
            m = _power_of_two(_DECODE_ROWS if decode else _PREFILL_ROWS, group)
            if self._decodes is not None:
                self._tiles[group] = (m, self.tokens, self._decodes, self._decodes)
                return self._tiles[group]
            per_row = -(-self._counts // (m // group))
            rows = np.repeat(np.arange(len(per_row), dtype=np.int32), per_row)
            nth = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
            firsts = self._q_starts[rows] + nth * (m // group)
            tile_rows, tile_firsts = self._upload_arrays(rows, firsts.astype(np.int32))
            self._tiles[group] = (m, len(rows), tile_rows, tile_firsts)
        return self._tiles[group]

    def choose_splits(self, programs: int) -> int:
        """Pieces per row, so that ``programs`` times the pieces fill the device; 1 where the queries fill it alone."""
        if self._splits is not None:
            return self._splits
        if self.device.type != "cuda":
            return 1
        filling = ceil_div(2 * torch.cuda.get_device_properties(self.device).multi_processor_count, programs)
        useful = ceil_div(self._context_max, self.geometry.block_tokens * _BLOCKS_A_SPLIT)
        most = max(1, min(filling, useful, _SPLITS_MAX))
        return 1 << (most.bit_length() - 1)  # each number needs its own compilation: use few

    def kernel_arguments(self) -> tuple[Tensor | int, ...]:
        """The arguments that every kernel starts with."""
        return (self.arena, self.tables, self.tables.stride(0), self.table_rows, self.q_starts, self.contexts)

    def shape_constants(self) -> dict[str, int]:
        """The compile-time constants of this geometry: sizes in elements of ``arena``."""
        g = self.geometry
        return {
            "STRIDE": self._stride, "HEAD": g.head_bytes // self.arena.element_size(), "KV_HEADS": g.num_kv_heads,
            "DK": g.head_dim_k, "DV": g.head_dim_v, "BLOCK": g.block_tokens,
            "DK_PAD": _power_of_two(16, g.head_dim_k), "DV_PAD": _power_of_two(16, g.head_dim_v),
        }  # fmt: skip

    def code_constants(self) -> dict[str, int | str]:
        """Further ones of pages of codes (:mod:`memserve.model.attention.triton_codes`); ``*_WIDTH``: elements that a
        maximum is of."""
        g = self.geometry
        if not g.code_depth:
            return {}
        most = INT4_GROUP if g.kv_dtype == "int4" else max(g.head_dim_k, g.head_dim_v)
        values = ceil_div(g.head_dim_k, g.code_depth) * g.block_tokens
        maxima = values + g.block_tokens // g.code_depth * g.head_dim_v
        return {
            "CODES": g.kv_dtype, "DEPTH": g.code_depth, "VALUES": values, "DK_MAXIMA": maxima,
            "DV_MAXIMA": maxima + g.code_groups(g.head_dim_k) * g.block_tokens // 2,
            "DK_WIDTH": _power_of_two(16, min(g.head_dim_k, most)),
            "DV_WIDTH": _power_of_two(16, min(g.head_dim_v, most)),
        }  # fmt: skip


def attend(
    batch: TritonBatch,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    write: bool = True,
    chunk: int = 0,
) -> None:
    """Write this step's K and V into the pages, then attend causally over the paged context.

    ``q`` ``[T, H, Dk]``, ``k`` ``[T, Hkv, Dk]``, ``v`` ``[T, Hkv, Dv]``, ``out`` ``[T, H, Dv]``: of the KV's dtype, any
    strides but a contiguous last dimension. Query ``i`` of a row sits at position ``context - count + i``; head ``h``
    reads KV head ``h // (H / Hkv)``. ``window`` > 0: only the last ``window`` positions, its own included; ``chunk``
    > 0: only those of its chunk of so many. ``softcap`` > 0: ``s = cap * tanh(s / cap)``. ``sinks``: float32 ``[H]``,
    one more logit per head, in the denominator only. Sums are float32. Pages of codes get the bytes that a CPU writes.
    """
    kernels = _kernels()
    check(q.shape[0] == batch.tokens, f"q has {q.shape[0]} rows, the batch {batch.tokens}")
    check(all(x.stride(-1) == 1 for x in (q, k, v, out)), "the last dimension must be contiguous")
    g, shape, codes = batch.geometry, batch.shape_constants(), batch.code_constants()
    if write:
        write_kernel = kernels.write_codes if codes else kernels.write_kv
        write_kernel[(batch.tokens, g.num_kv_heads)](
            *batch.kernel_arguments(), batch.token_rows, k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1),
            layer, **shape, **codes, enable_fp_fusion=False,  # codes are rounded as on a CPU
        )  # fmt: skip
    heads = q.shape[1]
    m, tiles, tile_rows, tile_firsts = batch.tile_layout(heads // g.num_kv_heads)
    splits = batch.choose_splits(tiles * g.num_kv_heads)
    pieces, stats = out, out  # not touched unless the row is split
    if splits > 1:
        pieces = torch.empty((batch.tokens, heads, splits, g.head_dim_v), dtype=torch.float32, device=q.device)
        stats = torch.empty((batch.tokens, heads, splits, 2), dtype=torch.float32, device=q.device)
    block_pad = _power_of_two(16, g.block_tokens)
    load_bytes, stages, warps = _DECODE_LOADS if m < _PREFILL_ROWS else _PREFILL_LOADS
    # of codes as many keys at a time, in fewer bytes: they are as many numbers in registers
    blocks = max(1, load_bytes // (max(shape["DK_PAD"], shape["DV_PAD"]) * q.element_size() * block_pad))
    stage_bytes = blocks * block_pad * (shape["DK_PAD"] + shape["DV_PAD"]) * q.element_size()
    stages = max(2, min(stages, _shared_bytes(batch.device) // stage_bytes))
    kernels.attend_tile[(tiles, g.num_kv_heads, splits)](
        *batch.kernel_arguments(), tile_rows, tile_firsts, q, q.stride(0), q.stride(1),
        out, out.stride(0), out.stride(1), pieces, stats,
        out if sinks is None else sinks, layer, scale, window, chunk, softcap, **shape,
        BLOCK_PAD=block_pad, BLOCKS=blocks, GROUP=heads // g.num_kv_heads, M=m, SPLITS=splits,
        WINDOW=window > 0, CHUNK=chunk > 0, SOFTCAP=softcap > 0, SINKS=sinks is not None,
        WIDE=q.device.type == "cpu", **codes, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        kernels.combine_splits[(batch.tokens, heads)](
            pieces, stats, out, out.stride(0), out.stride(1),
            HEADS=heads, DV=g.head_dim_v, DV_PAD=shape["DV_PAD"], SPLITS=splits, SPLITS_PAD=_power_of_two(2, splits),
        )  # fmt: skip
