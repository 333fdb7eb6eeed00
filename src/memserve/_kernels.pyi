"""Native compute on CPU: paged attention. No torch linkage; the GIL is released in bulk work."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Address: TypeAlias = tuple[int, int, int]
"""``[token, head, element]`` storage: (pointer, token stride, head stride), strides in elements, elements dense."""

Geometry: TypeAlias = tuple[int, int, int, int, int, str, str]
"""(num_layers, num_kv_heads, head_dim_k, head_dim_v, block_tokens, dtype name: float32 | bfloat16 | float16,
KV dtype name: auto | int8 | fp8 | int4, see ``src/kernels/kv_codes.h``)."""

def isa() -> str:
    """The instruction set in use: ``portable``, ``avx2``, ``avx512`` or ``avx512_bf16``."""

def supported_isas() -> list[str]:
    """What this processor can run, narrowest first; the last one is used unless one is forced."""

def force_isa(name: str | None) -> None:
    """Use the named instruction set from now on, ``None``: the widest. For tests. ValueError: not supported here."""

class PagedBatch:
    """One step's ragged batch: built once per step, used by every layer.

    Row ``i`` has ``q_starts[i + 1] - q_starts[i]`` new tokens (0 is allowed), the last of ``contexts[i]`` tokens; its
    blocks are the first ids of ``tables[table_rows[i]]``. The ids are copied, so the arrays may be reused at once.
    """

    def __init__(
        self,
        base: int,
        geometry: Geometry,
        tables: NDArray[np.int32],
        table_rows: NDArray[np.int32],
        q_starts: NDArray[np.int32],
        contexts: NDArray[np.int32],
        num_blocks: int | None = None,
        page_heads: int | None = None,
        behind: bool = False,
        latent: bool = False,
    ) -> None:
        """``base``: address of the arena of pages. ``tables [slots, max_blocks]``, ``table_rows [rows]``,
        ``q_starts [rows + 1]``, ``contexts [rows]``: int32, C-contiguous. ``num_blocks``: size of the arena.
        ``page_heads``: kv heads of a whole page, where ``geometry`` and ``base`` are those of some of them.
        ``behind``: the new tokens follow the contexts, which other processes continue: they see all of them, without a
        window, and are not written. ``latent``: pages have one head and no V, a value begins its key.

        Head sizes are multiples of 8, ``block_tokens`` is a multiple of 16 (32 is the fast one).
        Raises ValueError, naming the value, for shapes that do not fit and for block ids outside the arena.
        """

    @property
    def tokens(self) -> int:
        """New tokens of all rows: the first dimension of q, k, v and out."""

    @property
    def rows(self) -> int:
        """Sequences in the batch."""

def attend(
    batch: PagedBatch,
    layer: int,
    heads: int,
    q: Address,
    k: Address,
    v: Address,
    out: Address,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: NDArray[np.float32] | None = None,
    write: bool = True,
    statistics: NDArray[np.float32] | None = None,
) -> None:
    """Store this step's ``k, v`` in the pages of ``layer``, then causal attention of ``q`` over the paged context.

    ``q [T, heads, head_dim_k]``, ``k [T, kv_heads, head_dim_k]``, ``v [T, kv_heads, head_dim_v]`` and ``out [T, heads,
    head_dim_v]`` have the geometry's dtype; query head ``h`` reads kv head ``h // (heads // kv_heads)``. Softmax and
    sums are float32 (weights are rounded to bfloat16 where the processor multiplies it). All rows write before any
    row reads. ``window`` > 0: only the last ``window`` positions, the own one included. ``softcap`` > 0:
    ``s = softcap * tanh(s / softcap)``. ``sinks [heads]``: one extra logit a head, in the denominator only.
    ``write=False``: the pages hold ``k, v`` already; both arguments are ignored. ``statistics [T, heads]``: gets the
    base-2 logarithms of the softmax's denominators, with which :func:`merge_parts` puts parts of a context together;
    ``out`` is float32 then, and there are no ``sinks``.

    Runs on as many threads as OpenMP (torch.set_num_threads) allows. Raises ValueError, naming the value.
    """

def merge_parts(outputs: NDArray[np.float32], statistics: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Attention over a context from its results over ``parts`` of that context.

    ``outputs [parts, rows, dim]`` and ``statistics [parts, rows]`` are what :func:`attend` gives for each part, ``out
    [rows, dim]`` gets the whole. All float32, C-contiguous. Raises ValueError for other shapes.
    """

