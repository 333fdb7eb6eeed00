"""Where the bytes of vLLM's blocks lie: every layout that vLLM has, read and written through addresses alone."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from memserve import UserError
from memserve.integrations.vllm.memory import HostMemory

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 6
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def caches_of(layout: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """As vLLM registers them: views ``[B, H, N, C]`` of one allocation, filled with numbers that are all different."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
    whole = torch.arange(LAYERS * BLOCKS * HEADS * TOKENS * CONTENT).to(dtype).reshape([sizes[one] for one in layout])
    ordered = whole.permute([layout.index(one) for one in "LBHNC"])
    return {f"layers.{at}": ordered[at] for at in range(LAYERS)}


def block_bytes(memory: HostMemory, block_id: int) -> bytes:
    return b"".join(ctypes.string_at(at, nbytes) for at, nbytes in memory.block_pieces(block_id))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_whole(layout: str) -> None:
    caches = caches_of(layout)
    memory = HostMemory(caches, BLOCKS)
    for block_id in range(BLOCKS):
        read = torch.frombuffer(bytearray(block_bytes(memory, block_id)), dtype=torch.float32)
        wanted = torch.cat([cache[block_id].flatten() for cache in caches.values()])
        assert sorted(read.tolist()) == sorted(wanted.tolist())
    assert memory.layout.nbytes == LAYERS * HEADS * TOKENS * CONTENT * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_round_trips_between_engines(layout: str) -> None:
    """The bytes of block 1 of one engine, put into block 4 of another."""
    mine, theirs = caches_of(layout), {name: torch.zeros_like(cache) for name, cache in caches_of(layout).items()}
    theirs = {name: torch.empty_strided(c.shape, c.stride()).zero_() for name, c in mine.items()}
    source, target = HostMemory(mine, BLOCKS), HostMemory(theirs, BLOCKS)
    assert source.layout == target.layout
    for (at, nbytes), (to, room) in zip(source.block_pieces(1), target.block_pieces(4), strict=True):
        assert nbytes == room
        ctypes.memmove(to, at, nbytes)
    for name, cache in theirs.items():
        assert torch.equal(cache[4], mine[name][1])
        assert not cache[:4].any()


def test_runs_are_as_long_as_they_can_be() -> None:
    pieces = {layout: len(HostMemory(caches_of(layout), BLOCKS).layout.piece_bytes) for layout in LAYOUTS}
    assert pieces == {"LBHNC": 3, "LBNHC": 3, "BLHNC": 3, "BLNHC": 3, "LHBNC": 6, "BHLNC": 6}


def test_layouts_that_differ_have_other_digests() -> None:
    """Two KV heads of four tokens, four of two: the bytes are as many, and mean another thing."""
    digests = [HostMemory(caches_of(layout), BLOCKS).layout.digest for layout in ("LBHNC", "LBNHC")]
    digests.append(HostMemory(caches_of("LBHNC", torch.float16), BLOCKS).layout.digest)
    turned = {name: cache.contiguous().reshape(BLOCKS, 4, 2, CONTENT) for name, cache in caches_of("LBHNC").items()}
    digests.append(HostMemory(turned, BLOCKS).layout.digest)
    renamed = {f"other.{name}": cache for name, cache in caches_of("LBHNC").items()}
    digests.append(HostMemory(renamed, BLOCKS).layout.digest)
    assert all(one != other for one, other in itertools.combinations(digests, 2))


def test_several_kernel_blocks_are_one_block() -> None:
    cache = torch.arange(BLOCKS * 2 * 8, dtype=torch.float32).reshape(BLOCKS * 2, 2, 4)
    memory = HostMemory({"a": cache}, BLOCKS)
    assert block_bytes(memory, 3) == cache[6:8].numpy().tobytes()


def test_layers_that_share_their_kv_are_kept_once() -> None:
    cache = torch.zeros(BLOCKS, 2, 4)
    assert len(HostMemory({"a": cache, "b": cache}, BLOCKS).layout.piece_bytes) == 1


def test_unsupported_cache_layouts_are_refused() -> None:
    with pytest.raises(UserError, match="5 blocks"):
        HostMemory({"a": torch.zeros(2, BLOCKS, 4)}, BLOCKS)
    with pytest.raises(UserError, match="not in host memory"):
        HostMemory({"a": torch.zeros(BLOCKS, 4, device="meta")}, BLOCKS)
    with pytest.raises(UserError, match="no KV memory"):
        HostMemory({}, BLOCKS)
    with pytest.raises(UserError, match="block 5 of 5"):
        HostMemory({"a": torch.zeros(BLOCKS, 4)}, BLOCKS).block_pieces(5)
