"""The CUDA kernels over bytes of pages, in Triton: copies, and seals. Importing it needs the package ``triton``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_rows_kernel(target, source, dst, src, words, WORDS: tl.constexpr):
    """Program (row, piece): copies up to ``WORDS`` words of a row."""
    row = tl.program_id(0)
    offsets = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    to = tl.load(dst + row).to(tl.int64) * words
    came_from = tl.load(src + row).to(tl.int64) * words
    tl.store(target + to + offsets, tl.load(source + came_from + offsets, mask=offsets < words), mask=offsets < words)


@triton.jit
def seal_kernel(
    src_at, dst_at, begins, keys, sums, words, golden,
    STRIPES: tl.constexpr, TURNS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Program (piece, part): sums over up to ``TURNS * STRIPES`` stripes of a piece, ``[2, 8]``: products, and words,
    by lane. ``src_at``, ``dst_at``: the pieces' addresses; ``begins``: words from the begin of the sealed range, which
    say what a word's stripe and lane are.

    Integers wrap around, as those of the C++ do."""
    number = tl.program_id(0)
    part = tl.program_id(1)
    lane = tl.arange(0, 8)
    first = tl.load(src_at + number).to(tl.pointer_type(tl.int64))
    to = tl.load(dst_at + number).to(tl.pointer_type(tl.int64))
    begin = tl.load(begins + number)
    skew = begin % 8
    key = tl.load(keys + lane)
    products = tl.zeros([STRIPES, 8], tl.int64)  # summed over stripes once, at the end: that needs all threads
    plain = tl.zeros([STRIPES, 8], tl.int64)
    for turn in range(TURNS):
        stripe = ((part * TURNS + turn) * STRIPES + tl.arange(0, STRIPES)).to(tl.int64)
        offsets = stripe[:, None] * 8 + lane[None, :] - skew
        inside = (offsets >= 0) & (offsets < words)
        word = tl.load(first + offsets, mask=inside, other=0)
        if COPIES:
            tl.store(to + offsets, word, mask=inside)
        x = (word ^ (key[None, :] + (begin // 8 + stripe)[:, None] * golden)).to(tl.uint64, bitcast=True)
        product = ((x & 0xFFFFFFFF) * (x >> 32)).to(tl.int64, bitcast=True)
        products += tl.where(inside, product, 0)
        plain += word
    place = sums + (number * tl.num_programs(1) + part).to(tl.int64) * 16
    tl.store(place + lane, tl.sum(products, 0))
    tl.store(place + 8 + lane, tl.sum(plain, 0))
