"""Pages with a byte a value: the native conversion beside a plain one, its error, and that nothing drifts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from memserve import _core

BLOCK_TOKENS = 8
HEADS, KEYS, VALUES = 2, 12 * BLOCK_TOKENS, 20 * BLOCK_TOKENS
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST = {"int8": 127.0, "fp8": 448.0}
KINDS = list(itertools.product(DTYPES, LARGEST))
#: half of the widest distance between two codes, in units of the largest: what a value may be off
ERRORS = {"int8": 0.5 / 127, "fp8": 16 / 448}
ROUNDING = {"float32": 2.0**-16, "bfloat16": 2.0**-8, "float16": 2.0**-10}
Bytes = NDArray[np.uint8]

#: the value of each code: torch's type is made of tables, and not of this arithmetic
FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def scale_of(run: NDArray[np.float32], largest: float) -> np.float32:
    """The least float with 16 significant bits by which the largest magnitude becomes the largest code."""
    numbers = np.abs(run[np.abs(run) < 2.0**127])
    most = np.float32(numbers.max(initial=0))
    if most < np.float32(2.0**-100):
        return np.float32(0)
    bits = (most / np.float32(largest)).view(np.uint32)
    return ((bits + np.uint32(0xFF)) & np.uint32(0xFFFFFF00)).view(np.float32)


def codes_of(run: NDArray[np.float32], scale: np.float32, lower: str, dtype: str) -> Bytes:
    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
    wrong = ~(np.abs(run) < 2.0**127)
    scaled = np.where(wrong, np.float32(0), run) * inverse
    if lower == "int8":
        return np.where(wrong, np.uint8(0x80), np.rint(scaled).astype(np.int8).view(np.uint8))
    rounded = torch.from_numpy(scaled).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    if dtype == "float16":  # of the codes that come up as one value, the one that this value becomes
        came_up = (FP8_VALUES[rounded] * scale).astype(np.float16).astype(np.float32) * inverse
        rounded = torch.from_numpy(came_up).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.where(wrong, np.uint8(0x7F), rounded)


def values_of(codes: Bytes, scale: np.float32, lower: str) -> NDArray[np.float32]:
    if lower == "fp8":
        return FP8_VALUES[codes] * scale
    return np.where(codes == 0x80, np.float32(np.nan), codes.view(np.int8).astype(np.float32) * scale)


def runs() -> list[slice]:
    """The K and the V of each head in a page, in values."""
    ends = list(itertools.accumulate([0, *[KEYS, VALUES] * HEADS]))
    return [slice(first, end) for first, end in itertools.pairwise(ends)]


def plain_down(page: NDArray[np.float32], dtype: str, lower: str, lower_bytes: int) -> Bytes:
    scales = [scale_of(page[run], LARGEST[lower]) for run in runs()]
    codes = [codes_of(page[run], scale, lower, dtype) for run, scale in zip(runs(), scales, strict=True)]
    packed = np.concatenate([*codes, np.array(scales, np.float32).view(np.uint8)])
    return np.pad(packed, (0, lower_bytes - len(packed)))


def plain_up(lower_page: Bytes, lower: str) -> NDArray[np.float32]:
    values = HEADS * (KEYS + VALUES)
    scales = lower_page[values : values + 8 * HEADS].view(np.float32)
    return np.concatenate([values_of(lower_page[run], scale, lower) for run, scale in zip(runs(), scales, strict=True)])


class Tiers:
    """Both arenas, and the native conversion between them."""

    def __init__(self, dtype: str, lower: str, pages: torch.Tensor) -> None:
        self.pages = pages.to(DTYPES[dtype]).contiguous()
        self.lower_dtype = lower
        self.native = _core.LowerPages(HEADS, KEYS, VALUES, dtype, lower)
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
    pages = torch.randn(count, HEADS * (KEYS + VALUES), generator=random)
    pages[1] *= 10 ** (6 * torch.rand(pages[1].shape, generator=random) - 5)
    pages[2, ::17] = 1000.0
    pages[3] *= 2.0**-104 if seed % 2 else 2.0**-20
    pages[4, 5::31] = torch.tensor([np.nan, np.inf, -np.inf, -0.0]).repeat(99)[: len(pages[4, 5::31])]
    pages[5] = 0
    return pages


@pytest.mark.parametrize(("dtype", "lower"), KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_lower_pages_equal_the_plain_conversion(dtype: str, lower: str, seed: int) -> None:
    tiers = Tiers(dtype, lower, some_pages(seed))
    before = tiers.pages.float().numpy()
    down = tiers.down()
    expected = [plain_down(page, dtype, lower, tiers.native.lower_page_bytes) for page in before][::-1]
    assert np.array_equal(down, np.stack(expected))

    up = tiers.up()
    again = torch.from_numpy(np.stack([plain_up(page, lower) for page in down][::-1])).to(DTYPES[dtype])
    assert torch.equal(up.isnan(), again.isnan())
    assert torch.equal(up.nan_to_num(), again.nan_to_num())


@pytest.mark.parametrize(("dtype", "lower"), KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_the_error_is_half_the_distance_between_two_codes(dtype: str, lower: str, seed: int) -> None:
    tiers = Tiers(dtype, lower, some_pages(seed))
    before = tiers.pages.double()
    tiers.down()
    after = tiers.up().double()
    for page, run in itertools.product(range(len(before)), runs()):
        old, new = before[page, run], after[page, run]
        assert torch.equal(new.isnan(), ~old.isfinite())
        most = old[old.isfinite()].abs().max()
        off = (new - old)[old.isfinite()].abs().max()
        least = 2.0**-25 if dtype == "float16" else 2.0**-100  # its own rounding, and what becomes zero
        assert off <= most * (ERRORS[lower] + ROUNDING[dtype]) + least


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


@pytest.mark.parametrize("lower", LARGEST)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_largest_magnitude_of_sixteen_bits_drifts(dtype: str, lower: str) -> None:
    """Each one that there is, with all that lies below it sampled: the proof in ``lower_pages.h``, run."""
    every = torch.arange(0x7C00 if dtype == "float16" else 0x7F00, dtype=torch.int32).to(torch.int16)
    native = _core.LowerPages(1, 1, 64, dtype, lower)
    largest = every.view(DTYPES[dtype]).float()
    shares = torch.cat([torch.linspace(-1, 1, 63), torch.ones(1)])
    pages = torch.cat([largest[:, None], largest[:, None] * shares], dim=1).to(DTYPES[dtype]).contiguous()
    numbers = np.arange(len(pages), dtype=np.int32)
    once, twice = (np.zeros((len(pages), native.lower_page_bytes), np.uint8) for _ in range(2))
    native.down(once.ctypes.data, pages.data_ptr(), numbers, numbers)
    native.up(pages.data_ptr(), once.ctypes.data, numbers, numbers)
    native.down(twice.ctypes.data, pages.data_ptr(), numbers, numbers)
    assert np.array_equal(once, twice)
    kept = largest >= 2.0**-100
    assert torch.equal(pages.float()[kept, 0], largest[kept]), "the largest magnitude comes back as it was"


def test_several_threads_write_what_one_writes() -> None:
    pages = torch.randn(700, HEADS * (KEYS + VALUES))
    one, many = Tiers("bfloat16", "int8", pages), Tiers("bfloat16", "int8", pages)
    assert np.array_equal(one.down(1), many.down(4))
    assert torch.equal(one.up(1), many.up(4))


def test_half_of_the_bytes_and_the_scales() -> None:
    native = _core.LowerPages(3, 64 * 32, 64 * 32, "bfloat16", "int8")  # SmolLM2
    assert native.page_bytes == 24576
    assert native.lower_page_bytes == 12288 + 64


@pytest.mark.parametrize(("dtype", "lower"), [("float64", "int8"), ("bfloat16", "int4"), ("", "")])
def test_unknown_types_are_refused(dtype: str, lower: str) -> None:
    with pytest.raises(ValueError, match="unknown"):
        _core.LowerPages(1, 1, 1, dtype, lower)
