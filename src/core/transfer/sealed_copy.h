// Checksums of many ranges of equal size, with or without a copy, by a few threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace memserve {

// One range: `src` is sealed, and copied to `dst` unless that is null.
struct SealedPiece {
  uint8_t* dst;
  const uint8_t* src;
};

// Writes the seal (seal_sums.h) of each piece to `seals`, of the bytes written to `dst`. Pieces must not overlap.
// Pieces of megabytes are shared between threads; small jobs stay on the caller.
void seal_pieces(std::span<const SealedPiece> pieces, size_t piece_bytes, uint64_t* seals, int threads);

}  // namespace memserve
