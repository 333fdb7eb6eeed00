"""How KV lies in the tiers of an instance: sizes of blocks, and what is refused.

Instances of several workers: the options, and which part of the model and of every page a worker has.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from memserve.base.errors import UserError
from memserve.base.options import check_ranges, option
from memserve.base.types import AS_COMPUTED, KV_DTYPES, KVGeometry, Role
from memserve.base.units import flag_bytes, human_bytes

_CODED_HEAD_MAX = 1024


def lower_page_bytes(geometry: KVGeometry, lower_dtype: str) -> int:
    """Bytes of a page in the second tier (``_core.LowerPages``). With ``auto`` as in the first."""
    return geometry.page_bytes if lower_dtype == AS_COMPUTED else replace(geometry, kv_dtype=lower_dtype).page_bytes


def lower_block_bytes(geometry: KVGeometry, lower_dtype: str) -> int:
    """Bytes of a block in the second tier, over all layers."""
    return lower_page_bytes(geometry, lower_dtype) * geometry.num_layers


def hbm_blocks(geometry: KVGeometry, kv_memory_bytes: int) -> int:
    """Blocks of the first tier. Raises :class:`UserError` when it holds fewer than two."""
    blocks = kv_memory_bytes // geometry.block_bytes
    if blocks < 2:
        need = flag_bytes(2 * geometry.block_bytes)
        raise UserError(
            f"kv memory of {human_bytes(kv_memory_bytes)} holds {blocks} blocks of this model",
            hint=f"give at least --kv-memory {need}",
            param="kv_memory",
        )
    return blocks


def check_kv_dtypes(kv_dtype: str, lower_dtype: str, dram_memory_bytes: int) -> None:
    """Raises :class:`UserError` for dtypes that there are not, for one of a tier that there is not, and for KV that
    would be rounded twice."""
    for name, dtype in (("kv_dtype", kv_dtype), ("kv_lower_dtype", lower_dtype)):
        if dtype not in KV_DTYPES:
            hint = f"use one of {', '.join(KV_DTYPES)}"
            raise UserError(f"unknown {name.replace('_', ' ')} {dtype!r}", hint=hint, param=name)
    if lower_dtype not in (AS_COMPUTED, kv_dtype) and kv_dtype != AS_COMPUTED:
        hint = "leave out --kv-lower-dtype: DRAM then has KV as HBM has it"
        raise UserError(f"KV of {kv_dtype} is not rounded again to {lower_dtype}", hint=hint, param="kv_lower_dtype")
    if lower_dtype != AS_COMPUTED and not dram_memory_bytes:
        hint = "for example --dram-memory 2GiB, or leave out --kv-lower-dtype"
        raise UserError("there is no lower tier to keep KV in", hint=hint, param="kv_lower_dtype")


def check_coded(geometry: KVGeometry, lower_dtype: str) -> None:
    """Raises :class:`UserError` for KV that has no codes of the dtypes that are asked for."""
    if geometry.latent and geometry.kv_dtype != AS_COMPUTED:
        hint = "leave out --kv-dtype: a latent has few bytes as it is; --kv-lower-dtype rounds it in DRAM"
        raise UserError("latents that attention reads are kept as they are computed", hint=hint, param="kv_dtype")
    widest, unusual = max(geometry.head_dim_k, geometry.head_dim_v), geometry.block_tokens % 16
    if widest > _CODED_HEAD_MAX and (geometry.kv_dtype, lower_dtype) != (AS_COMPUTED, AS_COMPUTED):
        hint = "leave out --kv-dtype and --kv-lower-dtype"
        raise UserError(f"heads of {widest} elements have no KV of a byte or less", hint=hint, param="kv_dtype")
    if geometry.kv_dtype != AS_COMPUTED and unusual:
        hint = "use --block-tokens 16, 32 (the fastest) or another multiple of 16"
        text = f"KV as {geometry.kv_dtype} does not lie in blocks of {geometry.block_tokens} tokens"
        raise UserError(text, hint=hint, param="block_tokens")


def check_tiers(layerwise: str, lower_dtype: str, dram_memory_bytes: int, *, on_gpu: bool) -> None:
    """Raises :class:`UserError` for what needs a second tier, or a CPU. ``lower_dtype``: of KV in the second tier,
    where that is another one."""
    if layerwise != "off" and not dram_memory_bytes:
        hint = "for example --dram-memory 2GiB, or --layerwise off"
        raise UserError("KV by layer lies in DRAM, and there is none", hint=hint, param="layerwise")
    if lower_dtype != AS_COMPUTED and on_gpu:
        hint = "leave out --kv-lower-dtype, or use --device cpu"
        raise UserError("a lower tier with a dtype of its own is for CPUs so far", hint=hint, param="kv_lower_dtype")


COLUMN_UNIT = 64
"""Columns and vocabularies are cut at multiples of this: packed weights lie in blocks of 32 or 64 outputs."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Into how many workers an instance is divided."""

    tensor: int = option(1, "--tensor-parallel", least=1, most=64, vllm="tensor_parallel_size")
    """Workers of an instance that share each layer: heads, columns of the MLP and the vocabulary. On GPUs each worker
    has one of its own."""
    pipeline: int = option(1, "--pipeline-parallel", least=1, most=64, vllm="pipeline_parallel_size")
    """Stages of an instance that share the layers. Each has ``--tensor-parallel`` workers."""
    prefill_tensor: int | None = option(None, "--prefill-tensor-parallel", least=1, most=64)
    """``--tensor-parallel`` of prefill instances. None: that of all."""
    decode_tensor: int | None = option(None, "--decode-tensor-parallel", least=1, most=64)
    """``--tensor-parallel`` of decode instances. None: that of all."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def for_role(self, role: Role) -> Parallel:
        """Of an instance with ``role``."""
        role_tensor = {Role.PREFILL: self.prefill_tensor, Role.DECODE: self.decode_tensor}.get(role)
        return Parallel(self.tensor if role_tensor is None else role_tensor, self.pipeline)

    @property
    def worker_count(self) -> int:
        """Of one instance."""
        return self.tensor * self.pipeline

    def threads_each(self, threads: int) -> int:
        """Of ``threads`` of an instance, those of one worker."""
        return max(1, threads // self.worker_count)

    @property
    def text(self) -> str:
        """For names and logs; empty: one worker."""
        return "" if self.worker_count == 1 else f"tp{self.tensor}pp{self.pipeline}"


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker has. Rank ``stage * parts + part``; rank 0 leads."""

    part: int
    parts: int
    stage: int
    stages: int
    heads: tuple[int, ...]
    """KV heads of each part."""
    layers: tuple[int, ...]
    """Layers of each stage."""
    queries: tuple[int, ...] = ()
    """Query heads of each part. Empty: those of its KV heads."""
    whole_heads: bool = False
    """Every part has all KV heads: they are latents, which the queries of all parts read, or attention is not divided.
    On a CPU all workers map one arena, so a page still is there once, as with one worker: each writes the same bytes to
    it, and waits for no other."""

    @property
    def rank(self) -> int:
        """Of this worker."""
        return self.stage * self.parts + self.part

    @property
    def ranks(self) -> int:
        """Workers of the instance."""
        return self.parts * self.stages

    @property
    def first_head(self) -> int:
        """The first KV head of this part."""
        return 0 if self.whole_heads else sum(self.heads[: self.part])

    @property
    def shares_heads(self) -> bool:
        """Whether queries of a part may read KV heads of another one."""
        return bool(self.queries)

    def head_ranges(self) -> list[HeadRange]:
        """The KV heads that this part's queries read, in the order in which they are to be computed: those that other
        parts read too, other own ones, those of other parts."""
        group = sum(self.queries) // sum(self.heads)
        cuts = list(itertools.accumulate(self.queries, initial=0))
        owners = [part for part, count in enumerate(self.heads) for _ in range(count)]
        first, end = cuts[self.part], cuts[self.part + 1]
        ranges: list[HeadRange] = []
        for head in range(first // group, -(-end // group)):
            begin, stop = max(first, head * group), min(end, (head + 1) * group)
            is_whole = stop - begin == group
            last = ranges[-1] if ranges else None
            if last and is_whole and last.is_whole and last.owner == owners[head]:
                ranges[-1] = replace(last, heads=last.heads + 1, queries=last.queries + group)
            else:
                ranges.append(HeadRange(owners[head], head, 1, begin - first, stop - begin, is_whole))
        return sorted(ranges, key=lambda head_range: 2 if head_range.owner != self.part else int(head_range.is_whole))

    @property
    def own_layers(self) -> range:
        """Of this stage."""
        first = sum(self.layers[: self.stage])
        return range(first, first + self.layers[self.stage])

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.stages - 1


@dataclass(frozen=True, slots=True)
class HeadRange:
    """KV heads that some of a part's queries read."""

    owner: int
    """The part that computes and writes their keys and values."""
    first: int
    heads: int
    first_query: int
    """Among the part's own."""
    queries: int
    is_whole: bool
    """Whether all queries of these heads are the part's."""


def shares(
    parallel: Parallel, geometry: KVGeometry, query_heads: int = 0, *, whole_heads: bool = False, layers: int = 0
) -> list[Share]:
    """One for each worker, by rank. ``query_heads`` of the model; 0: each part has those of its KV heads.
    ``whole_heads``: attention is not divided. ``layers``: of the model; 0: all of them attend. Raises
    :class:`UserError` for a model with too few heads or layers."""
    layers = layers or geometry.num_layers
    whole_heads |= geometry.latent
    if parallel.tensor > geometry.num_kv_heads and not whole_heads:
        hint = f"use --tensor-parallel 1 to {geometry.num_kv_heads}; more workers by --pipeline-parallel"
        text = f"{parallel.tensor} workers cannot share the {geometry.num_kv_heads} KV heads of this model"
        raise UserError(text, hint=hint, param="tensor")
    if parallel.pipeline > layers:
        hint = f"use --pipeline-parallel 1 to {layers}"
        text = f"{parallel.pipeline} stages cannot share the {layers} layers of this model"
        raise UserError(text, hint=hint, param="pipeline")
    whole = (geometry.num_kv_heads,) * parallel.tensor
    heads = whole if whole_heads else even(geometry.num_kv_heads, parallel.tensor)
    sizes, queries = (parallel.tensor, parallel.pipeline), () if whole_heads else query_parts(heads, query_heads)
    return [
        Share(part, sizes[0], stage, sizes[1], heads, even(layers, parallel.pipeline), queries, whole_heads)
        for stage in range(sizes[1])
        for part in range(sizes[0])
    ]


def query_parts(heads: tuple[int, ...], query_heads: int) -> tuple[int, ...]:
    """Query heads of each part, so that parts with fewer KV ``heads`` have more of them, and all have as much to
    compute: a query head costs two products (queries, output), and a KV head two (keys, values). Each part has at least
    one query of each of its KV heads. Empty: KV heads divide evenly, or have one query each."""
    group, rest = divmod(query_heads, sum(heads))
    if group < 2 or rest or min(heads) == max(heads):
        return ()
    parts, whole, before = len(heads), query_heads + sum(heads), list(itertools.accumulate(heads))
    cuts = [0]
    for part, count in enumerate(before[:-1], 1):
        cut = (2 * part * whole + parts) // (2 * parts) - count
        cuts.append(min(max(cut, (count - 1) * group + 1), (count + 1) * group - 1))
    return tuple(end - start for start, end in itertools.pairwise([*cuts, query_heads]))


def even(count: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """``count`` in ``parts``, at multiples of ``unit`` and as alike as can be, the larger ones first."""
    units = -(-count // unit)
    cuts = [min(count, (units * part + parts - 1) // parts * unit) for part in range(parts + 1)]
    return tuple(end - start for start, end in itertools.pairwise(cuts))
