// The one matrix product of attention: C[M, N] (+)= A[M, depth] * B[depth, N], for scores (B = K) and sums (B = V).
//
// Two number formats. Floats: B is float rows. Pairs: A and B hold pairs of bfloat16 that are neighbours in the depth,
// so that vdpbf16ps multiplies two of them and adds both products to a float32.
#pragma once

#include <utility>

#include "attention_simd.h"
#include "matrix_tiles.h"

namespace memserve::MEMSERVE_ISA {
namespace {

struct Floats {
  using Element = float;      // as A's rows are stored
  using Unit = float;         // what one depth step consumes
  static constexpr int kUnitTokens = 1;
  static constexpr bool kFastExp = false;
  static VecF unit_vector(const Unit* p) { return load(p); }
  static VecF multiply_add(VecF sum, Unit a, VecF b) { return sum + b * a; }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Element = BFloat16;
  using Unit = uint32_t;
  static constexpr int kUnitTokens = 2;
  static constexpr bool kFastExp = true;
  static __m512i unit_vector(const Unit* p) { return _mm512_loadu_si512(p); }
  static VecF multiply_add(VecF sum, Unit a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
  }
};
#endif

// A: rows of `stride` units. B: `panels` matrices of `depth` rows each, stacked along the depth.
template <class Format>
struct Operands {
  const typename Format::Unit* a;
  int64_t a_stride;
  const typename Format::Unit* const* b;
  int panels, depth, b_stride;
  float* c;
  int64_t c_stride;
  const float* decay;  // per row of C: C = C * decay + A B; nullptr: C = A B
};

// R rows times two vectors of columns, held in registers over the whole depth.
template <class Format, int R>
void multiply_block(const Operands<Format>& o, int row, int column) {
  const auto* a = o.a + row * o.a_stride;
  float* c = o.c + row * o.c_stride + column;
  VecF left[R], right[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    left[r] = o.decay ? load(c + r * o.c_stride) * o.decay[row + r] : VecF{};
    right[r] = o.decay ? load(c + r * o.c_stride + kLanes) * o.decay[row + r] : VecF{};
  }
  for (int panel = 0; panel < o.panels; ++panel, a += o.depth) {
    const auto* b = o.b[panel] + column;
    for (int k = 0; k < o.depth; ++k, b += o.b_stride) {
      const auto b_left = Format::unit_vector(b), b_right = Format::unit_vector(b + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto unit = a[r * o.a_stride + k];
        left[r] = Format::multiply_add(left[r], unit, b_left);
        right[r] = Format::multiply_add(right[r], unit, b_right);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(c + r * o.c_stride, left[r]);
    store(c + r * o.c_stride + kLanes, right[r]);
  }
}

template <class Format>
using BlockFunction = void (*)(const Operands<Format>&, int row, int column);

template <class Format, int... R>
constexpr BlockFunction<Format> block_function(int rows, std::integer_sequence<int, R...>) {
  constexpr BlockFunction<Format> table[] = {&multiply_block<Format, R + 1>...};
  return table[rows - 1];
}

#if defined(__AMX_BF16__)
// The same on matrix units: rows of pairs are rows of tiles already.
constexpr int kTileUnits = 16;  // of the depth

inline bool fits_tiles(const Operands<Pairs>& o) { return o.depth % kTileUnits == 0; }

// Of 16 rows, or of 32 (kTwo), two tiles of columns.
template <bool kTwo>
void multiply_tiles(const Operands<Pairs>& o, int row, int column) {
  const auto* a = o.a + row * o.a_stride;
  const auto* lower_a = a + matrix::kRows * o.a_stride;
  float* c = o.c + row * o.c_stride + column;
  float* lower_c = c + matrix::kRows * o.c_stride;
  const int64_t a_bytes = o.a_stride * 4, b_bytes = int64_t(o.b_stride) * 4, c_bytes = o.c_stride * 4;
  if (o.decay) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + matrix::kColumns, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (kTwo && o.decay) {
    _tile_loadd(2, lower_c, c_bytes);
    _tile_loadd(3, lower_c + matrix::kColumns, c_bytes);
  } else if (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int panel = 0; panel < o.panels; ++panel) {
    const auto* b = o.b[panel] + column;
    for (int k = 0; k < o.depth; k += kTileUnits, a += kTileUnits, lower_a += kTileUnits, b += kTileUnits * o.b_stride)
      matrix::add_products<kTwo>(a, lower_a, a_bytes, b, b_bytes);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + matrix::kColumns, c_bytes);
  if constexpr (kTwo) {
    _tile_stored(2, lower_c, c_bytes);
    _tile_stored(3, lower_c + matrix::kColumns, c_bytes);
  }
}

// A and C have rows up to the next multiple of 16, whatever is in them.
inline void multiply_on_tiles(const Operands<Pairs>& o, int rows, int columns) {
  for (int r = 0; o.decay && r < rows; ++r)
    for (float *c = o.c + r * o.c_stride, *end = c + columns; c < end; c += kLanes) store(c, load(c) * o.decay[r]);
  matrix::seen_by_tiles();
  for (int column = 0; column < columns; column += 2 * matrix::kColumns)
    for (int row = 0; row < rows; row += 2 * matrix::kRows) {
      if (rows - row > matrix::kRows) multiply_tiles<true>(o, row, column);
      else multiply_tiles<false>(o, row, column);
    }
}

// The tile registers' shape for it, from a kernel's beginning to its end.
struct TileShapes {
  TileShapes() {
    matrix::Shapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, matrix::kRows, 4 * matrix::kColumns);
    matrix::configure(shapes);
  }
  ~TileShapes() { _tile_release(); }
};
#else
struct TileShapes {};
#endif

// `columns` is a multiple of kBlockColumns. A and C have rows up to the next multiple of 16.
template <class Format>
void multiply(const Operands<Format>& o, int rows, int columns) {
#if defined(__AMX_BF16__)
  if constexpr (Format::kUnitTokens == 2) {
    if (fits_tiles(o)) return multiply_on_tiles(o, rows, columns);
  }
#endif
  for (int column = 0; column < columns; column += kBlockColumns)
    for (int row = 0; row < rows; row += kBlockRows) {
      const int some = rows - row < kBlockRows ? rows - row : kBlockRows;
      block_function<Format>(some, std::make_integer_sequence<int, kBlockRows>{})(o, row, column);
    }
}

}  // namespace
}  // namespace memserve::MEMSERVE_ISA
