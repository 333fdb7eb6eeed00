#include "pool/copy_engine.h"

#include <algorithm>
#include <cstring>

#include "pool/workers.h"

namespace memserve {

namespace {

constexpr size_t kUnitBytes = size_t{256} << 10;      // what a thread claims at once
constexpr size_t kParallelBytes = size_t{1} << 20;    // below this, waking a thread costs more than it saves

}  // namespace

void copy_pieces(std::span<const CopyPiece> pieces, size_t piece_bytes, int threads) {
  const size_t total = pieces.size() * piece_bytes;
  if (threads <= 1 || total < kParallelBytes) {
    for (const CopyPiece& piece : pieces) std::memcpy(piece.dst, piece.src, piece_bytes);
    return;
  }
  if (piece_bytes >= kUnitBytes) {  // a unit is a part of a piece
    const size_t parts = (piece_bytes + kUnitBytes - 1) / kUnitBytes;
    run_units(pieces.size() * parts, threads, [&](size_t i) {
      const CopyPiece& piece = pieces[i / parts];
      const size_t from = i % parts * kUnitBytes;
      std::memcpy(piece.dst + from, piece.src + from, std::min(kUnitBytes, piece_bytes - from));
    });
    return;
  }
  const size_t each = kUnitBytes / std::max<size_t>(piece_bytes, 1);  // a unit is several pieces
  run_units((pieces.size() + each - 1) / each, threads, [&](size_t i) {
    const size_t end = std::min(pieces.size(), (i + 1) * each);
    for (size_t k = i * each; k < end; ++k) std::memcpy(pieces[k].dst, pieces[k].src, piece_bytes);
  });
}

}  // namespace memserve
