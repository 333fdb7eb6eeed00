// The linear for few rows over oneDNN's packed weights, compiled once per instruction set.
//
// A step that decodes a few sequences reads every weight once and computes little: it is bound by memory. A tile of up
// to kTileRows rows and 64 columns keeps its sums in registers while the weights stream through, once; later tiles of
// rows find them in the cache, a slice at a time. The weights stay where oneDNN packed them for large products, so both
// paths share one copy.
#pragma once
#include <vector>

#include "fused.h"
#include "fused_linear_matrix.h"
#include "fused_vector.h"

namespace {
using memserve::fused::Linear;

constexpr std::ptrdiff_t kHalf = 32;  // columns that are adjacent in every block format
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;  // 24 sums, 4 weights, 1 broadcast of 32 registers
#elif defined(__AVX2__)
constexpr int kTileRows = 4, kTileVectors = 2;
#else
constexpr int kTileRows = 2, kTileVectors = 4;
#endif

template <int R, int C>
struct Sums {
  Floats v[R][C];
};

// The weights of up to 64 columns: columns from 32 on lie `jump` elements behind `at` (in the same block of 64, or in
// the next block of 32), those of the next input, or pair of inputs, `step` elements.
template <class T>
struct Weights {
  const T* at;
  std::ptrdiff_t jump, step;

  // Vector `c` of the columns.
  const T* vector(int c) const {
    constexpr std::ptrdiff_t pack = sizeof(T) == 2 ? 2 : 1;
    const std::ptrdiff_t column = c * kLanes;
    return column < kHalf ? at + column * pack : at + jump + (column - kHalf) * pack;
  }
};

// Some inputs of some columns: no more than the second cache holds. Sums lie in `partial` between slices, and are added
// in the same order.
struct Slice {
  std::ptrdiff_t begin, end;
  float* partial;
  bool is_first, is_last;
  const char* later;  // weights to fetch meanwhile; null: none
};

constexpr std::ptrdiff_t kSliceBytes = 262144;  // of weights

// Where rows have a second tile, its weights are in the cache, and memory would be idle: a line of the next slice is
// fetched with each step. More would keep the cache from answering.
static inline void fetch_line(const char* later, std::ptrdiff_t number) {
  if (later) __builtin_prefetch(later + number * 64, 0, 2);
}

// f32: one input at a time, [k][block].
template <int R, int C>
static inline void accumulate(Sums<R, C>& sums, const float* x, std::ptrdiff_t stride_x, Weights<float> w,
                              std::ptrdiff_t k, const char* later) {
  for (std::ptrdiff_t i = 0; i < k; ++i, w.at += w.step) {
    fetch_line(later, i);
    Floats weight[C];
    for (int c = 0; c < C; ++c) weight[c] = load(w.vector(c));
    for (int r = 0; r < R; ++r) {
      const float value = x[r * stride_x + i];
      for (int c = 0; c < C; ++c) sums.v[r][c] += weight[c] * value;
    }
  }
}

static inline std::uint32_t pair_at(const Bf16* x) {
  std::uint32_t bits;
  std::memcpy(&bits, x, 4);
  return bits;
}

#if defined(__AVX512BF16__)
template <int R, int C, class Pair>
static inline void accumulate_pair(Sums<R, C>& sums, const Weights<Bf16>& w, Pair pair) {
  __m512bh weight[C];
  for (int c = 0; c < C; ++c) weight[c] = (__m512bh)_mm512_loadu_si512(w.vector(c));
  for (int r = 0; r < R; ++r) {
    const __m512bh value = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair(r)));
    for (int c = 0; c < C; ++c) sums.v[r][c] = (Floats)_mm512_dpbf16_ps((__m512)sums.v[r][c], weight[c], value);
  }
}
#else
template <int R, int C, class Pair>
static inline void accumulate_pair(Sums<R, C>& sums, const Weights<Bf16>& w, Pair pair) {
  Floats even[C], odd[C];
  for (int c = 0; c < C; ++c) {
    Words bits;
    std::memcpy(&bits, w.vector(c), sizeof bits);
    even[c] = as_floats(bits << 16);
    odd[c] = as_floats(bits & 0xffff0000u);
  }
  for (int r = 0; r < R; ++r) {
    const std::uint32_t bits = pair(r);
    const float low = to_float(Bf16{static_cast<std::uint16_t>(bits)});
    const float high = to_float(Bf16{static_cast<std::uint16_t>(bits >> 16)});
    for (int c = 0; c < C; ++c) sums.v[r][c] += even[c] * low;
    for (int c = 0; c < C; ++c) sums.v[r][c] += odd[c] * high;
  }
}
#endif

// bf16: two inputs at a time, [k / 2][block][2]; an odd last input is paired with a zero.
template <int R, int C>
static inline void accumulate(Sums<R, C>& sums, const Bf16* x, std::ptrdiff_t stride_x, Weights<Bf16> w,
                              std::ptrdiff_t k, const char* later) {
  std::ptrdiff_t i = 0;
  for (; i + 2 <= k; i += 2, w.at += w.step) {
    fetch_line(later, i / 2);
    accumulate_pair(sums, w, [&](int r) { return pair_at(x + r * stride_x + i); });
  }
  if (i < k) accumulate_pair(sums, w, [&](int r) { return std::uint32_t{x[r * stride_x + i].bits}; });
}

