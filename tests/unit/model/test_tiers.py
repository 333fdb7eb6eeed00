"""Sizes of the tiers, and what is refused of them."""

from __future__ import annotations

import pytest

from memserve.config import EngineOptions, SchedulerConfig
from memserve.errors import UserError
from memserve.model.arena import lower_pages
from memserve.tiers import LOWER_DTYPES, lower_block_bytes, lower_page_bytes
from memserve.types import KVGeometry
from memserve.units import MIB

GEOMETRIES = [
    KVGeometry(30, 3, 64, 64, "bfloat16"),
    KVGeometry(3, 2, 8, 8, "float32", 8),
    KVGeometry(2, 1, 192, 128, "float16", 1),
    KVGeometry(1, 7, 3, 5, "float32", 3),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=repr)
@pytest.mark.parametrize("lower", LOWER_DTYPES)
def test_sizes_are_those_of_the_native_conversion(geometry: KVGeometry, lower: str) -> None:
    native = lower_pages(geometry, lower)
    page_bytes = geometry.page_bytes if native is None else native.lower_page_bytes
    assert lower_page_bytes(geometry, lower) == page_bytes
    assert lower_block_bytes(geometry, lower) == page_bytes * geometry.num_layers
    assert native is None or native.page_bytes == geometry.page_bytes


def test_a_lower_dtype_doubles_dram_and_has_its_own_namespace() -> None:
    options = {"kv_memory_bytes": 64 * MIB, "dram_memory_bytes": 128 * MIB}
    configs = [
        EngineOptions(**options, kv_lower_dtype=lower).instance_config(GEOMETRIES[0], 8192, "weights")
        for lower in LOWER_DTYPES
    ]
    exact, int8, fp8 = (config.pool for config in configs)
    assert exact.hbm_blocks == int8.hbm_blocks == fp8.hbm_blocks
    assert 1.98 * exact.dram_blocks < int8.dram_blocks == fp8.dram_blocks < 2 * exact.dram_blocks
    assert int8.block_bytes_by_tier == (GEOMETRIES[0].block_bytes, lower_block_bytes(GEOMETRIES[0], "int8"))
    assert configs[0].namespace == "weights"
    assert len({config.namespace for config in configs}) == 3, "no KV goes from one to another"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_lower_dtype": "int4", "dram_memory_bytes": MIB}, "int4.*one of auto, int8, fp8"),
        ({"kv_lower_dtype": "int8"}, "no lower tier.*--dram-memory 2GiB"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineOptions(**options)


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(dram_memory_bytes=MIB, kv_lower_dtype="int8"),
        EngineOptions(dram_memory_bytes=MIB, scheduler=SchedulerConfig(layerwise="auto")),
    ],
)
def test_what_converts_or_passes_layers_needs_a_cpu(options: EngineOptions) -> None:
    with pytest.raises(UserError, match="for CPUs so far"):
        options.instance_config(GEOMETRIES[0], 8192, "weights", on_gpu=True)
