"""Pages of codes: the native conversion beside a plain one, its error, and that nothing drifts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from memserve import _core
from memserve.base.types import KVGeometry
from memserve.model.attention.reference import CodedReferencePages, ReferencePages

BLOCK_TOKENS = 12
HEADS, KEYS, VALUES = 2, 12, 40
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOWER = ("int8", "fp8", "int4")
KINDS = list(itertools.product(DTYPES, LOWER))
GROUP = {"int8": 1024, "fp8": 1024, "int4": 32}
#: half of the widest distance between two codes, in units of the largest: what a value may be off
ERRORS = {"int8": 0.5 / 127, "fp8": 16 / 448, "int4": 0.5 / 7}
#: of a value; a maximum has eight bits
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-10}
Bytes = NDArray[np.uint8]


def geometry(dtype: str, lower: str = "auto") -> KVGeometry:
    return KVGeometry(1, HEADS, KEYS, VALUES, dtype, BLOCK_TOKENS, lower)


class Tiers:
    """Both arenas, and the native conversion between them."""

    def __init__(self, dtype: str, lower: str, pages: torch.Tensor) -> None:
        self.pages = pages.to(DTYPES[dtype]).contiguous()
        self.lower_dtype = lower
        self.native = _core.LowerPages(HEADS, KEYS, VALUES, BLOCK_TOKENS, dtype, lower)
        self.lower = np.full((len(pages), self.native.lower_page_bytes), 0xEE, np.uint8)
        self.numbers = np.arange(len(pages), dtype=np.int32)

    def down(self, threads: int = 1) -> Bytes:
        turned = self.numbers[::-1].copy()
        self.native.down(self.lower.ctypes.data, self.pages.data_ptr(), self.numbers, turned, threads)
        return self.lower.copy()

    def up(self, threads: int = 1) -> torch.Tensor:
        turned = self.numbers[::-1].copy()
        self.native.up(self.pages.data_ptr(), self.lower.ctypes.data, turned, self.numbers, threads)
        return self.pages.clone()


def some_pages(seed: int, count: int = 6) -> torch.Tensor:
    """Values of all magnitudes: pages of noise, with outliers, tiny ones, zeros, and some that are no numbers."""
    random = torch.Generator().manual_seed(seed)
    pages = torch.randn(count, HEADS * (KEYS + VALUES) * BLOCK_TOKENS, generator=random)
    pages[1] *= 10 ** (6 * torch.rand(pages[1].shape, generator=random) - 5)
    pages[2, ::17] = 1000.0
    pages[3] *= 2.0**-104 if seed % 2 else 2.0**-20
    pages[4, 5::97] = torch.tensor([np.nan, np.inf, -np.inf, -0.0]).repeat(99)[: len(pages[4, 5::97])]
    pages[5] = 0
    return pages


def tokens_of(pages: torch.Tensor, dtype: str) -> list[torch.Tensor]:
    """K and V ``[pages, tokens, heads, D]``."""
    seen = ReferencePages(pages.view(torch.uint8).flatten(), geometry(dtype))
    return [seen.k[:, 0].permute(0, 3, 1, 2), seen.v[:, 0].permute(0, 2, 1, 3)]


def plain_down(pages: torch.Tensor, dtype: str, lower: str) -> Bytes:
    """By the rule of the tests' reference, whose codes are torch's."""
    shape = geometry(dtype, lower)
    arena = torch.zeros(len(pages) * shape.block_bytes, dtype=torch.uint8)
    k, v = (part.flatten(0, 1) for part in tokens_of(pages, dtype))
    blocks, offsets = torch.arange(len(k)) // BLOCK_TOKENS, torch.arange(len(k)) % BLOCK_TOKENS
    CodedReferencePages(arena, shape).write_kv(0, blocks, offsets, k, v)
    return arena.view(len(pages), -1).numpy()


def plain_up(lower_pages: Bytes, dtype: str, lower: str) -> list[torch.Tensor]:
    """K and V ``[heads, pages * tokens, D]`` in the pages' dtype."""
    pages = CodedReferencePages(torch.from_numpy(lower_pages.copy()).flatten(), geometry(dtype, lower))
    blocks = torch.arange(len(lower_pages))
    return [part.to(DTYPES[dtype]) for part in pages.read_kv(0, blocks, len(lower_pages) * BLOCK_TOKENS)]


