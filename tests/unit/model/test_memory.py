"""What a model keeps does not grow with the shapes that it meets: counted, and weighed by the allocator."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from captured_families import VOCAB, tiny
from memserve.model import linears
from memserve.model.attention.context import step_attention
from memserve.model.capture.forward import capture_forward, release_weights
from memserve.model.forward import EagerForward
from memserve.model.linears import ROWS_NATIVE_MAX, bucket_rows, in_bucket
from memserve.model.loading.probe import DenseAttention
from memserve.system.process import PRIMITIVES_MAX

STEP_TOKENS_MAX = 2048
LINEARS = (
    5  # shapes of linears that one captured step may have: queries with keys and values, output, gates, down, head
)


class _MallInfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def bytes_in_use() -> int:
    """What the C allocator has handed out in this process."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def step(forward: Any, tokens: int, logits_rows: int = 1) -> torch.Tensor:
    places = torch.arange(tokens)
    with step_attention(DenseAttention()):
        return forward((places + 1) * 7919 % VOCAB, places, places[tokens - logits_rows :].clone())


def test_buckets_are_few_and_close() -> None:
    buckets = {bucket_rows(rows) for rows in range(1, STEP_TOKENS_MAX + 1)}
    assert len({bucket for bucket in buckets if bucket > ROWS_NATIVE_MAX}) * LINEARS <= PRIMITIVES_MAX
    assert len(buckets) * LINEARS <= PRIMITIVES_MAX, "without our kernel small steps are oneDNN's too"
    for rows in range(1, 20_000):
        bucket = bucket_rows(rows)
        assert rows <= bucket == bucket_rows(bucket)
        assert bucket - rows <= (rows // 8 if rows > ROWS_NATIVE_MAX else 15 * (rows > 16)), rows


@pytest.mark.parametrize("shape", [(1, 7), (3, 7), (2, 5, 7), (0, 7), (130, 7)])
def test_bucketed_product_equals_the_product(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(3, 7)
    seen: list[int] = []

    def product(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows @ weight.T

    torch.testing.assert_close(in_bucket(x, product), x @ weight.T)
    assert seen == [bucket_rows(x.numel() // 7)]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the allocator does not say what it holds")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("captured", [True, False])
def test_model_memory_is_bounded_for_any_shapes(dtype: torch.dtype, captured: bool) -> None:
    """All buckets once, then many other sizes: nothing more is kept. A primitive alone weighs a tenth of the slack."""
    module = tiny("llama", dtype)
    forward: Any = capture_forward(module) if captured else EagerForward(module)
    assert forward is not None
    if captured:
        release_weights(module)
    sizes = range(ROWS_NATIVE_MAX + 1, 700)
    for bucket in sorted({bucket_rows(tokens) for tokens in sizes}):
        step(forward, bucket)
    before = bytes_in_use()
    for tokens in sizes[::7]:
        step(forward, tokens)
    assert bytes_in_use() - before < 4_000_000


def test_padded_step_equals_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two buckets the logits are those of the module, and oneDNN sees the bucket."""
    module = tiny("llama")
    expected = step(EagerForward(tiny("llama"), pack=False), 200, 3)
    forward = capture_forward(module)
    assert forward is not None
    rows: set[int] = set()
    many = linears.PackedLinear._many_rows

    def spy(self: Any, x: torch.Tensor) -> torch.Tensor:
        rows.add(len(x))
        return many(self, x)

    monkeypatch.setattr(linears.PackedLinear, "_many_rows", spy)
    torch.testing.assert_close(step(forward, 200, 3), expected, atol=1e-3, rtol=1e-3)
    assert rows <= {208}
