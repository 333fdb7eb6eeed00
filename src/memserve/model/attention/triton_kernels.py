"""The CUDA kernels of paged attention, in Triton. Importing this module needs the package ``triton``.

:func:`write_kv` puts a step's K and V into their pages, :func:`write_codes` into pages of codes; :func:`attend_tile`
attends one tile of queries to one row's pages (online softmax: FlashAttention-2, Algorithm 1), :func:`combine_splits`
merges the pieces of a row with pages divided among several programs (Flash-Decoding). ``TRITON_INTERPRET=1`` runs them
on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from memserve.model.attention.triton_codes import (
    load_keys,
    load_scales,
    load_values,
    store_keys,
    store_maxima,
    store_values,
)

NEVER = tl.constexpr(-1.0e30)  # the running maximum before any key was seen; finite, so that differences are not NaN
LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2_E)
VARYING = ("table_stride", "layer", "window", "chunk")  # one compilation serves all values of these


@triton.jit
def page_of_head(table, index, layer, kv_head, STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr):
    """Element offset of one head in the page of ``table[index]`` and ``layer``: only this function knows the arena.
    ``STRIDE``: elements from one block to the next."""
    block = tl.load(table + index).to(tl.int64)
    return block * STRIDE + (layer * KV_HEADS + kv_head) * HEAD


@triton.jit(do_not_specialize=VARYING)
def write_kv(
    arena, tables, table_stride, table_rows, q_starts, contexts, token_rows,
    k, k_token, k_head, v, v_token, v_head, layer,
    STRIDE: tl.constexpr, HEAD: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """Program (token, kv head): K goes into column ``t`` of ``[DK, BLOCK]``, V into row ``t`` of ``[BLOCK, DV]``."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.load(token_rows + token)
    position = tl.load(contexts + row) - tl.load(q_starts + row + 1) + token
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    head = arena + page_of_head(table, position // BLOCK, layer, kv_head, STRIDE, KV_HEADS, HEAD)
    t = position % BLOCK
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    column = tl.load(k + token * k_token + kv_head * k_head + dk, mask=dk < DK)
    tl.store(head + dk * BLOCK + t, column, mask=dk < DK)
    line = tl.load(v + token * v_token + kv_head * v_head + dv, mask=dv < DV)
    tl.store(head + BLOCK * DK + t * DV + dv, line, mask=dv < DV)


@triton.jit(do_not_specialize=VARYING)
def write_codes(
    arena, tables, table_stride, table_rows, q_starts, contexts, token_rows,
    k, k_token, k_head, v, v_token, v_head, layer,
    STRIDE: tl.constexpr, HEAD: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    CODES: tl.constexpr, DEPTH: tl.constexpr, VALUES: tl.constexpr, DK_MAXIMA: tl.constexpr,
    DV_MAXIMA: tl.constexpr, DK_WIDTH: tl.constexpr, DV_WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (token, kv head), for pages of codes. A word of V has ``DEPTH`` tokens: the first of them in this step
    writes all of them, the others nothing, so that no two programs write one word."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.load(token_rows + token)
    end = tl.load(q_starts + row + 1)
    position = tl.load(contexts + row) - end + token
    place = position % DEPTH
    if (place == 0) | (token == tl.load(q_starts + row)):
        table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
        head = arena + page_of_head(table, position // BLOCK, layer, kv_head, STRIDE, KV_HEADS, HEAD)
        i, dk, dv = tl.arange(0, DEPTH), tl.arange(0, DK_PAD)[None, :], tl.arange(0, DV_PAD)[None, :]
        tokens, t = (token + i - place)[:, None], position % BLOCK - place + i
        live = (i >= place) & (token + i - place < end)
        x = tl.load(k + kv_head * k_head + tokens * k_token + dk, mask=live[:, None] & (dk < DK), other=0.0)
        maxima = store_keys(head, t, live, x.to(tl.float32), CODES, DEPTH, DK, BLOCK, DK_WIDTH)
        store_maxima(head + DK_MAXIMA, t, live, maxima, DK, BLOCK, DK_WIDTH)
        x = tl.load(v + kv_head * v_head + tokens * v_token + dv, mask=live[:, None] & (dv < DV), other=0.0)
        values = head + VALUES + (position % BLOCK - place) // DEPTH * DV
        maxima = store_values(values, live, x.to(tl.float32), CODES, DEPTH, DV, DV_WIDTH)
        store_maxima(head + DV_MAXIMA, t, live, maxima, DV, BLOCK, DV_WIDTH)


@triton.jit
def tile_queries(places, live, DK: tl.constexpr, DK_PAD: tl.constexpr, WIDE: tl.constexpr):
    """Q ``[M, DK_PAD]`` of the heads at ``places`` ``[M]``; rows that are not live are zero."""
    dk = tl.arange(0, DK_PAD)
    queries = tl.load(places[:, None] + dk[None, :], mask=live[:, None] & (dk < DK)[None, :], other=0.0)
    if WIDE:  # Triton's interpreter multiplies bfloat16 as if it were an integer
        queries = queries.to(tl.float32)
    return queries


@triton.jit
def run_of_blocks(
    first, last, window, chunk, split,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Blocks ``[begin, stop)`` of one split, for queries at positions ``[first, last]``."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // BLOCK
    if CHUNK:
        begin = tl.maximum(begin, first // chunk * chunk // BLOCK)
    blocks = last // BLOCK + 1
    share = (blocks - begin + SPLITS - 1) // SPLITS
    begin += split * share
    return begin, tl.minimum(begin + share, blocks)


@triton.jit
def pages_from(
    table, index, stop, layer, kv_head,
    STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_PAD: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of ``BLOCKS`` blocks from ``index`` on, key by key: where the head's page begins, and which entry it is. Entries
    from ``stop`` on have the last one's page: they are masked."""
    number = index + tl.arange(0, BLOCKS * BLOCK_PAD) // BLOCK_PAD
    page = page_of_head(table, tl.minimum(number, stop - 1), layer, kv_head, STRIDE, KV_HEADS, HEAD)
    return tl.max_constancy(page, [BLOCK_PAD]), number  # else the compiler loads each key by itself


@triton.jit
def block_scores(
    queries, k, keys, inside, positions, live, scale, window, chunk, softcap,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Scores ``[M, KEYS]`` of a tile's queries against some blocks, in units of log2, and which of them count.
    ``inside``: which places are keys at all."""
    score = tl.dot(queries, k.to(queries.dtype), input_precision="ieee") * scale
    if SOFTCAP:  # tanh(x) = 2 sigmoid(2x) - 1
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    visible = live[:, None] & (keys[None, :] <= positions[:, None]) & inside[None, :]
    if WINDOW:
        visible = visible & (keys[None, :] > positions[:, None] - window)
    if CHUNK:
        visible = visible & (keys[None, :] >= (positions // chunk * chunk)[:, None])
    return tl.where(visible, score * LOG2_E, NEVER), visible


@triton.jit
def block_keys(places, inside, DK: tl.constexpr, BLOCK: tl.constexpr, DK_PAD: tl.constexpr):
    """K ``[DK_PAD, KEYS]`` of some blocks. ``places`` ``[KEYS]``: where each key's first element lies."""
    dk = tl.arange(0, DK_PAD)
    return tl.load(places[None, :] + dk[:, None] * BLOCK, mask=(dk < DK)[:, None] & inside[None, :], other=0.0)


@triton.jit
def block_values(places, written, DV: tl.constexpr, DV_PAD: tl.constexpr):
    """V ``[KEYS, DV_PAD]`` of some blocks. Positions after the last token may hold anything, even NaN; they are not
    read, because 0 * NaN would spoil the sum."""
    dv = tl.arange(0, DV_PAD)
    return tl.load(places[:, None] + dv[None, :], mask=written[:, None] & (dv < DV)[None, :], other=0.0)


@triton.jit
def coded_keys(
    arena, table, index, stop, layer, kv_head, page, t, inside,
    STRIDE: tl.constexpr, HEAD: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, BLOCK: tl.constexpr,
    DK_PAD: tl.constexpr, BLOCK_PAD: tl.constexpr, BLOCKS: tl.constexpr,
    CODES: tl.constexpr, DEPTH: tl.constexpr, MAXIMA: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """As :func:`block_keys`, of pages of codes, float32. ``page``, ``t``: of each key where its page begins, and which
    of its tokens it is."""
    pair_page, number = pages_from(table, index, stop, layer, kv_head, STRIDE, KV_HEADS, HEAD, BLOCK_PAD // 2, BLOCKS)
    pair = tl.arange(0, BLOCKS * BLOCK_PAD // 2) % (BLOCK_PAD // 2)
    scales = load_scales(arena + pair_page + MAXIMA, pair, (number < stop) & (pair * 2 < BLOCK), CODES, DK, BLOCK,
                         DK_PAD // WIDTH, WIDTH)  # fmt: skip
    return load_keys(arena + page, t, inside, scales, CODES, DEPTH, DK, BLOCK, DK_PAD)


@triton.jit
def coded_values(
    arena, table, index, stop, layer, kv_head, written,
    STRIDE: tl.constexpr, HEAD: tl.constexpr, KV_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_PAD: tl.constexpr, BLOCKS: tl.constexpr,
    CODES: tl.constexpr, DEPTH: tl.constexpr, VALUES: tl.constexpr, MAXIMA: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """As :func:`block_values`, of pages of codes, float32."""
    pair_page, number = pages_from(table, index, stop, layer, kv_head, STRIDE, KV_HEADS, HEAD, BLOCK_PAD // 2, BLOCKS)
    pair = tl.arange(0, BLOCKS * BLOCK_PAD // 2) % (BLOCK_PAD // 2)
    scales = load_scales(arena + pair_page + MAXIMA, pair, (number < stop) & (pair * 2 < BLOCK), CODES, DV, BLOCK,
                         DV_PAD // WIDTH, WIDTH)  # fmt: skip
    scales = tl.where(written[None, :], scales, 0.0)
    page, number = pages_from(table, index, stop, layer, kv_head, STRIDE, KV_HEADS, HEAD, BLOCK_PAD // DEPTH, BLOCKS)
    unit = tl.arange(0, BLOCKS * BLOCK_PAD // DEPTH) % (BLOCK_PAD // DEPTH)
    inside = (number < stop) & (unit * DEPTH < BLOCK)
    return load_values(arena + page + VALUES, unit, inside, scales, CODES, DEPTH, DV, DV_PAD)


@triton.jit
def tokens_of_tile(tile_rows, tile_firsts, q_starts, contexts, tile, GROUP: tl.constexpr, M: tl.constexpr):
    """A tile's row; of its queries ``[M]`` the token, the position, and whether there is one; the first and the last
    position."""
    TOKENS: tl.constexpr = M // GROUP
    row = tl.load(tile_rows + tile)
    first = tl.load(tile_firsts + tile)
    end = tl.load(q_starts + row + 1)
    shift = tl.load(contexts + row) - end  # a token's position is its place in the batch plus this
    m = tl.arange(0, M)
    tokens = (first + m // GROUP).to(tl.int64)
    live = (m < TOKENS * GROUP) & (tokens < end)
    return row, tokens, tokens + shift, live, first + shift, tl.minimum(first + TOKENS, end) - 1 + shift


@triton.jit
def begin_sums(sinks, heads, live, split, M: tl.constexpr, SINKS: tl.constexpr):
    """The running maximum and the denominator ``[M]``, before any key."""
    top = tl.full([M], NEVER, tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:  # one more logit in the denominator, counted once: in the first split
        top = tl.where(split == 0, tl.load(sinks + heads, mask=live, other=0.0) * LOG2_E, top)
        total = tl.where(split == 0, total + 1.0, total)
    return top, total


@triton.jit(do_not_specialize=VARYING)
def attend_tile(
    arena, tables, table_stride, table_rows, q_starts, contexts, tile_rows, tile_firsts,
    q, q_token, q_head, out, out_token, out_head, pieces, piece_stats, sinks,
    layer, scale, window, chunk, softcap,
    STRIDE: tl.constexpr, HEAD: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_PAD: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, WIDE: tl.constexpr,
    CODES: tl.constexpr = "", DEPTH: tl.constexpr = 1, VALUES: tl.constexpr = 0, DK_MAXIMA: tl.constexpr = 0,
    DV_MAXIMA: tl.constexpr = 0, DK_WIDTH: tl.constexpr = 1, DV_WIDTH: tl.constexpr = 1,
):  # fmt: skip
    """Program (tile, kv head, split). A tile is ``M // GROUP`` tokens of one row times the ``GROUP`` heads that share
    a KV head; a split is a run of that row's blocks. Keys are taken ``BLOCKS`` blocks at a time, each contiguous: one
    alone has too few bytes on their way to hide how long memory takes. ``CODES``: "", or what KV is kept as."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, tokens, positions, live, first, last = tokens_of_tile(
        tile_rows, tile_firsts, q_starts, contexts, tile, GROUP, M
    )
    heads = kv_head * GROUP + tl.arange(0, M) % GROUP
    dv = tl.arange(0, DV_PAD)
    queries = tile_queries(q + tokens * q_token + heads * q_head, live, DK, DK_PAD, WIDE)
    top, total = begin_sums(sinks, heads, live, split, M, SINKS)
    acc = tl.zeros([M, DV_PAD], tl.float32)

    begin, stop = run_of_blocks(first, last, window, chunk, split, BLOCK, SPLITS, WINDOW, CHUNK)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    t = tl.arange(0, BLOCKS * BLOCK_PAD) % BLOCK_PAD
    for index in range(begin, stop, BLOCKS):
        page, number = pages_from(table, index, stop, layer, kv_head, STRIDE, KV_HEADS, HEAD, BLOCK_PAD, BLOCKS)
        inside, keys = (number < stop) & (t < BLOCK), number * BLOCK + t
        if CODES == "":
            k = block_keys(arena + page + t, inside, DK, BLOCK, DK_PAD)
        else:
            k = coded_keys(arena, table, index, stop, layer, kv_head, page, t, inside, STRIDE, HEAD, KV_HEADS, DK,
                           BLOCK, DK_PAD, BLOCK_PAD, BLOCKS, CODES, DEPTH, DK_MAXIMA, DK_WIDTH)  # fmt: skip
        score, visible = block_scores(queries, k, keys, inside, positions, live, scale, window, chunk, softcap,
                                      WINDOW, CHUNK, SOFTCAP)  # fmt: skip
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.where(visible, tl.exp2(score - higher[:, None]), 0.0)
        fade = tl.exp2(top - higher)
        if CODES == "":
            v = block_values(arena + page + (BLOCK * DK + t * DV), inside & (keys <= last), DV, DV_PAD)
        else:
            v = coded_values(arena, table, index, stop, layer, kv_head, keys <= last, STRIDE, HEAD, KV_HEADS, DV, BLOCK,
                             DV_PAD, BLOCK_PAD, BLOCKS, CODES, DEPTH, VALUES, DV_MAXIMA, DV_WIDTH)  # fmt: skip
        v = v.to(queries.dtype)
        acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weight, 1)
        top = higher

    cells = live[:, None] & (dv < DV)[None, :]
    if SPLITS == 1:
        tl.store(out + (tokens * out_token + heads * out_head)[:, None] + dv[None, :], acc / total[:, None], mask=cells)
    else:
        piece = (tokens * (KV_HEADS * GROUP) + heads) * SPLITS + split
        tl.store(pieces + piece[:, None] * DV + dv[None, :], acc, mask=cells)
        tl.store(piece_stats + piece * 2, top, mask=live)
        tl.store(piece_stats + piece * 2 + 1, total, mask=live)


@triton.jit
def combine_splits(
    pieces, piece_stats, out, out_token, out_head,
    HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """Program (token, head): weigh each split's unnormalised sum by its maximum, and divide by the whole total."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    piece = (token * HEADS + head) * SPLITS + tl.arange(0, SPLITS_PAD)
    valid = tl.arange(0, SPLITS_PAD) < SPLITS
    dv = tl.arange(0, DV_PAD)
    top = tl.load(piece_stats + piece * 2, mask=valid, other=NEVER)
    total = tl.load(piece_stats + piece * 2 + 1, mask=valid, other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    parts = tl.load(pieces + piece[:, None] * DV + dv[None, :], mask=valid[:, None] & (dv < DV)[None, :], other=0.0)
    mixed = tl.sum(parts * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + token * out_token + head * out_head + dv, mixed, mask=dv < DV)
