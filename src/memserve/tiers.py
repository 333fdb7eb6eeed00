"""How KV lies in the tiers of an instance: sizes of blocks, and what is refused."""

from __future__ import annotations

from memserve.errors import UserError
from memserve.types import KVGeometry
from memserve.units import flag_bytes, human_bytes

AS_COMPUTED = "auto"
LOWER_DTYPES = (AS_COMPUTED, "int8", "fp8")
"""Of values in the second tier. ``auto``: as they were computed; the others take a byte, and are not lossless."""

_ALIGN = 64
_SCALE_BYTES = 4


def lower_page_bytes(geometry: KVGeometry, lower_dtype: str) -> int:
    """Bytes of a page in the second tier: a byte a value, and a scale for each K and V of a head
    (``_core.LowerPages``). With ``auto`` as in the first."""
    if lower_dtype == AS_COMPUTED:
        return geometry.page_bytes
    run_bytes = geometry.block_tokens * (geometry.head_dim_k + geometry.head_dim_v) + 2 * _SCALE_BYTES
    return -(-geometry.num_kv_heads * run_bytes // _ALIGN) * _ALIGN


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


def check_lower_dtype(lower_dtype: str, dram_memory_bytes: int) -> None:
    """Raises :class:`UserError` for a dtype that there is not, and for one of a tier that there is not."""
    if lower_dtype not in LOWER_DTYPES:
        hint = f"use one of {', '.join(LOWER_DTYPES)}"
        raise UserError(f"unknown lower dtype {lower_dtype!r}", hint=hint, param="kv_lower_dtype")
    if lower_dtype != AS_COMPUTED and not dram_memory_bytes:
        hint = "for example --dram-memory 2GiB, or leave out --kv-lower-dtype"
        raise UserError("there is no lower tier to keep KV in", hint=hint, param="kv_lower_dtype")


def check_tiers(layerwise: str, lower_dtype: str, dram_memory_bytes: int, *, on_gpu: bool) -> None:
    """Raises :class:`UserError` for what needs a second tier, or a CPU."""
    if layerwise != "off" and not dram_memory_bytes:
        hint = "for example --dram-memory 2GiB, or --layerwise off"
        raise UserError("KV by layer lies in DRAM, and there is none", hint=hint, param="layerwise")
    if lower_dtype != AS_COMPUTED and on_gpu:
        hint = "leave out --kv-lower-dtype, or use --device cpu"
        raise UserError("a lower tier with a dtype of its own is for CPUs so far", hint=hint, param="kv_lower_dtype")
