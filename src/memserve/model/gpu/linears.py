"""Linears of few rows on a GPU, in Triton: the weight streams through once, at the speed of the memory.

Libraries are made for many rows; with few they leave a fifth to a half of the bandwidth. Importing this module needs
the package ``triton``; ``TRITON_INTERPRET=1`` runs its kernels on a CPU.

Between two linears are the operations of :mod:`memserve.model.capture.operations`: every small kernel there adds
microseconds to a decode step.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from memserve.base.units import ceil_div
from memserve.model.capture import operations as fused
from memserve.model.gpu.quantised import FEW_ROWS_STORED, ONE_ROW_STORED, Options, few_rows_stored, one_row_stored
from memserve.model.gpu.weights import DeviceWeight
from memserve.model.linears import ROW_BUCKETS, JoinedLinear, Kernel

log = logging.getLogger(__name__)


@triton.jit
def one_row_kernel(
    x, weight, bias, y, n, k, stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program (piece): ``OUTPUTS`` outputs of one row, ``INPUTS`` inputs at a time."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    live = outputs < n
    inputs = tl.arange(0, INPUTS)
    rows = weight + outputs[:, None].to(tl.int64) * stride
    sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(0, k, INPUTS):
        if EVEN:
            value = tl.load(x + start + inputs)
            part = tl.load(rows + (start + inputs)[None, :], mask=live[:, None], other=0.0)
        else:
            inside = start + inputs < k
            value = tl.load(x + start + inputs, mask=inside, other=0.0)
            part = tl.load(rows + (start + inputs)[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        sums += part.to(tl.float32) * value.to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if BIAS:
        total += tl.load(bias + outputs, mask=live, other=0.0).to(tl.float32)
    tl.store(y + outputs, total.to(y.dtype.element_ty), mask=live)


@triton.jit
def few_rows_kernel(
    x, weight, bias, y, count, n, k, stride_x, stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Program (piece): ``OUTPUTS`` outputs of up to ``ROWS`` rows, by tensor cores."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    live = outputs < n
    rows = tl.arange(0, ROWS)
    inputs = tl.arange(0, INPUTS)
    live_rows = rows < count
    places = x + rows[:, None] * stride_x
    columns = weight + outputs[None, :].to(tl.int64) * stride
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, k, INPUTS):
        offsets = start + inputs
        if EVEN:
            value = tl.load(places + offsets[None, :], mask=live_rows[:, None], other=0.0)
            part = tl.load(columns + offsets[:, None], mask=live[None, :], other=0.0)
        else:
            value = tl.load(places + offsets[None, :], mask=live_rows[:, None] & (offsets < k)[None, :], other=0.0)
            part = tl.load(columns + offsets[:, None], mask=live[None, :] & (offsets < k)[:, None], other=0.0)
        if WIDE:  # Triton's interpreter multiplies bfloat16 as if it were an integer
            value, part = value.to(tl.float32), part.to(tl.float32)
        sums = tl.dot(value, part, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + outputs, mask=live, other=0.0).to(tl.float32)[None, :]
    place = y + rows[:, None] * n + outputs[None, :]
    tl.store(place, sums.to(y.dtype.element_ty), mask=live_rows[:, None] & live[None, :])


ONE_ROW: tuple[Options, ...] = (
    {"OUTPUTS": 4, "INPUTS": 1024, "num_warps": 4}, {"OUTPUTS": 2, "INPUTS": 2048, "num_warps": 4},
    {"OUTPUTS": 8, "INPUTS": 512, "num_warps": 4},
)  # fmt: skip
FEW_ROWS: tuple[Options, ...] = (
    {"OUTPUTS": 32, "INPUTS": 128, "num_warps": 4, "num_stages": 5},
    {"OUTPUTS": 16, "INPUTS": 256, "num_warps": 2, "num_stages": 4},
    {"OUTPUTS": 64, "INPUTS": 128, "num_warps": 4, "num_stages": 4},
)
"""What is tried for a linear: which is quickest depends on the device and on the shape, and is measured."""

_TRIAL_BYTES = 1 << 28  # of weights: several times what a device caches
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-3}
_GAIN = 0.97  # of the library's time: what is hardly quicker is not taken


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, options: Options) -> Tensor:
    """``x [..., k]`` of one row times ``weight [n, k]`` transposed, plus ``bias [n]``: ``[..., n]`` of ``dtype``. Sums
    are float32."""
    n, k = weight.shape
    flat = x.reshape(k)
    y = torch.empty(n, dtype=dtype, device=x.device)
    one_row_kernel[(ceil_div(n, options["OUTPUTS"]),)](
        flat, weight, weight if bias is None else bias, y, n, k, weight.stride(0), BIAS=bias is not None,
        EVEN=k % options["INPUTS"] == 0, **options,
    )  # fmt: skip
    return y.view(*x.shape[:-1], n)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, options: Options) -> Tensor:
    """As :func:`one_row` for one row or several; up to 64 make sense."""
    n, k = weight.shape
    flat = x.reshape(-1, k)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    count = len(flat)
    y = torch.empty((count, n), dtype=dtype, device=x.device)
    few_rows_kernel[(ceil_div(n, options["OUTPUTS"]),)](
        flat, weight, weight if bias is None else bias, y, count, n, k, flat.stride(0), weight.stride(0),
        ROWS=max(16, 1 << (count - 1).bit_length()), BIAS=bias is not None, EVEN=k % options["INPUTS"] == 0,
        WIDE=x.device.type == "cpu", **options,
    )  # fmt: skip
    return y.view(*x.shape[:-1], n)


def graph_seconds(calls: list[Callable[[], object]], rounds: int = 5) -> float:
    """Time of all ``calls`` on the device, one after the other, without the host's part: the median."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())  # which may be still filling what the calls read
    with torch.cuda.stream(stream):
        for call in calls:  # kernels are compiled, workspaces allocated
            call()
    stream.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    took = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / 1e3)
    return float(sorted(took)[rounds // 2])


def choose_kernels(layers: list[JoinedLinear], seconds: Callable[[list[Callable[[], object]]], float]) -> int:
    """Let each of ``layers`` compute few rows by the quickest of what is tried, the library included. Returns how many
    shapes and numbers of rows are quicker than the library. ``seconds``: what some calls take on the device."""
    groups: dict[tuple[object, ...], list[JoinedLinear]] = defaultdict(list)
    for layer in layers:
        weight = layer.weight
        form = weight.form if isinstance(weight, DeviceWeight) else "rows" if weight.stride(1) == 1 else ""
        if weight.dtype in (torch.bfloat16, torch.float16) and form:
            groups[form, weight.shape, weight.dtype, layer.bias is None, layer.dtype].append(layer)
    quicker_count = 0
    for alike in groups.values():
        trial = alike[: max(1, _TRIAL_BYTES // alike[0].weight.nbytes)]
        for rows in ROW_BUCKETS:
            kernel = _quickest(trial, rows, seconds)
            quicker_count += kernel is not None
            for layer in alike:
                layer.use_kernel(rows, kernel)
    return quicker_count


def _quickest(layers: list[JoinedLinear], rows: int, seconds: Callable[..., float]) -> Kernel | None:
    """The quickest kernel for ``rows`` rows that computes what the library does; None: the library."""
    weight = layers[0].weight
    x = torch.randn((rows, weight.shape[1]), device=weight.device).to(weight.dtype)
    expected = layers[0].compute_plain(x).float()
    best, least = None, seconds([partial(layer.compute_plain, x) for layer in layers]) * _GAIN
    for kernel in _kernels_for(weight, rows):
        try:
            error = (kernel(x, weight, layers[0].bias, layers[0].dtype).float() - expected).abs().max()
            if not error <= _TOLERANCE[weight.dtype] * expected.abs().max():
                log.warning("a kernel for %d rows of %s is wrong here, and not used", rows, tuple(weight.shape))
                continue
            took = seconds([partial(kernel, x, layer.weight, layer.bias, layer.dtype) for layer in layers])
        except Exception as error:  # too much shared memory for this device, say: the library is always there
            log.info("a kernel for %d rows of %s does not run here: %s", rows, tuple(weight.shape), error)
            continue
        if took < least:
            best, least = kernel, took
    return best


def _kernels_for(weight: Tensor | DeviceWeight, rows: int) -> list[Kernel]:
    """What is tried for a ``weight`` and so many rows."""
    tried: list[Kernel]
    if isinstance(weight, DeviceWeight):
        tried = [partial(few_rows_stored, options=options) for options in FEW_ROWS_STORED]
        singles: list[Kernel] = [partial(one_row_stored, options=options) for options in ONE_ROW_STORED]
    else:
        tried = [partial(few_rows, options=options) for options in FEW_ROWS]
        singles = [partial(one_row, options=options) for options in ONE_ROW]
    return singles + tried if rows == 1 else tried


_GATE_CODES = {**fused.GATE_CODES, "gelu": 2}
_COLUMNS = 1024  # of a row, that a program of :func:`gated` computes


@triton.jit
def rms_norm_kernel(
    x, residual, weight, total, y, eps, inner, stride_outer, stride_inner, width,
    WIDTH_PAD: tl.constexpr, ADDS: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """Program (row): the row of ``x``, with ``residual`` added, normalised; results are dense rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < width
    start = (row // inner) * stride_outer + (row % inner) * stride_inner
    value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    place = row * width + column
    if ADDS:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + place, value, mask=inside)
        value = value.to(tl.float32)
    mean = tl.sum(value * value, 0) / width
    value = value * tl.rsqrt(mean + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0)
    if ROUND_FIRST:
        value = value.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + place, (value * gain).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(gate, stride_gate, up, stride_up, y, width, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, piece): ``act(gate) * up``, the activation rounded to the dtype before the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    value = tl.load(gate + row * stride_gate + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * stride_up + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        value = value * tl.sigmoid(value)
    elif KIND == 1:  # tanh(x) = 2 sigmoid(2x) - 1
        bent = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = value * tl.sigmoid(2.0 * bent)
    else:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    value = value.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * width + column, (value * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rotary_kernel(
    x, stride_token, stride_head, cosine, sine, stride_table, y, dim,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Program (token): all heads, ``x * cos + (-x[half:], x[:half]) * sin``, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    column = tl.arange(0, DIM_PAD)[None, :]
    half = dim // 2
    inside = (head < HEADS) & (column < dim)
    row = x + token * stride_token + head * stride_head
    partner = tl.where(column < half, column + half, column - half)
    straight = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    crossed = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    crossed = tl.where(column < half, -crossed, crossed)
    cos = tl.load(cosine + token * stride_table + column, mask=column < dim, other=0.0).to(tl.float32)
    sin = tl.load(sine + token * stride_table + column, mask=column < dim, other=0.0).to(tl.float32)
    place = (token * HEADS + head) * dim + column
    tl.store(y + place, (straight * cos + crossed * sin).to(y.dtype.element_ty), mask=inside)


def _padded(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _warps(width: int) -> int:
    """Of a program that has a row of so many elements in registers."""
    return min(16, max(4, width // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, round_first: bool) -> Tensor:
    """See :func:`memserve.model.capture.operations.rms_norm`."""
    return _rms_norm(x, None, weight, eps, round_first)[1]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, round_first: bool) -> tuple[Tensor, Tensor]:
    """See :func:`memserve.model.capture.operations.add_rms_norm`."""
    return _rms_norm(x, residual.contiguous(), weight, eps, round_first)


def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    x, outer, inner, stride_outer, stride_inner = fused.rows_of(x)
    width, adds = x.shape[-1], residual is not None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y) if adds else y
    if outer * inner:
        rms_norm_kernel[(outer * inner,)](
            x, x if residual is None else residual, weight, total, y, eps, inner, stride_outer, stride_inner, width,
            WIDTH_PAD=_padded(width), ADDS=adds, ROUND_FIRST=round_first, num_warps=_warps(width),
        )  # fmt: skip
    return total, y


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """See :func:`memserve.model.capture.operations.gated`."""
    width, shape = gate.shape[-1], gate.shape
    gate, _, rows, _, stride_gate = fused.one_level(gate)
    up, _, _, _, stride_up = fused.one_level(up)
    y = torch.empty(shape, dtype=gate.dtype, device=gate.device)
    if rows:
        gated_kernel[(rows, ceil_div(width, _COLUMNS))](
            gate, stride_gate, up, stride_up, y, width, KIND=_GATE_CODES[kind], COLUMNS=_COLUMNS
        )
    return y


def rotary(x: Tensor, cosine: Tensor, sine: Tensor, token_dim: int) -> Tensor:
    """See :func:`memserve.model.capture.operations.rotary`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    cosine, sine = (table if table.stride(-1) == 1 else table.contiguous() for table in (cosine, sine))
    if sine.stride(token_dim) != cosine.stride(token_dim):
        cosine, sine = cosine.contiguous(), sine.contiguous()
    head_dim = 3 - token_dim
    tokens, heads, dim = x.shape[token_dim], x.shape[head_dim], x.shape[-1]
    y = torch.empty((1, tokens, heads, dim), dtype=x.dtype, device=x.device)
    if tokens:
        rotary_kernel[(tokens,)](
            x, x.stride(token_dim), x.stride(head_dim), cosine, sine, cosine.stride(token_dim), y, dim,
            HEADS=heads, HEADS_PAD=_padded(heads), DIM_PAD=_padded(dim), num_warps=_warps(heads * dim),
        )  # fmt: skip
    return y if token_dim == 1 else y.transpose(1, 2)


OPERATIONS = {
    fused.rms_norm: rms_norm, fused.add_rms_norm: add_rms_norm, fused.gated: gated, fused.rotary: rotary,
}  # fmt: skip
"""What takes the place of the CPU's."""
