"""KV of a byte or less in Triton: the rule of rounding, and the inside of a page of codes (``src/kernels/kv_codes.h``).

::

    one head of a page, in words of 4 bytes            maxima, of 2 bytes
    K [ceil(DK / DEPTH), BLOCK]   a word: DEPTH neighbours of one token's elements      [groups of K, BLOCK]
    V [BLOCK / DEPTH, DV]         a word: one element of DEPTH neighbouring tokens      [groups of V, BLOCK]

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
def maxima_of(head, first, DEPTH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the maxima of group ``first`` of a head, K's groups before V's. ``head``: pointers to its words."""
    WORDS: tl.constexpr = (DK + DEPTH - 1) // DEPTH * BLOCK + BLOCK // DEPTH * DV
    return (head + WORDS).to(tl.pointer_type(tl.uint16), bitcast=True) + first * BLOCK


@triton.jit
def load_scales(maxima, mask, CODES: tl.constexpr):
    """What the codes of groups with these maxima are multiplied by, float32."""
    bits = tl.load(maxima, mask=mask, other=0).to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True) * (1.0 / largest_code(CODES))


@triton.jit
def store_keys(
    head, t, live, x,
    CODES: tl.constexpr, DEPTH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """K float32 ``[R, DK_PAD]`` of the ``live`` ones of tokens ``t [R]`` of a page; ``head``: its first word."""
    UNITS: tl.constexpr = x.shape[1] // DEPTH
    unit, group = tl.arange(0, UNITS)[None, :], tl.arange(0, x.shape[1] // WIDTH)[None, :]
    codes, maxima = round_rows(x, CODES, DEPTH, WIDTH)
    words = tl.sum(tl.reshape(codes, (x.shape[0], UNITS, DEPTH)) << shifts_in_word(DEPTH)[None, None, :], 2)
    tl.store(head + unit * BLOCK + t[:, None], words, mask=live[:, None] & (unit * DEPTH < DK))
    places = maxima_of(head, 0, DEPTH, DK, DV, BLOCK) + group * BLOCK + t[:, None]
    tl.store(places, maxima.to(tl.uint16), mask=live[:, None] & (group * WIDTH < DK))


@triton.jit
def store_values(
    head, t, live, x,
    CODES: tl.constexpr, DEPTH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    DK_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """V float32 ``[DEPTH, DV_PAD]`` of the ``live`` ones of tokens ``t``, those of one word; codes of others stay."""
    dv, group = tl.arange(0, x.shape[1]), tl.arange(0, x.shape[1] // WIDTH)[None, :]
    codes, maxima = round_rows(x, CODES, DEPTH, WIDTH)
    shifts = shifts_in_word(DEPTH)
    units = head + ((DK + DEPTH - 1) // DEPTH * BLOCK + tl.min(t, 0) // DEPTH * DV + dv)
    others = ~tl.sum(tl.where(live, ((1 << (32 // DEPTH)) - 1) << shifts, 0), 0)
    words = tl.load(units, mask=dv < DV, other=0) & others
    tl.store(units, words | tl.sum(tl.where(live[:, None], codes << shifts[:, None], 0), 0), mask=dv < DV)
    places = maxima_of(head, (DK + DK_WIDTH - 1) // DK_WIDTH, DEPTH, DK, DV, BLOCK) + group * BLOCK + t[:, None]
    tl.store(places, maxima.to(tl.uint16), mask=live[:, None] & (group * WIDTH < DV))


@triton.jit
def load_keys(
    head, t, inside,
    CODES: tl.constexpr, DEPTH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    DK_PAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """K float32 ``[DK_PAD, KEYS]``: of key ``i`` that of token ``t[i]`` in the page of ``head[i]``."""
    GROUPS: tl.constexpr = DK_PAD // WIDTH
    unit, group = tl.arange(0, DK_PAD // DEPTH)[:, None], tl.arange(0, GROUPS)[:, None]
    places = head[None, :] + (unit * BLOCK + t[None, :])
    words = tl.load(places, mask=(unit * DEPTH < DK) & inside[None, :], other=0)
    maxima = maxima_of(head, 0, DEPTH, DK, DV, BLOCK)[None, :] + (group * BLOCK + t[None, :])
    scales = load_scales(maxima, (group * WIDTH < DK) & inside[None, :], CODES)
    numbers = tl.reshape(unpack_words(words, CODES, DEPTH), (GROUPS, WIDTH, t.shape[0]))
    return tl.reshape(numbers * scales[:, None, :], (DK_PAD, t.shape[0]))


@triton.jit
def load_values(
    head, t, written, head_of_unit, unit, inside,
    CODES: tl.constexpr, DEPTH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    DK_WIDTH: tl.constexpr, DV_PAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """V float32 ``[KEYS, DV_PAD]``, zero where nothing is ``written``. ``head``, ``t``: as of :func:`load_keys`;
    ``unit``, ``head_of_unit``, ``inside`` ``[KEYS / DEPTH]``: the same of units of tokens."""
    GROUPS: tl.constexpr = DV_PAD // WIDTH
    GROUPS_K: tl.constexpr = (DK + DK_WIDTH - 1) // DK_WIDTH
    WORDS_K: tl.constexpr = (DK + DEPTH - 1) // DEPTH * BLOCK
    dv, group = tl.arange(0, DV_PAD)[None, :], tl.arange(0, GROUPS)[None, :]
    places = head_of_unit[:, None] + (WORDS_K + unit[:, None] * DV + dv)
    words = tl.load(places, mask=inside[:, None] & (dv < DV), other=0)
    maxima = maxima_of(head, GROUPS_K, DEPTH, DK, DV, BLOCK)[:, None] + (group * BLOCK + t[:, None])
    scales = load_scales(maxima, written[:, None] & (group * WIDTH < DV), CODES)
    numbers = tl.reshape(unpack_words(words, CODES, DEPTH), (t.shape[0], GROUPS, WIDTH))
    return tl.reshape(numbers * scales[:, :, None], (t.shape[0], DV_PAD))
