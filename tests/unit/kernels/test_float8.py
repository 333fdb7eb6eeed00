"""Products with numbers of 8 bits (FP8), and parts of packed weights, for every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from memserve import _kernels
from memserve.base.errors import UserError
from memserve.model.quantised import FORMATS, QuantisedLinear, QuantisedWeight
from quantised_blocks import FILE_FORMATS, inputs_of, random_weight

FLOATS = ("FP8_32", "FP8_128")
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(params=_kernels.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _kernels.force_isa(request.param)
    yield request.param
    _kernels.force_isa(None)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def float_weight(kind: str, n: int, k: int) -> tuple[QuantisedWeight, Tensor]:
    """Every code that is a number, small ones too; and the weight as float32."""
    codes = torch.randint(0, 256, (n, k), generator=torch.Generator().manual_seed(n + k)).to(torch.uint8)
    codes[codes & 127 == 127] = 0
    values = codes.view(torch.float8_e4m3fn)
    scales = random(n, k // int(kind.rpartition("_")[2]), seed=1) * 1e-3
    numbers = values.float() * scales.repeat_interleave(k // scales.shape[1], 1)
    return QuantisedWeight.of_floats(kind, values, scales), numbers


@pytest.mark.parametrize("kind", FLOATS)
def test_numbers_are_those_of_torch_to_the_bit(isa: str, kind: str) -> None:
    for n in (1, 33, 70):
        weight, numbers = float_weight(kind, n, 256)
        layer = QuantisedLinear([weight])
        assert torch.equal(layer.dequantised(), numbers)
        assert torch.equal(layer.dequantised(torch.bfloat16), numbers.bfloat16())
    many = torch.eye(256)[:200]
    assert torch.equal(layer(many), numbers.T[:200])  # so many rows that weights become panels of numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FLOATS)
def test_products_are_those_of_the_numbers(isa: str, kind: str, dtype: torch.dtype) -> None:
    """Activations are not rounded; few rows, tiles of them, and so many that weights become numbers of the dtype."""
    n, k = 97, 384
    weight, numbers = float_weight(kind, n, k)
    bias = random(n, seed=2)
    layer, wide = QuantisedLinear([weight], bias), QuantisedLinear([weight], wide=True)
    for rows in (0, 1, 2, 3, 4, 5, 7, 13, 64, 65, 128, 200):
        x = random(rows, k, seed=rows).to(dtype)
        as_numbers = numbers.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        want = x.double() @ (as_numbers if rows > 128 else numbers).double().T
        scale = float(want.abs().max()) if rows else 0.0
        assert layer(x).dtype == dtype and wide(x).dtype == torch.float32
        limit = ROUNDING[dtype] + 2e-6
        torch.testing.assert_close(layer(x).double(), want + bias.double(), rtol=0, atol=limit * (scale + 4) + 1e-30)
        torch.testing.assert_close(wide(x).double(), want, rtol=0, atol=4e-6 * scale + 1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_out_the_same_whatever_the_others_are(isa: str, dtype: torch.dtype) -> None:
    weight, _ = float_weight("FP8_128", 4096, 512)
    layer, x = QuantisedLinear([weight]), random(70, 512).to(dtype)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in (2, 4, 5, 6, 7, 8, 9, 64, 65, 70):
        assert torch.equal(layer(x[:rows]), alone[:rows])


def test_what_is_no_number_is_refused() -> None:
    values = torch.zeros(4, 64).to(torch.float8_e4m3fn)
    values.view(torch.uint8)[1, 3] = 255
    with pytest.raises(UserError, match="not finite"):
        QuantisedWeight.of_floats("FP8_32", values, torch.ones(4, 2))
    with pytest.raises(UserError, match="4 x 2 scales"):
        QuantisedWeight.of_floats("FP8_32", values, torch.ones(4, 1))
    with pytest.raises(UserError, match="no format of"):
        QuantisedWeight.of_floats("INT8_32", values, torch.ones(4, 2))


def any_weight(kind: str, n: int, blocks: int) -> QuantisedWeight:
    size = _kernels.quantised_block_inputs(kind)
    if kind in FILE_FORMATS:
        assert size == inputs_of(kind)
        return random_weight(kind, n, blocks * size)[0]
    if kind in FLOATS:
        return float_weight(kind, n, blocks * size)[0]
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16 if "4_" in kind else 256, (n, blocks * size), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 16, (n, blocks), generator=generator)
    return QuantisedWeight.of_groups(kind, values, random(n, blocks), zeros)


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_of_packed_weights_are_those_of_their_numbers(kind: str) -> None:
    """Outputs in any order, some of them twice; blocks of inputs likewise."""
    weight = any_weight(kind, 70, 3)
    numbers, size = QuantisedLinear([weight]).dequantised(), weight.k // 3
    outputs, blocks = torch.tensor([69, 0, 31, 32, 33, 5, 5, *range(40, 68)]), torch.tensor([2, 0])
    inputs = (blocks[:, None] * size + torch.arange(size)).flatten()
    assert torch.equal(QuantisedLinear([weight.cut(outputs)]).dequantised(), numbers[outputs])
    part = weight.cut(outputs, blocks)
    assert (part.n, part.k) == (len(outputs), 2 * size)
    assert torch.equal(QuantisedLinear([part]).dequantised(), numbers[outputs][:, inputs])
    whole = weight.cut(torch.arange(70))
    assert torch.equal(whole.packed, weight.packed)
    for places in ((torch.tensor([70]), None), (outputs, torch.tensor([3])), (outputs, torch.tensor([-1]))):
        with pytest.raises(UserError, match="has no such part"):
            weight.cut(*places)
