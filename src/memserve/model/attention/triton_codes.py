"""KV of a byte or less in Triton: the rule of rounding, and the inside of a page of codes (``src/kernels/kv_codes.h``).

::

    one head of a page, in words of 4 bytes
    0          K [ceil(DK / DEPTH), BLOCK]      a word: DEPTH neighbouring elements of a token
    VALUES     V [BLOCK / DEPTH, DV]            a word: an element of DEPTH neighbouring tokens
    DK_MAXIMA  maxima [groups of K, BLOCK / 2]  a word: those of two neighbouring tokens
    DV_MAXIMA  maxima [groups of V, BLOCK / 2]

The same bytes as on a CPU: integer arithmetic, one exact division and one product decide. Compile what rounds with
``enable_fp_fusion=False``: a product that is rounded together with a sum would be another number. No instruction for
8-bit floats is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

REBIAS = tl.constexpr(2.0**120)  # of float32's exponent over e4m3's, whose exponent has a bias of 7
ROUND = tl.constexpr(1.5 * 2.0**23)  # what is added to it is rounded to a whole number, ties to even
BELOW = tl.constexpr(2.0**14)  # the same for e4m3's least numbers, multiples of 2^-9
BELOW_BITS = tl.constexpr(0x46800000)  # those of BELOW
LEAST = tl.constexpr((127 - 100) << 23)  # bits of 2^-100: what is less is zero
LIMIT = tl.constexpr((127 + 127) << 23)  # bits of 2^127: from there on, no number
NO_NUMBER = tl.constexpr(0x7FC0)


@triton.jit
def largest_code(CODES: tl.constexpr):
    """The code that stands for a group's maximum."""
    return 127.0 if CODES == "int8" else 448.0 if CODES == "fp8" else 7.0


@triton.jit
def shifts_in_word(DEPTH: tl.constexpr):
    """Where the codes of a word lie in it."""
    place = tl.arange(0, DEPTH)
    return place % 4 * 8 + place // 4 * 4


