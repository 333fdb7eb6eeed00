"""Groups of layers, and what KV memory holds of a model with a recurrent state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memserve.base.config import EngineOptions, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.kv_layout import Parallel
from memserve.base.layer_kv import LayerKv
from memserve.base.states import (
    NO_STATE,
    StateGeometry,
    StatePages,
    StatePart,
    cache_groups,
    divide_memory,
    naming_geometry,
)
from memserve.base.types import KVGeometry, Role
from memserve.base.units import GIB, KIB, MIB, parse_bytes

QWEN3_NEXT = StateGeometry(
    tuple(
        part
        for layer in range(36)
        for part in (
            StatePart(layer, "conv", 0, (8192, 4), "bfloat16"),
            StatePart(layer, "recurrent", 0, (32, 128, 128), "float32"),
        )
    )
)
QWEN3_NEXT_KV = KVGeometry(12, 2, 256, 256, "bfloat16")
LFM2 = StateGeometry(tuple(StatePart(layer, "conv", 0, (2048, 3), "bfloat16") for layer in range(10)))
LFM2_KV = KVGeometry(6, 8, 64, 64, "bfloat16")
MAMBA = StateGeometry((StatePart(0, "recurrent", 0, (1536, 16), "float32"),), attends=False)
NO_KV = naming_geometry(MAMBA, "bfloat16", 32)


def test_parts_lie_one_behind_the_other() -> None:
    states = StateGeometry((StatePart(0, "conv", 0, (3, 5), "bfloat16"), StatePart(1, "recurrent", 0, (7,), "float32")))
    assert states.offsets == (0, 64, 128) and states.nbytes == 128
    assert [part.nbytes for part in states.parts] == [30, 28]
    assert states.digest != StateGeometry(states.parts[::-1]).digest
    assert states and not NO_STATE and NO_STATE.nbytes == 0


def test_groups_say_what_a_token_and_a_sequence_take() -> None:
    whole = LayerKv(QWEN3_NEXT_KV.num_kv_heads, QWEN3_NEXT_KV.head_dim_k, QWEN3_NEXT_KV.head_dim_v)
    layers = [whole] * 10 + [replace(whole, window=64)] * 2
    groups = cache_groups(QWEN3_NEXT_KV, layers, QWEN3_NEXT)
    assert [(group.kind, group.layers, group.reach) for group in groups] == [
        ("full", 10, 0),
        ("window", 2, 64),
        ("state", 36, 0),
    ]
    assert [group.token_bytes for group in groups] == [10 * 2048, 2 * 2048, 0]
    assert groups[2].sequence_bytes == 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4)
    assert "2 layers of kind window of 64" in str(groups[1])
    assert [group.kind for group in cache_groups(LFM2_KV, [LayerKv(8, 64, 64)] * 6, NO_STATE)] == ["full"]


@pytest.mark.parametrize(("states", "geometry"), [(QWEN3_NEXT, QWEN3_NEXT_KV), (LFM2, LFM2_KV), (MAMBA, NO_KV)])
@pytest.mark.parametrize("kv_bytes", [64 * MIB, 3000 * MIB, 12345 * MIB + 17])
@pytest.mark.parametrize("slots", [1, 64])
@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_memory_is_never_exceeded(
    states: StateGeometry, geometry: KVGeometry, kv_bytes: int, slots: int, draft_tokens: int
) -> None:
    of_one_row = draft_tokens + 1 if draft_tokens else 0
    try:
        divided = divide_memory(geometry, states, kv_bytes, slots, draft_tokens=draft_tokens)
    except UserError:
        assert kv_bytes < (8 + 4 * of_one_row) * states.nbytes + 16 * geometry.block_bytes
        return
    assert of_one_row <= divided.pages.draft_states <= max(of_one_row, divided.slots) * (draft_tokens > 0)
    used = (divided.slots + divided.pages.draft_states) * states.nbytes + divided.blocks * geometry.block_bytes
    assert kv_bytes - geometry.block_bytes < used <= kv_bytes
    assert 1 <= divided.slots <= slots
    assert divided.pages.pages_each * geometry.block_bytes >= states.nbytes


def test_asked_sequences_take_more_than_a_quarter() -> None:
    by_default, asked = (
        divide_memory(QWEN3_NEXT_KV, QWEN3_NEXT, 40 * GIB, 400, is_asked=is_asked) for is_asked in (False, True)
    )
    assert by_default.slots == 40 * GIB // 4 // QWEN3_NEXT.nbytes < 140
    assert asked.slots == 400 and asked.blocks * QWEN3_NEXT_KV.block_bytes >= 40 * GIB // 4
    assert divide_memory(QWEN3_NEXT_KV, QWEN3_NEXT, 40 * GIB, 999, is_asked=True).blocks >= asked.blocks * 0.9


def test_blocks_that_only_name_tokens_are_small() -> None:
    for block_tokens in (4, 32, 128):
        geometry = naming_geometry(MAMBA, "bfloat16", block_tokens)
        least = 4 * block_tokens  # of an element of K and of V
        assert least <= geometry.block_bytes <= max(least, MAMBA.nbytes // 1024) and geometry.num_layers == 1
    large = StateGeometry((StatePart(0, "recurrent", 0, (8, 1024, 1024), "float32"),), attends=False)
    pages = divide_memory(naming_geometry(large, "bfloat16", 32), large, 512 * MIB, 4).pages
    assert 1024 <= pages.pages_each < 1100


def test_small_states_share_a_block() -> None:
    pages = divide_memory(LFM2_KV, LFM2, 64 * MIB, 8).pages
    assert pages == StatePages(120 * KIB, 1, 3) and LFM2_KV.block_bytes == 384 * KIB
    large = divide_memory(QWEN3_NEXT_KV, QWEN3_NEXT, 3000 * MIB, 8).pages
    assert (large.pages_each, large.per_block) == (99, 1)
    assert large.pages_each * QWEN3_NEXT_KV.block_bytes - large.state_bytes < QWEN3_NEXT_KV.block_bytes


@pytest.mark.parametrize(("states", "geometry"), [(QWEN3_NEXT, QWEN3_NEXT_KV), (LFM2, LFM2_KV), (MAMBA, NO_KV)])
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_too_little_memory_says_how_much_would_do(
    states: StateGeometry, geometry: KVGeometry, draft_tokens: int
) -> None:
    with pytest.raises(UserError, match="is too little for a model whose state takes") as refused:
        divide_memory(geometry, states, states.nbytes, 8, draft_tokens=draft_tokens)
    advised = parse_bytes((refused.value.hint or "").split()[-1])
    assert divide_memory(geometry, states, advised, 8, draft_tokens=draft_tokens).slots >= 1


def test_where_kv_of_windows_lies_does_not_depend_on_degrees() -> None:
    """Prefill and decode instances exchange KV, whose bytes are those of one worker."""
    options = EngineOptions(parallel=Parallel(prefill_tensor=2))
    assert [options.for_role(role).keeps_windows_apart() for role in (Role.PREFILL, Role.DECODE)] == [True, True]
    assert EngineOptions().for_role(Role.DECODE).keeps_windows_apart()
    assert not EngineOptions().keeps_windows_apart(on_gpu=True)
    with pytest.raises(UserError, match="by layer"):
        EngineOptions(window_kv="apart", scheduler=SchedulerConfig(layerwise="auto")).keeps_windows_apart()


@pytest.mark.parametrize(
    ("options", "on_gpu", "text"),
    [
        ({"lora": ("one=folder",)}, True, "on a GPU with adapters"),
        ({"scheduler": SchedulerConfig(draft_tokens=2)}, True, "on a GPU with drafts"),
        ({"scheduler": SchedulerConfig(layerwise="auto")}, False, "by layer"),
    ],
)
def test_states_are_refused_with_what_is_not_there(options: dict[str, Any], on_gpu: bool, text: str) -> None:
    with pytest.raises(UserError, match=text):
        EngineOptions(**options).check_states(LFM2, on_gpu=on_gpu)
    EngineOptions(lora=("one=folder",), scheduler=SchedulerConfig(draft_tokens=2)).check_states(LFM2)
