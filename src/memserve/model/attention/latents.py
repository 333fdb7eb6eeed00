"""A step's attention over pages that keep latents.

A row with few new tokens is computed *absorbed*: its queries attend to the latents in the pages, of which nothing is
expanded. A row with many is computed *expanded*: what it reads is made into keys and values, a piece of the context at
a time, in a scratch of pages that the usual kernel reads. Both read the same pages, so a cached prefix gives the same
numbers as one that was just computed. Which way costs less follows from what both have been measured to cost here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memserve.base.errors import check
from memserve.base.types import KVGeometry
from memserve.model.attention.backends import AttentionFactory, KernelAttention, choose_backend, has_kernel
from memserve.model.attention.context import StepAttention, StepRows
from memserve.model.attention.reference import ReferencePages, attend_dense
from memserve.model.attention.sequence_parallel import merge_parts
from memserve.system.memory import LATENT_SCRATCH_BYTES

if TYPE_CHECKING:
    from memserve.model.attention.expansions import Expansion
    from memserve.model.workers.gpu_group import GpuWorkerGroup
    from memserve.model.workers.group import WorkerGroup

log = logging.getLogger(__name__)

_TRIAL_TOKENS, _TRIAL_CONTEXT, _TRIALS = 32, 512, 3


def choose_attention(
    arena: Tensor, geometry: KVGeometry, crew: WorkerGroup | GpuWorkerGroup | None = None
) -> AttentionFactory:
    """As :func:`~memserve.model.attention.backends.choose_backend`, for whatever the pages of ``arena`` keep."""
    if not geometry.latent:
        return choose_backend(arena, geometry, crew)
    return LatentPages(arena.view(-1), geometry).attention_of


@dataclass(frozen=True, slots=True)
class LatentCosts:
    """Nanoseconds of the parts of both ways, in one layer."""

    absorb: float
    """Of a new token: its queries times W_K, its results times W_V."""
    absorbed_pair: float
    """Of a new token and a token that it sees, all heads."""
    expand: float
    """Of a token of the context."""
    expanded_pair: float

    def choose_expanded(self, count: int, context: int) -> bool:
        """Whether ``count`` new tokens, the last of ``context``, cost less expanded."""
        pairs = count * (context - (count - 1) / 2)
        absorbed = count * self.absorb + pairs * self.absorbed_pair
        return context * self.expand + pairs * self.expanded_pair < absorbed


_measured: dict[Any, LatentCosts] = {}
"""By what they depend on."""


def find_costs(geometry: KVGeometry, expansion: Expansion) -> LatentCosts:
    """What both ways cost here; measured once in a process for layers of one shape."""
    shape = replace(geometry, num_layers=1), expansion.heads, expansion.key_dim, expansion.value_dim
    key = *shape, torch.get_num_threads()
    if key not in _measured:
        _measured[key] = measure_costs(geometry, expansion)
        log.info("latents of %d elements: %s", expansion.latent_dim, _measured[key])
    return _measured[key]


class LatentPages:
    """The pages of a device, with a scratch for what is expanded of them."""

    def __init__(self, arena: Tensor, geometry: KVGeometry, costs: LatentCosts | None = None) -> None:
        """``arena``: uint8 ``[bytes]`` on a CPU. ``costs``: None: they are measured when they are first needed."""
        self.geometry, self.costs = geometry, costs
        #: attention to latents, as one KV head
        self.attend_absorbed = choose_backend(arena, geometry)
        self._pages = ReferencePages(arena, geometry)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def attention_of(self, rows: StepRows) -> LatentAttention:
        """Of one step."""
        return LatentAttention(self, rows)

    def find_costs(self, expansion: Expansion) -> LatentCosts:
        """What both ways cost: looked up once, not in each step."""
        if self.costs is None:
            self.costs = find_costs(self.geometry, expansion)
        return self.costs

    def write_latents(self, layer: int, row: ExpandedRow, k: Tensor) -> None:
        """Store the new tokens of a row: ``k [1, 1, T, D]`` of the whole step."""
        blocks, offsets = row.places(self.geometry.block_tokens)
        self._pages.k[:, layer, 0].transpose(1, 2)[blocks, offsets] = k[0, 0, row.first : row.end]

    def attend_expanded(self, layer: int, row: ExpandedRow, q: Tensor, expansion: Expansion, **options: Any) -> Tensor:
        """``q [1, H, n, Dk]`` of a row whose latents are written -> ``[1, n, H, Dv]``. ``options``: ``scale`` and
        ``softcap``."""
        geometry, tokens, count = self.expanded_geometry(expansion), self.geometry.block_tokens, q.shape[2]
        entries = -(-row.context // tokens)
        if not has_kernel(geometry):
            latents, _ = self._pages.read_kv(layer, row.blocks[:entries], row.context)
            keys, values = expansion.expand(latents[None])
            dense = options["scale"], 0, options.get("softcap", 0.0), None
            return attend_dense(q[0], keys[0], values[0], *dense).transpose(0, 1)[None].contiguous()
        most = max(1, LATENT_SCRATCH_BYTES // geometry.block_bytes)
        own = min((row.context - count) // tokens, max(0, entries - most))  # where the last piece begins
        parts = []
        for begin, end in pairwise([*range(0, own, most), own]):
            pages = self.expand_blocks(layer, row.blocks[begin:end], expansion)
            kernel = _kernel_over(pages, geometry, (end - begin) * tokens, count, behind=True)
            parts.append(kernel.run_attention_part(0, q, None, **options))
        pages = self.expand_blocks(layer, row.blocks[own:entries], expansion)
        kernel = _kernel_over(pages, geometry, row.context - own * tokens, count, behind=False)
        if parts:
            parts.append(kernel.run_attention_part(0, q, None, **options))
            outputs, statistics = (torch.stack(pieces) for pieces in zip(*parts, strict=True))
            return merge_parts(outputs, statistics)[None].to(q.dtype)
        out = q.new_empty((1, count, expansion.heads, expansion.value_dim))
        kernel.run_attention_into(out, 0, q, None, **options)
        return out

    def expand_blocks(self, layer: int, blocks: Tensor, expansion: Expansion) -> Tensor:
        """The keys and values of ``blocks [n]``: pages, uint8, in the scratch until the next call."""
        geometry = self.expanded_geometry(expansion)
        size = len(blocks) * geometry.block_bytes
        if size > len(self._scratch):
            self._scratch = torch.empty(size, dtype=torch.uint8)
        scratch = self._scratch[:size]
        to, tokens = ReferencePages(scratch, geometry), geometry.block_tokens
        heads, latent_dim, key_dim = expansion.heads, expansion.latent_dim, expansion.key_dim
        latents = self._pages.k[blocks, layer, 0]  # [blocks, latent + rotary, tokens]
        plain = latents[:, :latent_dim].transpose(1, 2).reshape(-1, latent_dim)
        key_weight, value_weight = (weight.reshape(-1, latent_dim) for weight in expansion.weights)
        keys = (key_weight @ plain.t()).view(heads, key_dim, len(blocks), tokens)
        to.k[:, 0, :, :key_dim].copy_(keys.permute(2, 0, 1, 3))
        to.k[:, 0, :, key_dim:].copy_(latents[:, None, latent_dim:].expand(-1, heads, -1, -1))
        values = (plain @ value_weight.t()).view(len(blocks), tokens, heads, -1)
        to.v[:, 0].copy_(values.permute(0, 2, 1, 3))
        return scratch

    def expanded_geometry(self, expansion: Expansion) -> KVGeometry:
        """Of the keys and values that ``expansion`` makes of a layer's pages."""
        g = self.geometry
        key_dim = expansion.key_dim + g.head_dim_k - expansion.latent_dim
        return KVGeometry(1, expansion.heads, key_dim, expansion.value_dim, g.dtype, g.block_tokens)


