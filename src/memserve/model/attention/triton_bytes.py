"""The CUDA kernels over bytes of pages, in Triton: copies, and seals. Importing it needs the package ``triton``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_rows_kernel(target, source, dst, src, words, WORDS: tl.constexpr):
    """Program (row, piece): copies up to ``WORDS`` words of a row."""
    row = tl.program_id(0)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    to = tl.load(dst + row).to(tl.int64) * words
    came_from = tl.load(src + row).to(tl.int64) * words
    tl.store(target + to + at, tl.load(source + came_from + at, mask=at < words), mask=at < words)


@triton.jit
def seal_kernel(
    source, src_at, target, dst_at, keys, sums, words, stripes, golden,
    STRIPES: tl.constexpr, TURNS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Program (range, part): sums over up to ``TURNS * STRIPES`` stripes, ``[2, 8]``: products, and words, by lane.

    Integers wrap around, as those of the C++ do."""
    number = tl.program_id(0)
    part = tl.program_id(1)
    lane = tl.arange(0, 8)
    first = source + tl.load(src_at + number)
    to = target + tl.load(dst_at + number)
    key = tl.load(keys + lane)
    products = tl.zeros([STRIPES, 8], tl.int64)  # summed over stripes once, at the end: that needs all threads
    plain = tl.zeros([STRIPES, 8], tl.int64)
    for turn in range(TURNS):
        stripe = ((part * TURNS + turn) * STRIPES + tl.arange(0, STRIPES)).to(tl.int64)
        at = stripe[:, None] * 8 + lane[None, :]
        inside = at < words
        word = tl.load(first + at, mask=inside, other=0)
        if COPIES:
            tl.store(to + at, word, mask=inside)
        x = (word ^ (key[None, :] + stripe[:, None] * golden)).to(tl.uint64, bitcast=True)
        product = ((x & 0xFFFFFFFF) * (x >> 32)).to(tl.int64, bitcast=True)
        counted = (stripe < stripes)[:, None]
        products += tl.where(counted, product, 0)
        plain += word
    place = sums + (number * tl.num_programs(1) + part).to(tl.int64) * 16
    tl.store(place + lane, tl.sum(products, 0))
    tl.store(place + 8 + lane, tl.sum(plain, 0))
