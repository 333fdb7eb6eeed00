// The tile registers of matrix units (AMX): how they are shaped, and what the compiler does not know of them.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__AMX_TILE__)
#include <immintrin.h>

namespace {
namespace matrix {

constexpr std::ptrdiff_t kRows = 16, kColumns = 16;  // of a tile; columns of sums, 4 bytes each

// Rows, and bytes per row, of each of the eight tile registers; the processor defines the layout.
struct alignas(64) Shapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14]{};
  std::uint16_t row_bytes[16]{};
  std::uint8_t rows[16]{};

  void set(int tile, std::ptrdiff_t height, std::ptrdiff_t bytes) {
    rows[tile] = static_cast<std::uint8_t>(height);
    row_bytes[tile] = static_cast<std::uint16_t>(height ? bytes : 0);
  }
};

// gcc's tile intrinsics do not declare that they read memory: earlier writes must be complete here.
static inline void seen_by_tiles() { asm volatile("" ::: "memory"); }

static inline void configure(const Shapes& shapes) {
  seen_by_tiles();
  _tile_loadconfig(&shapes);
}

#if defined(__AMX_BF16__)
// Of a product of bfloat16: 32 inputs of 16 rows, or of 32 (kTwo), times 32 columns. x and w: where the operands begin,
// pairs of inputs side by side; strides in bytes. Registers 0 to 3: sums, 4 and 5: rows of x, 6 and 7: columns of w.
template <bool kTwo>
static inline void add_products(const void* x, const void* lower_x, std::ptrdiff_t stride_x, const void* w,
                                std::ptrdiff_t stride_w) {
  _tile_loadd(6, w, stride_w);
  _tile_loadd(7, static_cast<const char*>(w) + 4 * kColumns, stride_w);
  _tile_loadd(4, x, stride_x);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwo) {
    _tile_loadd(5, lower_x, stride_x);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
#endif

}  // namespace matrix
}  // namespace
#endif