class ExpandedRow:
    """A row of a step that is computed expanded."""

    __slots__ = ("blocks", "context", "end", "first")

    def __init__(self, table: NDArray[np.int32], first: int, end: int, context: int) -> None:
        """``table``: its blocks, and what may follow. Its tokens in the step are ``[first, end)``, the last of
        ``context``."""
        self.blocks = torch.as_tensor(table.astype(np.int64))
        self.first, self.end, self.context = first, end, context

    def places(self, block_tokens: int) -> tuple[Tensor, Tensor]:
        """Block and offset of each new token."""
        positions = torch.arange(self.context - (self.end - self.first), self.context)
        return self.blocks[positions // block_tokens], positions % block_tokens


class LatentAttention:
    """A step's attention, of layers that keep latents."""

    def __init__(self, pages: LatentPages, rows: StepRows) -> None:
        self._pages, self._rows = pages, rows
        self._absorbed: StepAttention | None = None  # None: no row, or not known yet
        self._absorbed_tokens: Tensor | None = None  # None: all
        self._expanded: list[ExpandedRow] | None = None  # None: not known yet

    def run_attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        expansion: Expansion | None = None,
        **options: Any,
    ) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        check(expansion is not None, "layer {} keeps no latents, and its pages do", layer)
        assert expansion is not None  # for types
        if self._expanded is None:
            is_plain = not options.get("window") and not options.get("chunk") and options.get("sinks") is None
            self._expanded = self._choose_rows(expansion) if is_plain else []
            self._absorbed = self._attend_others()
        if not self._expanded and self._absorbed is not None:
            absorbed = expansion.absorb_queries(q)
            return expansion.values_of(self._absorbed.run_attention(layer, absorbed, k, v, **options))
        # a row may read blocks that another one writes in this step: first all is written
        for row in self._expanded:
            self._pages.write_latents(layer, row, k)
        out = q.new_zeros((1, q.shape[2], q.shape[1], expansion.value_dim))
        if self._absorbed is not None and (at := self._absorbed_tokens) is not None:
            absorbed = expansion.absorb_queries(q[:, :, at])
            mixed = self._absorbed.run_attention(layer, absorbed, k[:, :, at], v[:, :, at], **options)
            out[:, at] = expansion.values_of(mixed)
        dense = {name: options[name] for name in ("scale", "softcap") if name in options}
        for row in self._expanded:
            queries = q[:, :, row.first : row.end]
            out[:, row.first : row.end] = self._pages.attend_expanded(layer, row, queries, expansion, **dense)
        return out

    def _choose_rows(self, expansion: Expansion) -> list[ExpandedRow]:
        """The rows that are computed expanded, in this layer and those behind it."""
        costs = self._pages.find_costs(expansion)
        rows, tables = self._rows, np.asarray(self._rows.tables)
        chosen = []
        for number, context in enumerate(rows.contexts.tolist()):
            first, end = rows.q_starts[number : number + 2].tolist()
            if end > first and costs.choose_expanded(end - first, context):
                chosen.append(ExpandedRow(tables[rows.table_rows[number]], first, end, context))
        return chosen

    def _attend_others(self) -> StepAttention | None:
        """Attention of the other rows. None: there are none."""
        rows = self._rows
        if not self._expanded:
            return self._pages.attend_absorbed(rows)
        counts, expanded = np.diff(rows.q_starts), {row.first for row in self._expanded}
        others = [number for number, count in enumerate(counts) if count and rows.q_starts[number] not in expanded]
        if not others:
            return None
        places = np.concatenate([np.arange(rows.q_starts[number], rows.q_starts[number + 1]) for number in others])
        ends = np.zeros(len(others) + 1, np.int32)
        np.cumsum(counts[others], out=ends[1:])
        self._absorbed_tokens = torch.as_tensor(places.astype(np.int64))
        contexts, table_rows = rows.contexts[others], rows.table_rows[others]
        return self._pages.attend_absorbed(StepRows(rows.tables, table_rows, ends, contexts))


