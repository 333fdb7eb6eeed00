"""The fused kernels against float64, for every dtype and every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from memserve import _kernels
from memserve.model.capture import operations as fused
from memserve.model.linears import ROWS_NATIVE_MAX, PackedLinear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of one result, relative


@pytest.fixture(params=_kernels.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _kernels.force_isa(request.param)
    yield request.param
    _kernels.force_isa(None)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor, roundings: float = 1.0) -> None:
    """Equal within some roundings of the result's dtype; ``want`` is float64."""
    limit = ROUNDING[got.dtype] * roundings
    torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit * float(want.abs().max()) * 0.01 + 1e-7)


def normed(x: Tensor, weight: Tensor, eps: float, round_first: bool) -> Tensor:
    y = x.double() / torch.sqrt(x.double().pow(2).mean(-1, keepdim=True) + eps)
    return (y.to(x.dtype).double() if round_first else y) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("round_first", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (3, 50), (70, 129)])
def test_rms_norm(isa: str, dtype: torch.dtype, round_first: bool, tokens: int, width: int) -> None:
    """Widths with and without a remainder after whole vectors."""
    x, weight = random(1, tokens, width, dtype=dtype) * 3, random(width, dtype=torch.float32, seed=1)
    close(fused.rms_norm(x, weight, 1e-5, round_first), normed(x, weight, 1e-5, round_first), 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_inside_wider_rows(isa: str, dtype: torch.dtype) -> None:
    """Query and key norms read heads out of the merged projection: two levels of strides."""
    merged, weight = random(1, 5, 200, dtype=dtype), random(24, dtype=torch.float32, seed=1)
    heads = merged[..., 32:128].view(1, 5, 4, 24)
    close(fused.rms_norm(heads, weight, 1e-6, True), normed(heads, weight, 1e-6, True), 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_rounds_the_sum_before_it_norms(isa: str, dtype: torch.dtype) -> None:
    x, residual = random(1, 9, 70, dtype=dtype), random(1, 9, 70, dtype=dtype, seed=1)
    weight = random(70, dtype=torch.float32, seed=2)
    total, y = fused.add_rms_norm(x, residual, weight, 1e-5, True)
    assert torch.equal(total, x + residual)
    close(y, normed(x + residual, weight, 1e-5, True), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", fused.CPU_GATE_CODES)
def test_gated_reads_both_halves_of_one_tensor(isa: str, dtype: torch.dtype, kind: str) -> None:
    """Over the whole range of the activation, the far negative end included, where nothing may become a NaN."""
    both = random(1, 6, 150, dtype=dtype) * 4
    both[0, 0, :4] = torch.tensor([-200.0, 200.0, -88.0, 0.0], dtype=dtype)
    gate, up = both[..., :75], both[..., 75:]
    activations = {"gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"), "sigmoid": torch.sigmoid}
    activations |= {"product": lambda x: x}
    activated = activations.get(kind, torch.nn.functional.silu)(gate.double())
    rounded = activated if kind == "silu_wide" else activated.to(dtype).double()
    close(fused.gated(gate, up, kind), rounded * up.double(), 1 if kind == "silu_wide" else 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("token_dim", [1, 2])
@pytest.mark.parametrize("dim", [8, 64, 80])
def test_rotary(isa: str, dtype: torch.dtype, token_dim: int, dim: int) -> None:
    x = random(1, 7, 3 * dim, dtype=dtype).view(1, 7, 3, dim)
    angle = random(1, 7, dim, dtype=torch.float32, seed=1)
    cosine, sine = (t.to(dtype).unsqueeze(3 - token_dim) for t in (angle.cos(), angle.sin()))
    x = x if token_dim == 1 else x.transpose(1, 2)
    low, high = x.double().chunk(2, -1)
    want = x.double() * cosine.double() + torch.cat([-high, low], -1) * sine.double()
    close(fused.rotary(x, cosine, sine, token_dim), want, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(64, 32), (61, 33), (200, 70), (960, 576), (90, 4131)])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 13, 33])