// T: dtype of the inputs, Y: of the results.
template <class T, class Y, int R, int C>
static void tile(const Linear& op, std::ptrdiff_t row, std::ptrdiff_t column, const Slice& slice) {
  constexpr std::ptrdiff_t pack = sizeof(T) == 2 ? 2 : 1;
  const T* x = static_cast<const T*>(op.x) + row * op.stride_x + slice.begin;
  const std::ptrdiff_t jump = op.block == kHalf ? kHalf * op.k_padded : kHalf * pack;
  const T* first = static_cast<const T*>(op.w) + column / op.block * (op.block * op.k_padded) + column % op.block * pack;
  const Weights<T> w{first + slice.begin * op.block, jump, op.block * pack};
  float* partial = slice.partial + row * C * kLanes;
  Sums<R, C> sums{};
  for (int i = 0; !slice.is_first && i < R * C; ++i) sums.v[i / C][i % C] = load(partial + i * kLanes);
  accumulate(sums, x, op.stride_x, w, slice.end - slice.begin, slice.later);
  if (!slice.is_last) {
    for (int i = 0; i < R * C; ++i) store(partial + i * kLanes, sums.v[i / C][i % C]);
    return;
  }
  for (int r = 0; r < R; ++r) {
    Y* y = static_cast<Y*>(op.y) + (row + r) * op.stride_y + column;
    for (int c = 0; c < C; ++c) {
      const std::ptrdiff_t at = column + c * kLanes;
      if (at + kLanes <= op.n) {
        if (op.bias) sums.v[r][c] += load(static_cast<const T*>(op.bias) + at);
        store(y + c * kLanes, sums.v[r][c]);
      } else {
        for (std::ptrdiff_t i = 0; at + i < op.n; ++i)
          put(y + c * kLanes + i, sums.v[r][c][i] + (op.bias ? to_float(static_cast<const T*>(op.bias)[at + i]) : 0.0f));
      }
    }
  }
}

template <class T, class Y, int C, int R = kTileRows>
static void tile_of(int rows, const Linear& op, std::ptrdiff_t row, std::ptrdiff_t column, const Slice& slice) {
  if constexpr (R == 1) {
    tile<T, Y, 1, C>(op, row, column, slice);
  } else if (rows == R) {
    tile<T, Y, R, C>(op, row, column, slice);
  } else {
    tile_of<T, Y, C, R - 1>(rows, op, row, column, slice);
  }
}

// One slice of all rows, in tiles of about equal height.
template <class T, class Y, int C>
static void slice_of_rows(const Linear& op, std::ptrdiff_t column, Slice slice) {
  constexpr std::ptrdiff_t pack = sizeof(T) == 2 ? 2 : 1;
  const std::ptrdiff_t steps = (slice.end - slice.begin) / pack, lines = steps * pack * C * kLanes * sizeof(T) / 64;
  const bool is_run = C * kLanes == op.block;  // of weights that lie one behind the other
  const char* next = static_cast<const char*>(op.w) + (column * op.k_padded + slice.end * op.block) * sizeof(T);
  std::ptrdiff_t tiles = (op.rows + kTileRows - 1) / kTileRows, row = 0, fetched = 0;
  for (bool is_near = false; tiles > 0; --tiles, is_near = true) {
    const std::ptrdiff_t height = (op.rows - row + tiles - 1) / tiles;
    const bool fetches = is_near && is_run && fetched + steps <= lines;
    slice.later = fetches ? next + fetched * 64 : nullptr;
    tile_of<T, Y, C>(static_cast<int>(height), op, row, column, slice);
    row += height;
    fetched += fetches ? steps : 0;
  }
}

template <class T, class Y, int C>
static void all_rows(const Linear& op, std::ptrdiff_t column, float* partial) {
  constexpr std::ptrdiff_t most = kSliceBytes / (C * kLanes * static_cast<std::ptrdiff_t>(sizeof(T)));  // even
  const std::ptrdiff_t length = op.rows <= kTileRows ? op.k : most;
  for (std::ptrdiff_t begin = 0; begin == 0 || begin < op.k; begin += length) {
    const std::ptrdiff_t end = begin + length < op.k ? begin + length : op.k;
    slice_of_rows<T, Y, C>(op, column, Slice{begin, end, partial, begin == 0, end == op.k, nullptr});
  }
}

template <class T, class Y>
static void linear_columns(const Linear& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  constexpr std::ptrdiff_t wide = kTileVectors * kLanes, narrow = kHalf < wide ? kHalf : wide;
  static thread_local std::vector<float> memory;
  const std::size_t size = op.rows > kTileRows ? static_cast<std::size_t>(op.rows * wide) : 0;
  if (memory.size() < size) memory.resize(size);
  float* partial = memory.data();
  for (std::ptrdiff_t column = begin; column < end;) {
    if (column % (2 * kHalf) % wide == 0 && column + wide <= end) {
      all_rows<T, Y, wide / kLanes>(op, column, partial);
      column += wide;
    } else {
      all_rows<T, Y, narrow / kLanes>(op, column, partial);
      column += narrow;
    }
  }
}

static void linear(const Linear& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (dtype == Dtype::float32) return linear_columns<float, float>(op, begin, end);
#if defined(__AMX_BF16__)
  if (op.wide) return matrix::linear_columns<float>(op, begin, end);
  matrix::linear_columns<Bf16>(op, begin, end);
#else
  if (op.wide) return linear_columns<Bf16, float>(op, begin, end);
  linear_columns<Bf16, Bf16>(op, begin, end);
#endif
}

}  // namespace
