"""The recurrent kernels against a token-by-token float64 reference, for every dtype and every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from memserve import _kernels
from memserve.model.states.layers import StatePieces, step_states
from memserve.model.states.recurrence import Convolution, DeltaRule, NotRecognised, Scan, StateOperation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of a difference, as a share of the largest value."""
COUNTS = [(1, 1), (7, 0), (1, 0), (19, 1), (2, 1), (70, 0)]
"""Of each sequence of a step: tokens, and whether it has a state already."""


@pytest.fixture(params=_kernels.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _kernels.force_isa(request.param)
    yield request.param
    _kernels.force_isa(None)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Step:
    """Sequences side by side in one step, with the part of a state that one operation has, 64 bytes inside of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    counts: list[tuple[int, int]] = field(default_factory=lambda: list(COUNTS))
    surplus: int = 3

    def __post_init__(self) -> None:
        self.states = [random(*self.shape, dtype=self.dtype, seed=70 + place) for place in range(len(self.counts))]
        self.before = [state.clone() for state in self.states]

    @property
    def tokens(self) -> int:
        return sum(count for count, _ in self.counts)

    def run(self, operation: StateOperation, *inputs: Tensor, cuts: int = 0) -> Tensor:
        """``cuts``: each sequence comes in pieces of so many tokens, with a state of its own behind each."""
        operation.bind_part(self.shape, 64)
        rows, begin, between = [], 0, []
        for (count, has_state), state in zip(self.counts, self.states, strict=True):
            place, ends = (state.data_ptr() if has_state else 0), begin + count
            while begin < ends:
                end = min(begin + (cuts or count), ends)
                between.append(torch.empty(self.shape, dtype=self.dtype))
                to = state if end == ends else between[-1]
                rows.append((begin, end, place and place - 64, to.data_ptr() - 64, True))
                place, begin = to.data_ptr(), end
        self.pieces = StatePieces(rows, self.tokens)
        with step_states(self):
            return operation(*inputs)

    def expect(self, follow: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        """The outputs, and behind them all states. ``follow``: what a token makes of a state, which it changes."""
        outputs, states, token = [], [], 0
        for (count, has_state), before in zip(self.counts, self.before, strict=True):
            state = before.double() if has_state else torch.zeros(self.shape, dtype=torch.float64)
            for _ in range(count):
                outputs.append(follow(state, token))
                token += 1
            states.append(state)
        return [torch.stack(outputs), *states]

    def check(self, output: Tensor, expected: list[Tensor], dtype: torch.dtype) -> None:
        """``output`` and the states; tokens of no sequence are zeros."""
        assert not output[0, self.tokens :].any()
        got = [output[0, : self.tokens], *self.states]
        for value, want in zip(got, expected, strict=True):
            assert float((value.double() - want).abs().max()) <= LIMIT[dtype] * float(want.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("taps", "kept"), [(2, 1), (3, 3), (3, 2), (4, 3), (4, 4)])
@pytest.mark.parametrize("channels", [5, 64, 150])
def test_convolution(isa: str, dtype: torch.dtype, taps: int, kept: int, channels: int) -> None:
    """Channels that fill no whole vector, a bias and an activation on some, inputs inside of wider rows."""
    step = Step((channels, kept), dtype)
    weight, bias = random(channels, taps, seed=1), random(channels, seed=2) if channels != 64 else None
    operation = Convolution(weight, bias, "silu" if channels > 5 else None)
    x = random(1, step.tokens + step.surplus, channels + 9, dtype=dtype, seed=3)[..., 4 : 4 + channels]

    def follow(state: Tensor, token: int) -> Tensor:
        window = torch.cat([state, x[0, token, :, None].double()], 1)
        state.copy_(window[:, 1:])
        y = (window[:, -taps:] * weight).sum(1) + (0 if bias is None else bias)
        y = y.to(dtype).double()
        return silu(y) if channels > 5 else y

    output = step.run(operation, x)
    step.check(output, step.expect(follow), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(2, 4, 8, 8), (1, 1, 20, 70), (2, 2, 64, 128)], ids=str)
@pytest.mark.parametrize("normalises", [True, False])
def test_delta_rule(isa: str, dtype: torch.dtype, sizes: tuple[int, ...], normalises: bool) -> None:
    """Heads that share keys, sizes without whole vectors, queries, keys and values inside of one tensor."""
    key_heads, heads, key_dim, value_dim = sizes
    step = Step((heads, key_dim, value_dim), torch.float32)
    tokens, keys = step.tokens + step.surplus, key_heads * key_dim
    joined = random(1, tokens, 2 * keys + heads * value_dim, dtype=dtype, seed=1) * (1 if normalises else 0.3)
    q, k, v = joined.split([keys, keys, heads * value_dim], 2)
    q, k, v = (x.unflatten(2, (count, -1)) for x, count in ((q, key_heads), (k, key_heads), (v, heads)))
    decay, beta = -random(1, tokens, heads, seed=2).abs(), random(1, tokens, heads, dtype=dtype, seed=3).sigmoid()

    def follow(state: Tensor, token: int) -> Tensor:
        query, key = (x[0, token].double().repeat_interleave(heads // key_heads, 0) for x in (q, k))  # [heads, key_dim]
        if normalises:
            query, key = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        state *= decay[0, token].double().exp()[:, None, None]
        change = (v[0, token] - torch.einsum("hkv,hk->hv", state, key)) * beta[0, token, :, None]
        state += key[:, :, None] * change[:, None]
        return torch.einsum("hkv,hk->hv", state, query) / key_dim**0.5

    output = step.run(DeltaRule(normalises=normalises), q, k, v, decay, beta)
    step.check(output, step.expect(follow), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(4, 1, 16, 8), (3, 3, 21, 50), (4, 2, 64, 128)], ids=str)
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)])
def test_scan(isa: str, dtype: torch.dtype, sizes: tuple[int, ...], limits: tuple[float, float]) -> None:
    """Heads that share groups, sizes without whole vectors, with bounded time steps and without."""
    heads, groups, head_dim, state_size = sizes
    step = Step((heads, head_dim, state_size), torch.float32)
    tokens = step.tokens + step.surplus
    joined = random(1, tokens, heads * head_dim + 2 * groups * state_size, dtype=dtype, seed=1)
    x, b, c = joined.split([heads * head_dim, groups * state_size, groups * state_size], 2)
    x, b, c = (value.unflatten(2, (count, -1)) for value, count in ((x, heads), (b, groups), (c, groups)))
    decay, skip, bias = -random(heads, seed=2).abs(), random(heads, seed=3), random(heads, seed=4).to(dtype).float()
    dt = random(1, tokens, heads, dtype=dtype, seed=5)

    def follow(state: Tensor, token: int) -> Tensor:
        time = softplus((dt[0, token] + bias.to(dtype)).float()).to(dtype).double().clamp(*limits)
        before, after = (value[0, token].double().repeat_interleave(heads // groups, 0) for value in (b, c))
        inputs = x[0, token].double()
        state *= (time * decay).exp()[:, None, None]
        state += (time[:, None] * inputs)[:, :, None] * before[:, None]
        return torch.einsum("hpn,hn->hp", state, after) + inputs * skip[:, None]

    output = step.run(Scan(decay, skip, bias, limits, softplus=True), x, dt, b, c)
    assert output.dtype == torch.float32
    step.check(output, step.expect(follow), dtype)


def test_time_steps_of_single_tokens_have_no_bounds() -> None:
    """As in transformers, where only several tokens at once have them."""
    sizes = {"x": (1, 1, 2, 4), "dt": (1, 1, 2), "b": (1, 1, 1, 8), "c": (1, 1, 1, 8)}
    inputs = [random(*shape, seed=place) + 3 for place, shape in enumerate(sizes.values())]
    state, outputs = torch.zeros(2, 4, 8), []
    for limits, is_bounded in (((0.0, 0.1), False), ((0.0, float("inf")), True), ((0.0, 0.1), True)):
        operation = Scan(-torch.ones(2), None, None, limits, softplus=True)
        operation.bind_part((2, 4, 8), 0)
        step = Step((2, 4, 8), torch.float32, [])
        step.pieces = StatePieces([(0, 1, 0, state.data_ptr(), is_bounded)], 1)
        with step_states(step):
            outputs.append(operation(*inputs))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize("cuts", [1, 2, 16])
def test_pieces_are_the_whole(isa: str, cuts: int) -> None:
    """Wherever states are copied, to the last bit: a snapshot is what the sequence itself goes on with."""
    counts = [(50, 0), (9, 1)]
    wholes = [Step((40, 4), torch.float32, counts), Step((2, 24, 40), torch.float32, counts)]
    tokens, results = wholes[0].tokens, []
    x, heads = random(1, tokens, 40, seed=1), random(1, tokens, 2, 24, seed=2)
    v, dt = random(1, tokens, 2, 40, seed=3), random(1, tokens, 2, seed=4)
    operations: list[tuple[StateOperation, tuple[int, ...], tuple[Tensor, ...]]] = [
        (Convolution(random(40, 4, seed=5), None, "silu"), (40, 4), (x,)),
        (DeltaRule(normalises=True), (2, 24, 40), (heads, heads.flip(1), v, -dt.abs(), dt.sigmoid())),
        (Scan(-torch.ones(2), None, None, (0.0, 9.0), softplus=True), (2, 24, 40), (heads, dt, v, v.flip(1))),
    ]
    for operation, shape, inputs in operations:
        for pieces in (0, cuts):
            step = Step(shape, torch.float32, counts)
            results.append((step.run(operation, *inputs, cuts=pieces), step.states))
        (whole, states), (cut, cut_states) = results[-2:]
        assert torch.equal(whole, cut) and all(map(torch.equal, states, cut_states))


@pytest.mark.parametrize(("taps", "activation"), [(1, None), (5, None), (4, "gelu")])
def test_other_convolutions_are_not_recognised(taps: int, activation: str | None) -> None:
    with pytest.raises(NotRecognised):
        Convolution(torch.zeros(3, taps), None, activation)
