"""Instances of several workers: the options, and which part of the model and of every page a worker has."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from memserve.errors import UserError
from memserve.options import check_ranges, option
from memserve.types import KVGeometry, Role

COLUMN_UNIT = 64
"""Columns and vocabularies are cut at multiples of this: packed weights lie in blocks of 32 or 64 outputs."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Into how many workers an instance is divided."""

    tensor: int = option(1, "--tensor-parallel", least=1, most=64, vllm="tensor_parallel_size")
    """Workers of an instance that share each layer: heads, columns of the MLP and the vocabulary."""
    pipeline: int = option(1, "--pipeline-parallel", least=1, most=64, vllm="pipeline_parallel_size")
    """Stages of an instance that share the layers. Each has ``--tensor-parallel`` workers."""
    prefill_tensor: int | None = option(None, "--prefill-tensor-parallel", least=1, most=64)
    """``--tensor-parallel`` of prefill instances. None: that of all."""
    decode_tensor: int | None = option(None, "--decode-tensor-parallel", least=1, most=64)
    """``--tensor-parallel`` of decode instances. None: that of all."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def of(self, role: Role) -> Parallel:
        """Of an instance with ``role``."""
        own = {Role.PREFILL: self.prefill_tensor, Role.DECODE: self.decode_tensor}.get(role)
        return Parallel(self.tensor if own is None else own, self.pipeline)

    @property
    def workers(self) -> int:
        """Of one instance."""
        return self.tensor * self.pipeline

    def threads_each(self, threads: int) -> int:
        """Of ``threads`` of an instance, those of one worker."""
        return max(1, threads // self.workers)

    @property
    def text(self) -> str:
        """For names and logs; empty: one worker."""
        return "" if self.workers == 1 else f"tp{self.tensor}pp{self.pipeline}"


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
        return sum(self.heads[: self.part])

    @property
    def own_layers(self) -> range:
        """Of this stage."""
        first = sum(self.layers[: self.stage])
        return range(first, first + self.layers[self.stage])

    @property
    def is_last_stage(self) -> bool:
        """Whether it computes logits."""
        return self.stage == self.stages - 1


def shares(parallel: Parallel, geometry: KVGeometry) -> list[Share]:
    """One for each worker, by rank. Raises :class:`UserError` for a model with too few heads or layers."""
    if parallel.tensor > geometry.num_kv_heads:
        hint = f"use --tensor-parallel 1 to {geometry.num_kv_heads}; more workers by --pipeline-parallel"
        text = f"{parallel.tensor} workers cannot share the {geometry.num_kv_heads} KV heads of this model"
        raise UserError(text, hint=hint, param="tensor")
    if parallel.pipeline > geometry.num_layers:
        hint = f"use --pipeline-parallel 1 to {geometry.num_layers}"
        text = f"{parallel.pipeline} stages cannot share the {geometry.num_layers} layers of this model"
        raise UserError(text, hint=hint, param="pipeline")
    heads = even(geometry.num_kv_heads, parallel.tensor)
    layers = even(geometry.num_layers, parallel.pipeline)
    sizes = parallel.tensor, parallel.pipeline
    return [
        Share(part, sizes[0], stage, sizes[1], heads, layers) for stage in range(sizes[1]) for part in range(sizes[0])
    ]


def even(count: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """``count`` in ``parts``, at multiples of ``unit`` and as alike as can be, the larger ones first."""
    units = -(-count // unit)
    cuts = [min(count, (units * part + parts - 1) // parts * unit) for part in range(parts + 1)]
    return tuple(end - start for start, end in itertools.pairwise(cuts))