# The fused kernels take addresses (of dense or row-strided float32 | bfloat16 | float16 storage, dtype codes 0 | 1 | 2)
# and trust them: `memserve.model.capture.operations` is their checked face.

def rms_norm(
    x: int,
    residual: int,
    sum: int,
    y: int,
    weight: int,
    eps: float,
    round_first: bool,
    outer: int,
    inner: int,
    stride_outer: int,
    stride_inner: int,
    width: int,
    dtype: int,
) -> None:
    """``y = norm(x [+ residual]) * weight`` for ``outer * inner`` rows of ``width``; ``weight`` is float32.

    ``residual`` 0: no addition. Else ``sum`` receives ``x + residual``. ``residual, sum, y`` are dense.
    """

def gated(
    gate: int, stride_gate: int, up: int, stride_up: int, y: int, rows: int, width: int, kind: int, dtype: int
) -> None:
    """``y = act(gate) * up``, dense ``y [rows, width]``; ``kind``: 0 SiLU, 1 GELU by tanh."""

def rotary(
    x: int,
    stride_token: int,
    stride_head: int,
    cosine: int,
    sine: int,
    stride_table: int,
    y: int,
    tokens: int,
    heads: int,
    dim: int,
    dtype: int,
) -> None:
    """``y = x * cos + (-x[half:], x[:half]) * sin``, dense ``y [tokens, heads, dim]``."""

def linear(
    x: int,
    stride_x: int,
    weight: int,
    bias: int,
    y: int,
    stride_y: int,
    rows: int,
    k: int,
    k_padded: int,
    n: int,
    block: int,
    dtype: int,
    wide: bool,
) -> None:
    """``y = x @ weight.T + bias`` over a weight in oneDNN's blocks of 32 or 64 outputs; float32 and bfloat16."""

LOW_RANK_MAX: int
"""The greatest rank that :func:`low_rank` computes."""

def low_rank(x: int, y: int, rows: int, count: int, k: int, n: int, dtype: int) -> None:
    """``y[row] += b.T @ (a @ x[row])`` for ``count`` rows of dense ``x [.., k]`` and ``y [.., n]``. ``rows``, int64
    ``[count, 4]``: the row, the addresses of its ``a [rank, k]`` and ``b [rank, n]`` (0: nothing is added), the rank. A
    row comes out the same whatever the others are."""

# Recurrent layers: see src/kernels/recurrent.h. Addresses are trusted: `memserve.model.states.recurrence` is the
# checked face. ``pieces``: int64 ``[count, 5]``; an operation finds its part ``offset`` bytes behind each state.

TAPS_MAX: int
"""Over how many tokens :func:`convolve` reaches at most."""

def convolve(
    x: int, stride_x: int, weight: int, bias: int, y: int, channels: int, taps: int, kept: int, silu: bool,
    pieces: int, count: int, offset: int, dtype: int,
) -> None:  # fmt: skip
    """A causal convolution of each channel; ``weight [taps, channels]``, ``bias`` float32. ValueError: taps."""

def delta_rule(
    q: int, stride_q: int, k: int, stride_k: int, v: int, stride_v: int, decay: int, stride_decay: int, beta: int,
    stride_beta: int, y: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, normalises: bool,
    pieces: int, count: int, offset: int, dtype: int,
) -> None:  # fmt: skip
    """The gated delta rule; ``decay`` float32, as a logarithm."""

def scan(
    x: int, stride_x: int, dt: int, stride_dt: int, b: int, stride_b: int, c: int, stride_c: int, a: int, skip: int,
    dt_bias: int, y: int, heads: int, groups: int, head_dim: int, state_size: int, softplus: bool, least: float,
    most: float, pieces: int, count: int, offset: int, dtype: int,
) -> None:  # fmt: skip
    """Mamba-2's scan; ``y``, ``a``, ``skip`` and ``dt_bias`` are float32."""

# Quantised weights: see src/kernels/quantised.h. Addresses are trusted: `memserve.model.quantised` is the checked face.

