"""What computes a step's attention: the native kernel, Triton, or plain torch."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve.base.errors import UserError
from memserve.base.types import KVGeometry
from memserve.model.attention.context import BlockSpan, StepAttention, StepRows
from memserve.model.attention.reference import ReferenceAttention, reference_pages
from memserve.model.workers.group import WorkerGroup

if TYPE_CHECKING:
    from memserve.model.workers.gpu_group import GpuWorkerGroup

log = logging.getLogger(__name__)

Int32s = NDArray[np.int32]

AttentionFactory = Callable[[StepRows], StepAttention]
"""Called once per step."""


class KernelAttention:
    """The CPU kernel of ``memserve._kernels`` over one step's batch."""

    def __init__(
        self,
        base: int,
        geometry: KVGeometry,
        page_heads: int,
        rows: StepRows,
        *,
        behind: bool = False,
        block_stride: int = 0,
    ) -> None:
        """``base``: address of the arena, from the first head of ``geometry`` on; whole pages have ``page_heads``.
        ``behind``: the new tokens follow the contexts, and are only queries. ``block_stride``: bytes from one block to
        the next; 0: blocks have the pages of ``geometry`` alone."""
        kernels = _kernels()
        g = geometry
        shape = (g.num_layers, g.num_kv_heads, g.head_dim_k, g.head_dim_v, g.block_tokens, g.dtype, g.kv_dtype)
        self.batch = kernels.PagedBatch(
            base, shape, rows.tables, rows.table_rows, rows.q_starts, rows.contexts, None, page_heads, behind, g.latent,
            block_stride,
        )  # fmt: skip
        self._attend = kernels.attend
        self._head_dims = g.head_dim_k, g.head_dim_v

    def run_attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        _, heads, tokens, _ = q.shape
        out, reach = q.new_empty((1, tokens, heads, self._head_dims[1])), {"window": window, "chunk": chunk}
        self.run_attention_into(out, layer, q, (k, v), scale=scale, softcap=softcap, sinks=sinks, **reach)
        return out

    def run_attention_into(
        self,
        out: Tensor,
        layer: int,
        q: Tensor,
        kv: tuple[Tensor, Tensor] | None,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        chunk: int = 0,
    ) -> None:
        """As :meth:`run_attention`, with the results in ``out [1, T, H, Dv]``, any strides with a dense last dimension.
        ``kv`` None: nothing is written."""
        out[:, self.batch.tokens :] = 0
        # rows with a strided last dimension are copied; the copies must live until the kernel is done
        q = _dense(q)
        k, v = (q, q) if kv is None else map(_dense, kv)
        self._attend(
            self.batch,
            layer,
            q.shape[1],
            (q.data_ptr(), q.stride(2), q.stride(1)),
            (k.data_ptr(), k.stride(2), k.stride(1)),
            (v.data_ptr(), v.stride(2), v.stride(1)),
            (out.data_ptr(), out.stride(1), out.stride(2)),
            scale,
            window,
            softcap,
            None if sinks is None else sinks.detach().float().numpy(),
            kv is not None,
            None,
            chunk,
        )

    def run_attention_part(
        self, layer: int, q: Tensor, kv: tuple[Tensor, Tensor] | None, *, scale: float, softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`run_attention`, for contexts that go on elsewhere: outputs ``[T, H, Dv]``, and the statistics
        ``[T, H]`` with which ``merge_parts`` puts the parts together, both float32. ``kv`` None: nothing is written."""
        _, heads, tokens, dim = q.shape
        if dim != self._head_dims[0]:
            raise ValueError(f"queries have {dim} elements, keys {self._head_dims[0]}")
        out = torch.empty((tokens, heads, self._head_dims[1]), dtype=torch.float32)
        statistics = torch.zeros((tokens, heads), dtype=torch.float32)
        out[self.batch.tokens :] = 0
        q = _dense(q)
        k, v = (q, q) if kv is None else map(_dense, kv)
        addresses = [(t.data_ptr(), t.stride(2), t.stride(1)) for t in (q, k, v)]
        self._attend(
            self.batch, layer, heads, *addresses, (out.data_ptr(), out.stride(0), out.stride(1)), scale, 0, softcap,
            None, kv is not None, statistics.numpy(),
        )  # fmt: skip
        return out, statistics


class LentHeads:
    """The CPU kernel over one step's batch, for a worker some of whose queries read KV heads that others write.

    What others read is computed first, and announced; what others compute is read last. So no worker waits, as a rule.
    """

    def __init__(
        self, base: int, geometry: KVGeometry, crew: WorkerGroup, rows: StepRows, *, block_stride: int = 0
    ) -> None:
        """``base``: address of the arena; ``geometry``: of whole pages; ``block_stride``: as of one kernel."""
        whole, stage = geometry.num_kv_heads, crew.stage
        of_a_head = geometry.page_bytes // whole
        self._part, self._first = crew.share.part, crew.share.first_head
        self._announce, self._await = stage.announce, stage.await_rank
        self._parts = [
            (
                head_range,
                KernelAttention(
                    base + head_range.first * of_a_head,
                    replace(geometry, num_kv_heads=head_range.heads),
                    whole,
                    rows,
                    block_stride=block_stride,
                ),
            )
            for head_range in crew.share.head_ranges()
        ]
        self._lent = sum(head_range.owner == self._part and not head_range.is_whole for head_range, _ in self._parts)
        self._dim = geometry.head_dim_v

    def run_attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **options: Any
    ) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`; ``q``, ``k``, ``v`` and ``sinks``
        of this worker's heads."""
        out = q.new_empty((1, q.shape[2], q.shape[1], self._dim))
        for index, (head_range, attention) in enumerate(self._parts):
            if index == self._lent:
                self._announce()
            is_own, queries = (
                head_range.owner == self._part,
                slice(head_range.first_query, head_range.first_query + head_range.queries),
            )
            if not is_own:
                self._await(head_range.owner)
            heads = slice(head_range.first - self._first, head_range.first - self._first + head_range.heads)
            attention.run_attention_into(
                out[:, :, queries], layer, q[:, queries], (k[:, heads], v[:, heads]) if is_own else None,
                sinks=None if sinks is None else sinks[queries], **options,
            )  # fmt: skip
        if self._lent == len(self._parts):
            self._announce()
        return out


class TritonAttention:
    """The Triton kernel over one step's batch, on CUDA."""

    def __init__(
        self,
        arena: Tensor,
        geometry: KVGeometry,
        rows: StepRows,
        *,
        first_layer: int = 0,
        span: BlockSpan | None = None,
    ) -> None:
        """``arena``: uint8 ``[bytes]`` on the device, its layers from ``first_layer`` on. ``span``: None: a block has
        the pages of ``geometry`` alone."""
        from memserve.model.attention import triton_attention

        if not isinstance(rows.tables, Tensor):  # copy only the rows of this step to the device
            entries = -(-int(rows.contexts.max()) // geometry.block_tokens)
            own = np.ascontiguousarray(rows.tables[rows.table_rows, :entries])
            rows = replace(rows, tables=own, table_rows=np.arange(len(rows.table_rows), dtype=np.int32))
        self.batch = triton_attention.TritonBatch(arena, geometry, rows, span=span)
        self._attend, self._first_layer = triton_attention.attend, first_layer

    @classmethod
    def of_decodes(
        cls,
        arena: Tensor,
        geometry: KVGeometry,
        tables: Tensor,
        slots: Tensor,
        contexts: Tensor,
        context_max: int,
        first_layer: int = 0,
        span: BlockSpan | None = None,
    ) -> TritonAttention:
        """One token of each of ``slots``, known to the device alone: see :meth:`TritonBatch.of_decodes`."""
        from memserve.model.attention import triton_attention

        attention = cls.__new__(cls)
        rows = tables, slots, contexts
        attention.batch = triton_attention.TritonBatch.of_decodes(arena, geometry, *rows, context_max, span=span)
        attention._attend, attention._first_layer = triton_attention.attend, first_layer
        return attention

    def run_attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        out = q.new_empty((q.shape[2], q.shape[1], v.shape[3]))
        sinks = None if sinks is None else sinks.float()
        batch_layer, rows = (self.batch, layer - self._first_layer), (_by_token(q), _by_token(k), _by_token(v))
        self._attend(*batch_layer, *rows, out, scale, window, softcap, sinks, True, chunk)
        return out[None]


def choose_backend(
    arena: Tensor,
    geometry: KVGeometry,
    crew: WorkerGroup | GpuWorkerGroup | None = None,
    span: BlockSpan | None = None,
) -> AttentionFactory:
    """The fastest attention for the device of ``arena`` (uint8, blocks) and for the geometry; to latents as to one KV
    head.

    ``crew``: only the heads of one worker. On a CPU the others of every page are other workers'; on a GPU ``geometry``
    has this worker's alone. ``span``: blocks have more than the pages of ``geometry``. Raises :class:`UserError` where
    only whole pages can be attended."""
    flat, share = arena.view(-1), None if crew is None else crew.share
    span = span or BlockSpan(0, geometry.block_bytes)
    if flat.device.type == "cpu" and has_kernel(geometry):
        whole = geometry.num_kv_heads
        first, heads = (0, whole) if share is None else (share.first_head, share.heads[share.part])
        if isinstance(crew, WorkerGroup) and crew.share.shares_heads:
            base = flat.data_ptr() + span.first_byte
            return partial(LentHeads, base, geometry, crew, block_stride=span.block_bytes)
        base = flat.data_ptr() + span.first_byte + first * (geometry.page_bytes // whole)
        geometry = replace(geometry, num_kv_heads=heads)
        return partial(KernelAttention, base, geometry, whole, block_stride=span.block_bytes)
    if flat.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        first_layer = 0 if share is None else share.own_layers.start
        return partial(TritonAttention, flat, geometry, first_layer=first_layer, span=span)
    if share is not None and (share.parts > 1 or flat.device.type == "cuda"):
        hint = "use --tensor-parallel 1; --pipeline-parallel works"
        raise UserError(f"no kernel attends to some heads of a page of {geometry}", hint=hint, param="tensor")
    _warn_of_reference(flat.device.type, geometry)
    pages = arena.view(-1, span.block_bytes)[:, span.first_byte : span.first_byte + geometry.block_bytes]
    return partial(ReferenceAttention, reference_pages(pages, geometry))


@cache  # steps by layer choose anew each time
def _warn_of_reference(device_type: str, geometry: KVGeometry) -> None:
    log.warning("attention runs in plain torch: no kernel for device %s and %s", device_type, geometry)


def has_kernel(geometry: KVGeometry) -> bool:
    """Whether the CPU kernel attends to pages of ``geometry``."""
    narrow = geometry.head_dim_k % 8 or geometry.head_dim_v % 8 or geometry.block_tokens % 16
    return not narrow and hasattr(_kernels(), "PagedBatch")


def _kernels() -> Any:
    from memserve import _kernels

    return _kernels


def _by_token(x: Tensor) -> Tensor:
    """``[1, H, T, D] -> [T, H, D]``, a view where possible."""
    return _dense(x)[0].transpose(0, 1)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
