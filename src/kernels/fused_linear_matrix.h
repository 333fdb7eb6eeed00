// The linear for few rows on matrix units (AMX), over the same packed weights.
//
// A product of tiles takes 16 rows x 32 inputs times 32 inputs x 16 columns, and packed blocks already are
// such tiles. Up to 128 rows cost little more than one: the step stays bound by reading the weights.
#pragma once
#include "fused.h"
#include "fused_vector.h"
#include "matrix_tiles.h"

#if defined(__AMX_BF16__)
#include <algorithm>

namespace {
namespace matrix {
using memserve::fused::Linear;

constexpr std::ptrdiff_t kInputs = 32;          // of a tile; a step has two by two tiles
constexpr std::ptrdiff_t kAhead = 4;            // steps of 2 KiB by which weights are prefetched
constexpr std::ptrdiff_t kNearBytes = 1 << 20;  // of weights that the second cache holds beside x

// For add_products, with `upper` and `lower` rows of x.
static inline void configure(std::ptrdiff_t upper, std::ptrdiff_t lower) {
  Shapes shapes;
  const std::ptrdiff_t heights[8] = {upper, upper, lower, lower, upper, lower, kRows, kRows};
  for (int i = 0; i < 8; ++i) shapes.set(i, heights[i], 64);
  configure(shapes);
}

// Adds the bias to a tile of sums, and writes the columns that exist.
template <class Y>
static inline void write(const Linear& op, const float* sums, std::ptrdiff_t row, std::ptrdiff_t rows,
                         std::ptrdiff_t column) {
  const std::ptrdiff_t columns = std::min(kColumns, op.n - column);
  const Bf16* bias = op.bias ? static_cast<const Bf16*>(op.bias) + column : nullptr;
  for (std::ptrdiff_t r = 0; r < rows; ++r, sums += kColumns) {
    Y* y = static_cast<Y*>(op.y) + (row + r) * op.stride_y + column;
    if (columns == kColumns) {
      Floats sum = load(sums);
      store(y, bias ? sum + load(bias) : sum);
    } else {
      for (std::ptrdiff_t i = 0; i < columns; ++i) put(y + i, sums[i] + (bias ? to_float(bias[i]) : 0.0f));
    }
  }
}

// 32 columns from `column` on, of `upper + lower` rows from `row` on.
template <class Y, bool kTwo>
static void block(const Linear& op, std::ptrdiff_t row, std::ptrdiff_t upper, std::ptrdiff_t lower,
                  std::ptrdiff_t column) {
  const Bf16* x = static_cast<const Bf16*>(op.x) + row * op.stride_x;
  const Bf16* lower_x = x + upper * op.stride_x;
  const std::ptrdiff_t first = column / op.block * (op.block * op.k_padded) + column % op.block * 2;
  const Bf16* w = static_cast<const Bf16*>(op.w) + first;
  const std::ptrdiff_t stride_w = op.block * 4, of_a_step = op.block * kInputs;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  std::ptrdiff_t i = 0;
  for (; i + kInputs <= op.k; i += kInputs, w += of_a_step) {
    const char* ahead = reinterpret_cast<const char*>(w + kAhead * of_a_step);
    for (std::ptrdiff_t line = 0; line < kInputs / 2; ++line) {  // may point past the weights: a prefetch cannot fault
      _mm_prefetch(ahead + line * stride_w, _MM_HINT_T0);
      _mm_prefetch(ahead + line * stride_w + 64, _MM_HINT_T0);
    }
    add_products<kTwo>(x + i, lower_x + i, op.stride_x * 2, w, stride_w);
  }
  if (i < op.k) {  // inputs past the last one are zeros, as in the weights: memory behind x may hold NaN
    alignas(64) Bf16 rest[2 * kRows * kInputs] = {};
    for (std::ptrdiff_t r = 0; r < upper + lower; ++r)
      std::memcpy(rest + r * kInputs, x + r * op.stride_x + i, (op.k - i) * sizeof(Bf16));
    seen_by_tiles();
    add_products<kTwo>(rest, rest + upper * kInputs, kInputs * 2, w, stride_w);
  }
  alignas(64) float sums[4][kRows * kColumns];
  _tile_stored(0, sums[0], kColumns * 4);
  _tile_stored(1, sums[1], kColumns * 4);
  if constexpr (kTwo) {
    _tile_stored(2, sums[2], kColumns * 4);
    _tile_stored(3, sums[3], kColumns * 4);
  }
  for (int half = 0; half < 2 && column + half * kColumns < op.n; ++half) {
    write<Y>(op, sums[half], row, upper, column + half * kColumns);
    if constexpr (kTwo) write<Y>(op, sums[2 + half], row + upper, lower, column + half * kColumns);
  }
}

// Columns [begin, end), `begin` a multiple of 32: weights are read once, or where the second cache holds them x is.
template <class Y>
static void linear_columns(const Linear& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  const bool is_near = (end - begin) * op.k_padded * static_cast<std::ptrdiff_t>(sizeof(Bf16)) <= kNearBytes;
  const std::ptrdiff_t columns_at_once = is_near ? end - begin : 2 * kColumns;
  std::ptrdiff_t configured = 0;
  for (std::ptrdiff_t first = begin; first < end; first += columns_at_once) {
    for (std::ptrdiff_t row = 0, rows; row < op.rows; row += rows) {
      rows = std::min(op.rows - row, 2 * kRows);
      const std::ptrdiff_t upper = std::min(rows, kRows), lower = rows - upper;
      if (configured != rows) configure(upper, lower);
      configured = rows;
      for (std::ptrdiff_t column = first; column < std::min(first + columns_at_once, end); column += 2 * kColumns) {
        if (lower) block<Y, true>(op, row, upper, lower, column);
        else block<Y, false>(op, row, upper, lower, column);
      }
    }
  }
  _tile_release();
}

}  // namespace matrix
}  // namespace
#endif
