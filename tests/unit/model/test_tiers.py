"""Sizes of the tiers, and what is refused of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from geometries import SHAPES
from memserve.base.config import EngineOptions, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.kv_layout import lower_block_bytes, lower_page_bytes
from memserve.base.types import KV_DTYPES, CopyBlocks, KVGeometry, Tier
from memserve.base.units import MIB
from memserve.model.arena import ArenaSizes, KvArenas, lower_pages

GEOMETRIES = [
    KVGeometry(3, 2, 8, 8, "float32", 8),
    KVGeometry(2, 1, 192, 128, "float16", 1),
    KVGeometry(1, 7, 3, 5, "float32", 3),
    *(shape.kv for shape in SHAPES.values()),
]
SMOLLM2 = SHAPES["smollm2"].kv


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=repr)
@pytest.mark.parametrize("lower", KV_DTYPES)
def test_sizes_are_those_of_the_native_conversion(geometry: KVGeometry, lower: str) -> None:
    native = lower_pages(geometry, lower)
    page_bytes = geometry.page_bytes if native is None else native.lower_page_bytes
    assert lower_page_bytes(geometry, lower) == page_bytes
    assert lower_block_bytes(geometry, lower) == page_bytes * geometry.num_layers
    assert native is None or native.page_bytes == geometry.page_bytes


def test_blocks_are_converted_on_their_way_and_not_inside_a_tier() -> None:
    """A pool with two sizes of blocks: whatever numbers they have, each page of a block goes to its own place."""
    geometry = KVGeometry(3, 2, 8, 8, "float32", 8)
    native = lower_pages(geometry, "int8")
    assert native is not None
    lower_bytes = lower_block_bytes(geometry, "int8")
    arenas = KvArenas(ArenaSizes(geometry.block_bytes, 6, 40), shared=True, lower=native)
    assert arenas.hbm.shape == (6, geometry.block_bytes) and arenas.dram.shape == (40, lower_bytes)
    assert set(arenas.shared) == {Tier.HBM}, "peers know of one kind of page"
    values = torch.randn(6, geometry.block_bytes // 4)
    arenas.hbm.copy_(values.view(torch.uint8))

    arenas.copy_blocks(CopyBlocks(Tier.HBM, Tier.DRAM, [5, 0, 2], [39, 1, 0]))
    pages = np.arange(3, dtype=np.int32)
    for above, below in ((5, 39), (0, 1), (2, 0)):
        expected = np.zeros(lower_bytes, np.uint8)
        native.down(expected.ctypes.data, arenas.hbm[above].data_ptr(), pages, pages)
        assert np.array_equal(arenas.dram[below].numpy(), expected)
    assert not arenas.dram[2:39].any()

    arenas.copy_blocks(CopyBlocks(Tier.DRAM, Tier.DRAM, [39], [7]))
    arenas.copy_blocks(CopyBlocks(Tier.HBM, Tier.HBM, [1], [5]))
    arenas.copy_blocks(CopyBlocks(Tier.DRAM, Tier.HBM, [7], [2]))
    assert torch.equal(arenas.hbm[5], arenas.hbm[1]), "copied, and not rounded"
    came_up = arenas.hbm[2].view(torch.float32)
    assert not torch.equal(came_up, values[5]) and torch.allclose(came_up, values[5], atol=0.02)
    for tiers, src, dst in (
        ((Tier.HBM, Tier.DRAM), 6, 0),
        ((Tier.DRAM, Tier.HBM), 39, 6),
        ((Tier.DRAM, Tier.HBM), 40, 0),
    ):
        with pytest.raises(IndexError):
            arenas.copy_blocks(CopyBlocks(*tiers, [src], [dst]))


def test_a_lower_dtype_doubles_dram_and_has_its_own_namespace() -> None:
    options = {"kv_memory_bytes": 64 * MIB, "dram_memory_bytes": 128 * MIB}
    configs = [
        EngineOptions(**options, kv_lower_dtype=lower).instance_config(SMOLLM2, 8192, "weights") for lower in KV_DTYPES
    ]
    exact, int8, fp8, int4 = (config.pool for config in configs)
    assert exact.hbm_blocks == int8.hbm_blocks == fp8.hbm_blocks == int4.hbm_blocks
    assert 1.93 * exact.dram_blocks < int8.dram_blocks == fp8.dram_blocks < 2 * exact.dram_blocks
    assert 3.5 * exact.dram_blocks < int4.dram_blocks < 4 * exact.dram_blocks
    assert int8.block_bytes_by_tier == (SMOLLM2.block_bytes, lower_block_bytes(SMOLLM2, "int8"))
    assert configs[0].namespace == "weights"
    assert len({config.namespace for config in configs}) == 4, "no KV goes from one to another"


@pytest.mark.parametrize("lower", ["auto", "int8"])
def test_int8_kv_holds_twice_and_has_its_own_namespace(lower: str) -> None:
    """``--kv-lower-dtype`` of the same name says nothing more: no page is rounded twice."""
    options = {"kv_memory_bytes": 64 * MIB, "dram_memory_bytes": 128 * MIB}
    plain = EngineOptions(**options).instance_config(SMOLLM2, 8192, "weights")
    below = EngineOptions(**options, kv_lower_dtype="int8").instance_config(SMOLLM2, 8192, "weights")
    coded = replace(SMOLLM2, kv_dtype="int8")
    options |= {"kv_dtype": "int8", "kv_lower_dtype": lower}
    config = EngineOptions(**options).instance_config(coded, 8192, "weights")
    assert len({plain.namespace, below.namespace, config.namespace}) == 3
    assert 1.93 < config.pool.hbm_blocks / plain.pool.hbm_blocks < 2
    assert config.pool.dram_blocks == 128 * MIB // coded.block_bytes and config.pool.lower_dtype == "auto"
    assert lower_pages(coded, config.pool.lower_dtype) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_lower_dtype": "int3", "dram_memory_bytes": MIB}, "int3.*one of auto, int8, fp8, int4"),
        ({"kv_dtype": "int3"}, "unknown kv dtype.*int3.*one of auto, int8, fp8, int4"),
        ({"kv_dtype": "int8", "kv_lower_dtype": "fp8", "dram_memory_bytes": MIB}, "int8 is not rounded again to fp8"),
        ({"kv_lower_dtype": "int8"}, "no lower tier.*--dram-memory 2GiB"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineOptions(**options)


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (replace(SMOLLM2, block_tokens=8), "int8 does not lie in blocks of 8 tokens.*multiple of 16"),
        (replace(SMOLLM2, head_dim_v=2048), "heads of 2048 elements have no KV of a byte or less"),
    ],
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_coded_kv_that_cannot_be_served_is_refused(geometry: KVGeometry, message: str, on_gpu: bool) -> None:
    options, coded = EngineOptions(kv_dtype="int8"), replace(geometry, kv_dtype="int8")
    with pytest.raises(UserError, match=message):
        options.instance_config(coded, 8192, "weights", on_gpu=on_gpu)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
def test_gpu_has_blocks_and_namespace_of_a_cpu(kv_dtype: str) -> None:
    options = EngineOptions(kv_dtype=kv_dtype, dram_memory_bytes=MIB, scheduler=SchedulerConfig(layerwise="auto"))
    coded = replace(SMOLLM2, kv_dtype=kv_dtype)
    on_cpu, on_gpu = (options.instance_config(coded, 8192, "weights", on_gpu=on_gpu) for on_gpu in (False, True))
    assert on_gpu.namespace == on_cpu.namespace and on_gpu.pool == on_cpu.pool


def test_lower_dtype_needs_cpu_and_layerwise_does_not() -> None:
    with pytest.raises(UserError, match="for CPUs so far"):
        options = EngineOptions(dram_memory_bytes=MIB, kv_lower_dtype="int8")
        options.instance_config(SMOLLM2, 8192, "weights", on_gpu=True)
    layered = EngineOptions(dram_memory_bytes=MIB, scheduler=SchedulerConfig(layerwise="auto"))
    given = layered.instance_config(SMOLLM2, 8192, "weights", on_gpu=True, kv_bytes=8 * MIB)
    assert given.scheduler.layerwise == "auto"
    assert given.pool.hbm_blocks == 8 * MIB // SMOLLM2.block_bytes