def test_few_rows_linear(isa: str, dtype: torch.dtype, n: int, k: int, rows: int) -> None:
    """Sizes that do not fill blocks, odd inputs, every height of a tile, several slices of inputs, with and without
    bias."""
    weight, bias = random(n, k, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
    x = random(1, rows, k, dtype=dtype)
    for given in (None, [bias]):
        layer = PackedLinear([weight], given)
        if not layer.is_native:
            pytest.skip("this build of oneDNN packs the weight in no format that the kernel reads")
        want = x.double() @ weight.double().T + (0 if given is None else bias.double())
        got = layer(x)
        assert got.shape == (1, rows, n)
        scale = float(want.abs().max()) if rows else 1.0
        assert (got.double() - want).abs().sum() == 0 or float((got.double() - want).abs().max()) <= (
            ROUNDING[dtype] * scale + ((1e-6 + 1e-7 * scale) * k**0.5 if dtype == torch.float32 else 0.0)
        )


def packed_by_hand(weight: torch.Tensor, block: int) -> torch.Tensor:
    """``weight [n, k]`` in oneDNN's blocks, padded with zeros: ``[n / block, k, block]``, bf16 in pairs of inputs."""
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    n, k = weight.shape
    inputs = -(-k // (16 * pair)) * 16 * pair
    padded = torch.nn.functional.pad(weight, (0, inputs - k, 0, -n % block))
    return padded.view(-1, block, inputs // pair, pair).permute(0, 2, 1, 3).contiguous()


def native_linear(x: torch.Tensor, packed: torch.Tensor, n: int, wide: bool) -> torch.Tensor:
    """``_kernels.linear`` without a bias; ``packed [blocks, k / pair, block, pair]``."""
    (rows, k), (_, pairs, block, pair) = x.shape, packed.shape
    y = torch.full((rows, n), float("nan"), dtype=torch.float32 if wide else x.dtype)
    code = int(x.dtype == torch.bfloat16)
    _kernels.linear(x.data_ptr(), k, packed.data_ptr(), 0, y.data_ptr(), n, rows, k, pairs * pair, n, block, code, wide)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize(("n", "k"), [(31, 5), (224, 70), (160, 128), (70, 4130)])
def test_a_row_does_not_depend_on_the_rows_beside_it(isa: str, dtype: torch.dtype, block: int, n: int, k: int) -> None:
    """Both block formats, whatever oneDNN packs here; each row comes out the same, bit by bit, in every batch."""
    weight, x = random(n, k, dtype=dtype, seed=1), random(70, k, dtype=dtype, seed=2)
    packed = packed_by_hand(weight, block)
    for wide in (False, True):
        whole = native_linear(x, packed, n, wide)
        want = x.double() @ weight.double().T
        rounding = 2e-6 if wide or dtype == torch.float32 else ROUNDING[dtype]
        assert float((whole.double() - want).abs().max()) <= rounding * float(want.abs().max())
        for first, last in ((0, 1), (3, 20), (16, 33), (37, 70)):
            assert torch.equal(native_linear(x[first:last], packed, n, wide), whole[first:last])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, ROWS_NATIVE_MAX + 5])
def test_wide_linear_does_not_round_its_sums(isa: str, dtype: torch.dtype, rows: int) -> None:
    """Logits: float32 out of 16-bit operands, exact to float32 rounding at any number of rows."""
    weight, bias = random(200, 70, dtype=dtype, seed=1) * 8, random(200, dtype=dtype, seed=2)
    x = random(1, rows, 70, dtype=dtype)
    layer = PackedLinear([weight], [bias], wide=True)
    got = layer(x)
    assert got.dtype == torch.float32 and not layer.is_native
    want = x.double() @ weight.double().T + bias.double()
    assert float((got.double() - want).abs().max()) <= 1e-5 * float(want.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_embedding_reads_the_packed_weight(dtype: torch.dtype) -> None:
    """Every row comes back exactly; a weight that does not fill its blocks is not offered."""
    weight = random(192, 64, dtype=dtype, seed=1)
    layer = PackedLinear([weight], None)
    blocks = layer.packed_blocks()
    if blocks is None:
        pytest.skip("this build of oneDNN packs the weight in no format that the kernel reads")
    ids = torch.randperm(192, generator=torch.Generator().manual_seed(0))[None]
    assert torch.equal(fused.embed(ids, fused.TiedEmbedding(layer, blocks)), weight[ids])
    assert PackedLinear([random(190, 64, dtype=dtype)], None).packed_blocks() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_sides_of_the_row_limit_agree(dtype: torch.dtype) -> None:
    """A row gives the same result in a small batch (our kernel) and in a large one (oneDNN), up to rounding."""
    layer = PackedLinear([random(96, 48, dtype=dtype, seed=1), random(32, 48, dtype=dtype, seed=2)], None)
    x = random(ROWS_NATIVE_MAX + 1, 48, dtype=dtype)
    few, many = layer(x[:3]), layer(x)[:3]
    torch.testing.assert_close(few, many, rtol=2 * ROUNDING[dtype], atol=1e-5)


def test_half_precision_without_packing_still_computes() -> None:
    """float16 has no packed format on most processors: then the dense weight serves, at any number of rows."""
    weight = random(40, 24, dtype=torch.float16, seed=1)
    layer = PackedLinear([weight], None)
    x = random(2, 24, dtype=torch.float16)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_program_runs_every_piece_once(threads: int) -> None:
    """The same operations through a program, on any number of threads, more than cores included, many times."""
    tokens, k, n = 5, 64, 1100
    weight = random(n, k, dtype=torch.float32, seed=1)
    layer, gain = PackedLinear([weight], None), torch.ones(k)
    x, middle, y = random(tokens, k, dtype=torch.float32), torch.empty(tokens, k), torch.empty(tokens, n)
    program = _kernels.Program()
    program.rms_norm(-1, 0, 0, middle.data_ptr(), gain.data_ptr(), 1e-6, False, 1, k, 0, k, 0, 0)
    program.linear(middle.data_ptr(), k, *layer.native_weights, y.data_ptr(), *layer.native_sizes, layer.code, 0)
    program.start(tokens, 0)
    want = layer(fused.rms_norm(x, gain, 1e-6, False))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(50):
            y.fill_(float("nan"))
            program.run(0, 2, 0, [x.data_ptr()])
            assert torch.equal(y, want)
    finally:
        torch.set_num_threads(before)


def native_low_rank(x: Tensor, y: Tensor, rows: list[tuple[int, Tensor | None, Tensor | None]]) -> Tensor:
    """``_kernels.low_rank`` on a copy of ``y``; ``rows``: the row, ``a [rank, k]``, ``b [rank, n]``."""
    y = y.clone()
    places = [
        [at, *(0 if m is None else m.data_ptr() for m in (a, b)), 0 if a is None else len(a)] for at, a, b in rows
    ]
    told = torch.tensor(places, dtype=torch.int64)
    code = fused.DTYPE_CODES[x.dtype]
    _kernels.low_rank(x.data_ptr(), y.data_ptr(), told.data_ptr(), len(rows), x.shape[1], y.shape[1], code)
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(31, 5), (224, 70), (576, 576)])
def test_low_rank_adds_to_each_row_by_its_own_matrices(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    """Rows in any order, ranks of any size, rows that get nothing; a row does not depend on those beside it."""
    x, y = random(9, k, dtype=dtype, seed=1), random(9, n, dtype=dtype, seed=2)
    ranks = {6: 1, 0: 16, 3: _kernels.LOW_RANK_MAX, 8: 7}
    pairs = {
        at: (random(r, k, dtype=dtype, seed=at), random(r, n, dtype=dtype, seed=at + 9)) for at, r in ranks.items()
    }
    rows = [(6, *pairs[6]), (0, *pairs[0]), (4, None, None), (3, *pairs[3]), (8, *pairs[8])]
    got, want = native_low_rank(x, y, rows), y.double()
    for at, (a, b) in pairs.items():
        want[at] += b.double().T @ (a.double() @ x[at].double())
    for at in range(9):
        scale = float(want[at].abs().max()) if at in pairs else 0.0
        assert float((got[at].double() - want[at]).abs().max()) <= (ROUNDING[dtype] + 2e-6 * k**0.5) * scale
    for one in rows:
        assert torch.equal(native_low_rank(x, y, [one])[one[0]], got[one[0]])