QUANTISED_STRIP: int
"""Weights of which all but the last have multiples of so many outputs can lie behind each other."""

QUANTISED_FORMATS: list[str]
"""Names of the formats; their places are the codes below."""

def quantised_packed_bytes(format: str, n: int, k: int) -> int:
    """Bytes of a packed weight ``[n, k]``. ValueError: an unknown format, or ``k`` is not a multiple of its blocks."""

def quantised_file_bytes(format: str, n: int, k: int) -> int:
    """Bytes of the same weight in a GGUF file; 0: no format of such files. ValueError: as above."""

def quantised_pack(format: str, blocks: int, order: int, n: int, k: int, to: int) -> None:
    """Pack ``n`` rows of blocks as in a GGUF file into ``quantised_packed_bytes`` bytes. ``order``: int64 ``[n]``, the
    row that each output is (0: the same). ValueError: as above, and for a format of no file."""

def quantised_pack_groups(format: str, values: int, scales: int, zeros: int, n: int, k: int, to: int) -> None:
    """Pack uint8 ``values [n, k]`` with float16 ``scales`` and ``zeros`` ``[n, k / group]``; numbers of 8 bits with
    float32 ``scales``, and without ``zeros`` (0). ValueError: as above, and for a format of GGUF files."""

def quantised_layout(format: str) -> tuple[int, str, str, int, int, int, list[int], bool]:
    """``Layout`` of src/kernels/quantised.h: bits, scale, minimum, zero, groups of a block, parts of a group; what four
    bits mean (empty: themselves); whether values are numbers of 8 bits. ValueError: an unknown format."""

def quantised_block_inputs(format: str) -> int:
    """Inputs of a block: a packed weight is cut at multiples of them. ValueError: an unknown format."""

def quantised_cut(
    format: str, weight: int, outputs: int, blocks: int, k: int, n: int, count: int, to: int
) -> None:  # fmt: skip
    """Pack ``outputs``, int64 ``[n]``, and ``blocks`` of inputs, int64 ``[count]``, of a packed weight with ``k``
    inputs. ValueError: as above."""

def quantised_linear(
    x: int,
    stride_x: int,
    weight: int,
    bias: int,
    y: int,
    stride_y: int,
    rows: int,
    k: int,
    n: int,
    format: int,
    dtype_x: int,
    dtype_y: int,
    bits: int,
) -> None:
    """``y = x @ weight.T + bias`` over a packed weight; ``bias`` float32 or 0. Rows of ``x`` are rounded to integers of
    ``bits`` (8 or 15), with a scale for 32 of them. 0: they are not; the weight becomes numbers of ``dtype_x``
    (float32, bfloat16), and ``dtype_y`` is the same or float32. So with any ``bits`` for numbers of 8 bits,
    which up to 128 rows meet as they are."""

def quantised_gather(weight: int, ids: int, count: int, y: int, k: int, format: int, dtype: int) -> None:
    """``y[i]`` = the weights of output ``ids[i]``, int64, as numbers: dense ``y [count, k]``."""

def quantised_set() -> str:
    """The kernels for quantised weights in use: those that suit :func:`isa`, with VNNI where the processor has it."""

def quantised_sets() -> list[str]:
    """What this processor can run, narrowest first."""

def force_quantised_set(name: str | None) -> None:
    """Use the named set from now on, ``None``: the one that suits. For tests. ValueError: not supported here."""

def draw(
    logits: int,
    stride: int,
    vocab: int,
    rows: int,
    temperature: int,
    top_k: int,
    top_p: int,
    min_p: int,
    uniform: int,
    tokens: int,
    count: int,
) -> None:
    """Draw ``count`` tokens (addresses of float32, int64, float64 arrays ``[count]``), the i-th from row ``rows[i]`` of
    ``logits`` (float32, ``stride`` elements a row). The rule is that of ``memserve.model.sampling``."""

def log_normalisers(logits: int, stride: int, vocab: int, out: int, count: int) -> None:
    """``out[i] = log(sum(exp(logits[i])))``, float32."""

