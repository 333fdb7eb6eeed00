"""Quantised weights against the numbers that the gguf package gives, for every format and every set of kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from memserve import _kernels
from memserve.base.errors import UserError
from memserve.base.types import ACTIVATION_BITS, FINE_BITS
from memserve.model.linears import PackedLinear
from memserve.model.quantised import FORMATS, QuantisedLinear, QuantisedWeight
from quantised_blocks import FILE_FORMATS, inputs_of, numbers_of, random_blocks, random_weight

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(params=_kernels.quantised_sets())
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    _kernels.force_quantised_set(request.param)
    yield request.param
    _kernels.force_quantised_set(None)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


LARGEST = {8: 127, 15: 127 * 128}


def rounded(x: Tensor, bits: int = 8) -> Tensor:
    """``x [rows, k]`` as the kernels see it: integers with a scale for 32 of them, as float64."""
    groups, largest = x.float().view(len(x), x.shape[1] // 32, 32), LARGEST[bits]
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, torch.tensor(float(largest)) / most, 0)  # a plain number would multiply by 1 / most
    return ((groups * inverse).round().double() * (most / torch.tensor(float(largest))).double()).view(x.shape)


def close(got: Tensor, want: Tensor, limit: float) -> None:
    """Equal within ``limit`` of the largest of ``want``, float64."""
    scale = float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want, rtol=0, atol=limit * scale + 1e-30)


@pytest.mark.parametrize("kind", FILE_FORMATS)
def test_weights_are_those_of_the_file_to_the_bit(kernels: str, kind: str) -> None:
    """Sizes that fill strips of 32 outputs and such that do not; the order of rows may change."""
    k = 2 * inputs_of(kind)
    for n in (1, 31, 32, 33, 70):
        blocks = random_blocks(kind, n, k, seed=n)
        numbers = numbers_of(kind, blocks)
        assert torch.equal(QuantisedLinear([QuantisedWeight.of_blocks(kind, blocks, k)]).dequantised(), numbers)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
        turned = QuantisedLinear([QuantisedWeight.of_blocks(kind, blocks, k, order)])
        assert torch.equal(turned.dequantised(), numbers[order])


@pytest.mark.parametrize("bits", ACTIVATION_BITS)
@pytest.mark.parametrize("kind", FILE_FORMATS)
def test_linear_is_the_product_of_rounded_activations(kernels: str, kind: str, bits: int) -> None:
    """Every height of a tile, few rows and many, panels of rows that end in the middle. 15 bits are two products, and
    from 129 rows on none: there the weights become numbers."""
    n, k = 70, 512
    weight, numbers = random_weight(kind, n, k)
    plain = QuantisedLinear([weight], activation_bits=bits)
    biased = QuantisedLinear([weight], random(n, seed=1), activation_bits=bits)
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 64, 65, 128, 200):
        x = random(rows, k, seed=rows)
        x[:, 64:96] = 0.0  # a group without a scale
        want = (rounded(x, bits) if bits == 8 or rows <= 128 else x.double()) @ numbers.double().T
        close(plain(x), want, 4e-6)
        close(biased(x), want + random(n, seed=1).double(), 4e-6)
        if rows:
            assert float((plain(x) - x @ numbers.T).abs().max()) > 0 or rows > 128  # it does round


def test_15_bits_round_less_than_bfloat16(kernels: str) -> None:
    weight, numbers = random_weight("Q4_K", 64, 512)
    x = random(9, 512).double()
    want = x @ numbers.double().T
    fine = QuantisedLinear([weight], activation_bits=FINE_BITS)(x.float()).double()
    in_bfloat16 = x.bfloat16().double() @ numbers.double().T
    assert float((fine - want).square().mean()) < 0.01 * float((in_bfloat16 - want).square().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_dtypes_of_rows_and_results(kernels: str, kind: str, dtype: torch.dtype) -> None:
    weight, numbers = random_weight(kind, 97, 256)
    x = random(2, 3, 256, dtype=dtype)
    want = rounded(x.view(6, 256)) @ numbers.double().T
    got = QuantisedLinear([weight])(x)
    assert got.shape == (2, 3, 97) and got.dtype == dtype
    close(got.view(6, 97), want, ROUNDING[dtype] + 2e-6)
    wide = QuantisedLinear([weight], wide=True)(x)
    assert wide.dtype == torch.float32
    close(wide.view(6, 97), want, 4e-6)


@pytest.mark.parametrize("kind", FILE_FORMATS)
def test_an_odd_number_of_blocks_ends_a_chunk(kernels: str, kind: str) -> None:
    """The inputs of many rows are unpacked by chunks of 16 groups: here the last one is a part."""
    k = 3 * inputs_of(kind) if inputs_of(kind) > 32 else 17 * 32
    weight, numbers = random_weight(kind, 40, k)
    x = random(20, k)
    for bits in ACTIVATION_BITS:
        layer = QuantisedLinear([weight], activation_bits=bits)
        close(layer(x), rounded(x, bits) @ numbers.double().T, 4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FILE_FORMATS)
def test_an_exact_layer_is_the_packed_one_of_the_numbers(kernels: str, kind: str, dtype: torch.dtype) -> None:
    n, k = 97, 512
    weight, numbers = random_weight(kind, n, k)
    bias = random(n, dtype=dtype, seed=1)
    packed = PackedLinear([numbers.to(dtype)], [bias])
    exact = QuantisedLinear([weight], bias, exact=True)
    for rows in (1, 3, 17, 150):
        x = random(rows, k, dtype=dtype)
        want = x.double() @ numbers.to(dtype).double().T + bias.double()
        close(exact(x), want, ROUNDING[dtype] + 2e-6)
        if packed.is_native and rows <= 128:
            assert torch.equal(exact(x), packed(x))
    close(QuantisedLinear([weight], exact=True, wide=True)(x), x.double() @ numbers.to(dtype).double().T, 4e-6)


def test_rows_come_out_the_same_whatever_the_others_are(kernels: str) -> None:
    """To the bit, also on the border between few rows and many, and with several threads."""
    for kind, bits in itertools.product(("Q4_0", "Q4_K", "Q6_K"), ACTIVATION_BITS):
        weight, _ = random_weight(kind, 4096, 512)
        layer, x = QuantisedLinear([weight], activation_bits=bits), random(70, 512)
        alone = torch.cat([layer(row[None]) for row in x])
        for rows in (2, 4, 5, 8, 9, 64, 65, 70):
            assert torch.equal(layer(x[:rows]), alone[:rows])


@pytest.fixture(params=_kernels.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _kernels.force_isa(request.param)
    yield request.param
    _kernels.force_isa(None)


@pytest.mark.parametrize("bits", ACTIVATION_BITS)
@pytest.mark.parametrize("kind", FORMATS[: len(FILE_FORMATS)])
def test_from_so_many_rows_on_bfloat16_meets_numbers(isa: str, kind: str, bits: int) -> None:
    """With activations of two bytes. Such rows are the exact ones, to the bit, whatever is beside them; heights of
    tiles of 16, and panels of weights that end in the middle."""
    n, k = 1100, 1024
    weight, numbers = random_weight(kind, n, k)
    layer, exact = QuantisedLinear([weight], activation_bits=bits), QuantisedLinear([weight], exact=True)
    x = random(200, k, dtype=torch.bfloat16)
    want = x.double() @ numbers.bfloat16().double().T
    most_by_integers = 128 if bits == FINE_BITS else len(x)
    for rows in (16, 17, 31, 32, 33, 100, 128, 129, 200):
        got = layer(x[:rows])
        assert torch.equal(got, exact(x[:rows])) == (rows > most_by_integers), rows
        close(got, want[:rows], 0.02)
    close(exact(x), want, ROUNDING[torch.bfloat16] + 2e-6)
    wide = QuantisedLinear([weight], activation_bits=bits, wide=True)(x)
    assert wide.dtype == torch.float32
    close(wide, want, 0.02)


def test_threads_change_nothing() -> None:
    weight, _ = random_weight("Q4_K", 3001, 1024)
    x, threads = random(11, 1024), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            results.append((QuantisedLinear([weight])(x), QuantisedLinear([weight], exact=True)(x)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for pair in results for a, b in zip(pair, results[0], strict=True))


@pytest.mark.parametrize("kind", ["INT4_32", "INT4_128", "INT8_32", "INT8_128"])
def test_grouped_integers_with_zero_points(kernels: str, kind: str) -> None:
    """As AWQ and GPTQ checkpoints have them, once they are apart."""
    n, k, group, most = 70, 384, int(kind.split("_")[1]), 16 if kind.startswith("INT4") else 256
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, most, (n, k), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, most, (n, k // group), generator=generator).half()
    scales = (random(n, k // group, seed=1).abs() * 0.01 + 1e-3).half()
    apart = values.float().view(n, -1, group) - zeros.float()[..., None]
    numbers = (apart * scales.float()[..., None]).view(n, k)
    weight = QuantisedWeight.of_groups(kind, values, scales, zeros)
    assert torch.equal(QuantisedLinear([weight]).dequantised(), numbers)
    for rows, bits in itertools.product((1, 4, 20), ACTIVATION_BITS):
        x = random(rows, k)
        layer = QuantisedLinear([weight], activation_bits=bits)
        close(layer(x), rounded(x, bits) @ numbers.double().T, 1e-5)


def test_joined_weights_are_computed_as_one() -> None:
    parts = [random_weight("Q4_K", n, 256, seed=n) for n in (64, 96, 33)]
    layer = QuantisedLinear([weight for weight, _ in parts])
    numbers, x = torch.cat([number for _, number in parts]), random(3, 256)
    assert layer.n == 193 and torch.equal(layer.dequantised(), numbers)
    close(layer(x), rounded(x) @ numbers.double().T, 4e-6)
    with pytest.raises(UserError, match="joined"):
        QuantisedLinear([parts[2][0], parts[0][0]])
    with pytest.raises(UserError, match="joined"):
        QuantisedLinear([parts[0][0], random_weight("Q6_K", 32, 256)[0]])


def test_rows_of_an_embedding(kernels: str) -> None:
    for kind in FORMATS[: len(FILE_FORMATS)]:
        weight, numbers = random_weight(kind, 77, 512)
        ids = torch.tensor([[0, 76, 31], [32, 5, 5]])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(QuantisedLinear([weight]).rows(ids, dtype), numbers[ids].to(dtype))


def test_extreme_scales_stay_finite(kernels: str) -> None:
    """Subnormal and large float16 scales, the largest integers, and activations of 1e30 and 1e-30."""
    blocks = np.zeros((64, 4, 34), dtype=np.uint8)
    blocks[..., 2:] = np.array([-128, 127] * 16, dtype=np.int8).view(np.uint8)
    for scale in (6e-8, 65504.0):
        blocks[..., :2] = np.array([scale], dtype=np.float16).view(np.uint8)
        weight = torch.from_numpy(blocks.reshape(64, -1))
        packed = QuantisedWeight.of_blocks("Q8_0", weight, 128)
        for size, rows, bits in itertools.product((1e30, 1e-30), (1, 12), ACTIVATION_BITS):
            x = random(rows, 128) * size
            want = rounded(x, bits) @ numbers_of("Q8_0", weight).double().T
            close(QuantisedLinear([packed], activation_bits=bits)(x), want, 1e-5)


def test_what_cannot_be_packed_is_refused() -> None:
    blocks = random_blocks("Q4_K", 4, 256)
    for kind, given, k, match in [
        ("Q9_9", blocks, 256, "unknown"), ("Q4_K", blocks, 288, "blocks of 256 inputs"), ("Q4_K", blocks, 512, "bytes"),
        ("Q4_K", blocks[:, ::2], 256, "bytes"), ("Q4_K", blocks[:0], 256, "an output at least"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=match):
            QuantisedWeight.of_blocks(kind, given, k)
    with pytest.raises(UserError, match="order"):
        QuantisedWeight.of_blocks("Q4_K", blocks, 256, torch.tensor([0, 1, 2, 4]))
    with pytest.raises(UserError, match="grouped"):
        QuantisedWeight.of_groups("Q4_K", torch.zeros(4, 256, dtype=torch.uint8), torch.ones(4, 8), torch.ones(4, 8))
    with pytest.raises(UserError, match="beyond its bits"):
        QuantisedWeight.of_groups("INT4_32", torch.full((4, 64), 16, dtype=torch.uint8), *torch.ones(2, 4, 2))
    with pytest.raises(ValueError, match="unknown"):
        _kernels.force_quantised_set("mmx")