@triton.jit
def code_of(scaled, CODES: tl.constexpr, DEPTH: tl.constexpr):
    """The nearest code of each number, int32."""
    if CODES != "fp8":
        return (scaled + ROUND).to(tl.int32, bitcast=True) & ((1 << (32 // DEPTH)) - 1)
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    below = (magnitude.to(tl.float32, bitcast=True) + BELOW).to(tl.int32, bitcast=True) - BELOW_BITS
    normal = (magnitude - ((127 - 7) << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    return (tl.where(magnitude < (127 - 6) << 23, below, normal) & 0x7F) | ((bits >> 24) & 0x80)


@triton.jit
def round_rows(x, CODES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """Codes ``[R, D]`` and maxima ``[R, D / WIDTH]``, bits of a bfloat16, of ``x`` float32 ``[R, D]``; int32 both."""
    GROUPS: tl.constexpr = x.shape[1] // WIDTH
    x = tl.reshape(x, (x.shape[0], GROUPS, WIDTH))
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    maxima = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    maxima = tl.where(bits < LIMIT, tl.where(bits < LEAST, 0, maxima), NO_NUMBER)
    counts = (maxima > 0) & (maxima < NO_NUMBER)
    divisor = tl.where(counts, maxima << 16, 0x3F800000).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full(divisor.shape, largest_code(CODES), tl.float32), divisor)
    codes = tl.where(counts[:, :, None], code_of(x * inverse[:, :, None], CODES, DEPTH), 0)
    return tl.reshape(codes, (x.shape[0], GROUPS * WIDTH)), maxima


@triton.jit
def unpack_words(words, CODES: tl.constexpr, DEPTH: tl.constexpr):
    """The codes in ``words`` int32 ``[R, C]`` as numbers, float32 ``[R * DEPTH, C]``."""
    BITS: tl.constexpr = 32 // DEPTH
    shifts = shifts_in_word(DEPTH)[None, :, None]
    if CODES == "fp8":
        code = words[:, None, :] >> shifts
        numbers = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * REBIAS
    else:
        numbers = ((words[:, None, :] << (32 - BITS - shifts)) >> (32 - BITS)).to(tl.float32)
    return tl.reshape(numbers, (words.shape[0] * DEPTH, words.shape[1]))


@triton.jit
def store_maxima(head, t, live, maxima, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """``maxima`` ``[R, groups]`` of tokens ``t [R]``. ``head``: the word where they begin."""
    group = tl.arange(0, maxima.shape[1])[None, :]
    places = head.to(tl.pointer_type(tl.uint16), bitcast=True) + group * BLOCK + t[:, None]
    tl.store(places, maxima.to(tl.uint16), mask=live[:, None] & (group * WIDTH < D))


@triton.jit
def store_keys(
    head, t, live, x,
    CODES: tl.constexpr, DEPTH: tl.constexpr, DK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of K, float32 ``[R, DK_PAD]``, of the ``live`` ones of tokens ``t [R]``; returns their maxima."""
    UNITS: tl.constexpr = x.shape[1] // DEPTH
    unit = tl.arange(0, UNITS)[None, :]
    codes, maxima = round_rows(x, CODES, DEPTH, WIDTH)
    words = tl.sum(tl.reshape(codes, (x.shape[0], UNITS, DEPTH)) << shifts_in_word(DEPTH)[None, None, :], 2)
    tl.store(head + unit * BLOCK + t[:, None], words, mask=live[:, None] & (unit * DEPTH < DK))
    return maxima


@triton.jit
def store_values(values, live, x, CODES: tl.constexpr, DEPTH: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr):
    """Codes of V, float32 ``[DEPTH, DV_PAD]``, of the ``live`` tokens of one unit, the words from ``values`` on; those
    of its other tokens stay. Returns their maxima."""
    dv, shifts = tl.arange(0, x.shape[1]), shifts_in_word(DEPTH)[:, None]
    codes, maxima = round_rows(x, CODES, DEPTH, WIDTH)
    others = ~tl.sum(tl.where(live[:, None], ((1 << (32 // DEPTH)) - 1) << shifts, 0), 0)
    words = tl.load(values + dv, mask=dv < DV, other=0) & others
    tl.store(values + dv, words | tl.sum(tl.where(live[:, None], codes << shifts, 0), 0), mask=dv < DV)
    return maxima


@triton.jit
def load_scales(
    maxima, t, inside,
    CODES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What codes are multiplied by, float32 ``[GROUPS, KEYS]``. ``maxima``, ``t``, ``inside`` ``[KEYS / 2]``: of two
    neighbouring tokens where their page's maxima begin, their number in the page, and whether they are there. A word
    has both: what has less than 4 bytes is not copied beside the computation."""
    group = tl.arange(0, GROUPS)[:, None]
    mask = inside[None, :] & (group * WIDTH < D)
    both = tl.load(maxima[None, :] + (group * (BLOCK // 2) + t[None, :]), mask=mask, other=0)
    bits = tl.interleave(both << 16, both & -0x10000)
    return bits.to(tl.float32, bitcast=True) * (1.0 / largest_code(CODES))


@triton.jit
def load_keys(
    head, t, inside, scales,
    CODES: tl.constexpr, DEPTH: tl.constexpr, DK: tl.constexpr, BLOCK: tl.constexpr, DK_PAD: tl.constexpr,
):  # fmt: skip
    """K float32 ``[DK_PAD, KEYS]``: of key ``i`` that of token ``t[i]`` in the page of ``head[i]``."""
    GROUPS: tl.constexpr = scales.shape[0]
    unit = tl.arange(0, DK_PAD // DEPTH)[:, None]
    words = tl.load(head[None, :] + (unit * BLOCK + t[None, :]), mask=(unit * DEPTH < DK) & inside[None, :], other=0)
    numbers = tl.reshape(unpack_words(words, CODES, DEPTH), (GROUPS, DK_PAD // GROUPS, t.shape[0]))
    return tl.reshape(numbers * scales[:, None, :], (DK_PAD, t.shape[0]))


@triton.jit
def load_values(
    values, unit, inside, scales,
    CODES: tl.constexpr, DEPTH: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """V float32 ``[KEYS, DV_PAD]``: of ``DEPTH`` keys those of unit ``unit[i]`` in the page with V at ``values[i]``."""
    GROUPS: tl.constexpr = scales.shape[0]
    KEYS: tl.constexpr = scales.shape[1]
    dv = tl.arange(0, DV_PAD)[None, :]
    words = tl.load(values[:, None] + (unit[:, None] * DV + dv), mask=inside[:, None] & (dv < DV), other=0)
    numbers = tl.reshape(unpack_words(words, CODES, DEPTH), (KEYS, GROUPS, DV_PAD // GROUPS))
    return tl.reshape(numbers * tl.trans(scales)[:, :, None], (KEYS, DV_PAD))