def best_logits(logits: int, stride: int, vocab: int, best: int, values: int, tokens: int, count: int) -> None:
    """The ``best`` largest logits of each of ``count`` rows: ``values [count, best]`` float32, best first, and their
    ``tokens [count, best]`` int64; the lower id among equals."""

class Program:
    """Fused operations over fixed buffers, run in pieces: one team of threads a piece, a barrier after each operation.

    Buffers are addresses, or external tensor number ``n`` as ``-1 - n``. ``count``: 0 has a row a token, 1 a row a
    requested logits row. The operations are those above; outputs are dense.
    """

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def rms_norm(
        self,
        x: int,
        residual: int,
        sum: int,
        y: int,
        weight: int,
        eps: float,
        round_first: bool,
        inner: int,
        stride_outer: int,
        stride_inner: int,
        width: int,
        dtype: int,
        count: int,
    ) -> None:
        """Append :func:`rms_norm`."""

    def reduce(self, x: int, y: int, width: int, dtype: int, count: int) -> None:
        """Append the sum of dense rows over the workers of :meth:`join`'s collective."""

    def join(self, collective: Collective) -> None:
        """Take sums over ``collective`` from now on; before, made-up values stand in for the others'."""

    def gated(
        self,
        gate: int,
        stride_gate: int,
        up: int,
        stride_up: int,
        y: int,
        width: int,
        kind: int,
        dtype: int,
        count: int,
    ) -> None:
        """Append :func:`gated`."""

    def rotary(
        self,
        x: int,
        stride_token: int,
        stride_head: int,
        cosine: int,
        sine: int,
        stride_table: int,
        y: int,
        heads: int,
        dim: int,
        dtype: int,
        count: int,
    ) -> None:
        """Append :func:`rotary`."""

    def linear(
        self,
        x: int,
        stride_x: int,
        weight: int,
        bias: int,
        y: int,
        k: int,
        k_padded: int,
        n: int,
        block: int,
        dtype: int,
        count: int,
    ) -> None:
        """Append :func:`linear`."""

    def quantised_linear(
        self,
        x: int,
        stride_x: int,
        weight: int,
        bias: int,
        y: int,
        k: int,
        n: int,
        format: int,
        bits: int,
        dtype: int,
        count: int,
    ) -> None:
        """Append :func:`quantised_linear`, of 8 or 15 ``bits``; ``y`` has the dtype of ``x``."""

    def start(self, tokens: int, logits_rows: int) -> None:
        """A step begins: how many rows the operations have."""

    def run(self, begin: int, end: int, first_external: int, addresses: list[int]) -> None:
        """Set externals ``first_external, first_external + 1, ...``, then run the operations ``[begin, end)``."""

class Collective:
    """The workers of one instance, and what they exchange, through memory that all of them map; see
    ``src/kernels/collective.h``. Every rank calls the same operations in the same order.

    ``RuntimeError``: another worker has ended (``abort``), or has not come within ``timeout_s``.
    """

    def __init__(self, region: int, rank: int, size: int, slot_bytes: int, timeout_s: float) -> None:
        """``region``: address of ``region_bytes(size, slot_bytes)`` bytes that were zero before the first rank came."""
    @staticmethod
    def region_bytes(size: int, slot_bytes: int) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def waited_ns(self) -> int:
        """How long this rank has waited for others, beyond the first microseconds of each wait."""
    @property
    def aborted(self) -> bool: ...
    def all_reduce(self, x: int, out: int, count: int, dtype: int) -> None:
        """``out`` = the sum of all ranks' ``x``: dense, ``count`` elements, the same bits everywhere."""
    def gather(self, x: int, rows: int, widths: list[int], out: int) -> None:
        """Rank 0's ``out`` receives ``rows`` rows: ``widths[r]`` bytes of each from rank ``r``, beside one another."""
    def broadcast(self, data: int, bytes: int, root: int) -> None:
        """Every rank's ``data`` becomes that of ``root``."""
    def meet(self) -> None:
        """Return when all ranks have come."""
    def announce(self) -> None:
        """Say that this rank has come; an operation like all others, but that it waits for no other rank."""
    def await_rank(self, rank: int) -> None:
        """Return when ``rank`` has announced: after the own ``announce``, before the next operation."""
    def abort(self) -> None:
        """End all waits of all ranks, now and from now on."""
