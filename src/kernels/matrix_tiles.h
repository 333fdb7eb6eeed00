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

}  // namespace matrix
}  // namespace
#endif