@pytest.mark.parametrize(("dtype", "lower"), KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_lower_pages_equal_the_plain_conversion(dtype: str, lower: str, seed: int) -> None:
    pages = some_pages(seed)
    if dtype == "float16":  # of its least values another code may be kept, which comes up as the same value
        pages[1:2], pages[3:4] = pages[:1], pages[:1] / 7
    tiers = Tiers(dtype, lower, pages)
    expected = plain_down(tiers.pages, dtype, lower)[::-1]
    down = tiers.down()
    assert np.array_equal(down, expected)

    tiers.up()
    for part, again in zip(tokens_of(tiers.pages.flip(0), dtype), plain_up(down, dtype, lower), strict=True):
        up = part.flatten(0, 1).transpose(0, 1)
        assert torch.equal(up.isnan(), again.isnan())
        assert torch.equal(up.nan_to_num(), again.nan_to_num())


@pytest.mark.parametrize(("dtype", "lower"), KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_the_error_is_half_the_distance_between_two_codes(dtype: str, lower: str, seed: int) -> None:
    tiers = Tiers(dtype, lower, some_pages(seed))
    before = [part.double() for part in tokens_of(tiers.pages.clone(), dtype)]
    tiers.down()
    tiers.up()
    for old, new in zip(before, tokens_of(tiers.pages, dtype), strict=True):
        for group in zip(old.split(GROUP[lower], -1), new.double().split(GROUP[lower], -1), strict=True):
            wrong = (~group[0].isfinite()).any(-1)
            assert torch.equal(group[1].isnan().all(-1), wrong) and torch.equal(group[1].isnan().any(-1), wrong)
            most = group[0].abs().amax(-1)[~wrong]
            off = (group[1] - group[0]).abs().amax(-1)[~wrong]
            least = 2.0**-24 if dtype == "float16" else 2.0**-100  # its own rounding, and what becomes zero
            assert bool((off <= most * (ERRORS[lower] * (1 + 2.0**-8) + ROUNDING[dtype] + 1e-6) + least).all())


@pytest.mark.parametrize(("dtype", "lower"), KINDS)
@pytest.mark.parametrize("seed", range(40))
def test_lower_pages_round_trip_to_the_same_bytes(dtype: str, lower: str, seed: int) -> None:
    pages = some_pages(seed) * 2.0 ** ((seed - 20) / 3)
    tiers = Tiers(dtype, lower, pages)
    first = tiers.down()
    came_up = tiers.up()
    for _ in range(3):
        assert np.array_equal(tiers.down(), first)
        up = tiers.up()
        assert torch.equal(up.view(torch.uint8), came_up.view(torch.uint8))


@pytest.mark.parametrize("lower", LOWER)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_largest_magnitude_of_sixteen_bits_drifts(dtype: str, lower: str) -> None:
    """Each that there is, with all that lies below it sampled: the proof in ``kv_codes.h``, run."""
    every = torch.arange(0x7B00 if dtype == "float16" else 0x7F00, dtype=torch.int32).to(torch.int16)
    native = _core.LowerPages(1, 1, 32, 1, dtype, lower)
    largest = every.view(DTYPES[dtype]).float()
    shares = torch.cat([torch.linspace(-1, 1, 31), torch.ones(1)])
    pages = torch.cat([largest[:, None], largest[:, None] * shares], dim=1).to(DTYPES[dtype]).contiguous()
    numbers = np.arange(len(pages), dtype=np.int32)
    once, twice = (np.zeros((len(pages), native.lower_page_bytes), np.uint8) for _ in range(2))
    native.down(once.ctypes.data, pages.data_ptr(), numbers, numbers)
    native.up(pages.data_ptr(), once.ctypes.data, numbers, numbers)
    native.down(twice.ctypes.data, pages.data_ptr(), numbers, numbers)
    assert np.array_equal(once, twice)
    kept = largest >= 2.0**-100
    rounded = largest[kept].to(torch.bfloat16).to(DTYPES[dtype]).float()
    assert torch.equal(pages.float()[kept, 0], rounded), "the largest magnitude comes back, with eight bits"


def test_several_threads_write_what_one_writes() -> None:
    pages = torch.randn(700, HEADS * (KEYS + VALUES) * BLOCK_TOKENS)
    one, many = Tiers("bfloat16", "int8", pages), Tiers("bfloat16", "int8", pages)
    assert np.array_equal(one.down(1), many.down(4))
    assert torch.equal(one.up(1), many.up(4))


def test_half_of_the_bytes_and_the_maxima() -> None:
    smollm2 = [_core.LowerPages(3, 64, 64, 32, "bfloat16", lower) for lower in LOWER]
    assert {native.page_bytes for native in smollm2} == {24576}
    sizes = [native.lower_page_bytes for native in smollm2]
    assert sizes == [12288 + 3 * 32 * 4, 12288 + 3 * 32 * 4, 6144 + 3 * 32 * 8]


@pytest.mark.parametrize(
    ("dtype", "lower"), [("float64", "int8"), ("bfloat16", "int3"), ("bfloat16", "auto"), ("", "")]
)
def test_unknown_types_are_refused(dtype: str, lower: str) -> None:
    with pytest.raises(ValueError, match="unknown"):
        _core.LowerPages(1, 1, 1, 1, dtype, lower)