def _kernel_over(pages: Tensor, geometry: KVGeometry, context: int, count: int, *, behind: bool) -> KernelAttention:
    """What attends ``count`` queries to ``context`` tokens in ``pages``, one block after the other. They are the last
    of these tokens, or (``behind``) come after them."""
    table = np.arange(len(pages) // geometry.block_bytes, dtype=np.int32)[None]
    ends, contexts = np.array([0, count], np.int32), np.array([context], np.int32)
    rows = StepRows(table, np.zeros(1, np.int32), ends, contexts)
    return KernelAttention(pages.data_ptr(), geometry, geometry.num_kv_heads, rows, behind=behind)


# -- what both ways cost


def measure_costs(geometry: KVGeometry, expansion: Expansion) -> LatentCosts:
    """Run the parts of both ways on a few pages, with few and with many tokens of context."""
    geometry = replace(geometry, num_layers=1)
    blocks = -(-_TRIAL_CONTEXT // geometry.block_tokens)
    pages = LatentPages(torch.zeros(blocks * geometry.block_bytes, dtype=torch.uint8), geometry)
    few, many = _TRIAL_TOKENS, blocks * geometry.block_tokens
    width = expansion.key_dim + geometry.head_dim_k - expansion.latent_dim
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((1, expansion.heads, few, width), generator=generator).to(getattr(torch, geometry.dtype))
    k = q.new_zeros((1, 1, few, geometry.head_dim_k))
    absorbed, mixed = expansion.absorb_queries(q), q.new_zeros((1, few, expansion.heads, expansion.latent_dim))
    table, ends = np.arange(blocks, dtype=np.int32)[None], np.array([0, few], np.int32)

    def attend_absorbed(context: int) -> Callable[[], object]:
        attention = pages.attend_absorbed(StepRows(table, ends[:1], ends, np.array([context], np.int32)))
        return lambda: attention.run_attention(0, absorbed, k, k[..., : expansion.latent_dim], scale=1.0)

    whole = pages.expanded_geometry(expansion)
    expanded = torch.zeros(blocks * whole.block_bytes, dtype=torch.uint8)
    keys, values = (q.new_zeros((expansion.heads, many, dim)) for dim in (width, expansion.value_dim))
    out = q.new_empty((1, few, expansion.heads, expansion.value_dim))

    def attend_expanded(context: int) -> Callable[[], object]:
        if not has_kernel(whole):
            return lambda: attend_dense(q[0], keys[:, :context], values[:, :context], 1.0, 0, 0.0, None)
        kernel = _kernel_over(expanded, whole, context, few, behind=False)
        return lambda: kernel.run_attention_into(out, 0, q, None, scale=1.0)

    work = {
        "absorb": lambda: (expansion.absorb_queries(q), expansion.values_of(mixed)),
        "absorbed few": attend_absorbed(few), "absorbed many": attend_absorbed(many),
        "expand": lambda: pages.expand_blocks(0, torch.arange(blocks), expansion),
        "expanded few": attend_expanded(few), "expanded many": attend_expanded(many),
    }  # fmt: skip
    ns = _nanoseconds(work)
    pairs = [max(0.0, ns[f"{way} many"] - ns[f"{way} few"]) / (few * (many - few)) for way in ("absorbed", "expanded")]
    return LatentCosts(ns["absorb"] / few, pairs[0], ns["expand"] / many, pairs[1])


def _nanoseconds(work: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median of some runs of each behind a first one, by turns."""
    for run in work.values():
        run()
    times: dict[str, list[int]] = {name: [] for name in work}
    with torch.inference_mode():
        for _ in range(_TRIALS):
            for name, run in work.items():
                began_ns = time.perf_counter_ns()
                run()
                times[name].append(time.perf_counter_ns() - began_ns)
    return {name: float(median(values)) for name, values in times.items()}
