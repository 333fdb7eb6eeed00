// Copies of many blocks at once, by a few threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace memserve {

// One piece to copy, from `src` to `dst`.
struct CopyPiece {
  uint8_t* dst;
  const uint8_t* src;
};

// Copies pieces of equal size; they must not overlap. Long pieces are cut so that threads share them evenly.
// At most `threads` threads work (the caller is one); small copies stay on the caller.
void copy_pieces(std::span<const CopyPiece> pieces, size_t piece_bytes, int threads);

}  // namespace memserve
