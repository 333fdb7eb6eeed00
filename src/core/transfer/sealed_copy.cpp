#include "transfer/sealed_copy.h"

#include <algorithm>
#include <vector>

#include "transfer/seal_sums.h"
#include "pool/workers.h"

namespace memserve {

namespace {

constexpr size_t kUnitBytes = size_t{256} << 10;    // what a thread claims at once; whole stripes
constexpr size_t kParallelBytes = size_t{1} << 20;  // below this, waking a thread costs more than it saves

}  // namespace

void seal_pieces(std::span<const SealedPiece> pieces, size_t piece_bytes, uint64_t* seals, int threads) {
  if (threads <= 1 || pieces.size() * piece_bytes < kParallelBytes) {
    for (size_t i = 0; i < pieces.size(); ++i) {
      seals[i] = seal_sums(pieces[i].src, pieces[i].dst, 0, piece_bytes).finish(piece_bytes);
    }
    return;
  }
  const size_t parts = (piece_bytes + kUnitBytes - 1) / kUnitBytes;  // of a piece
  std::vector<SealSums> sums(pieces.size() * parts);
  const size_t each = std::max<size_t>(kUnitBytes / piece_bytes, 1);  // parts of a unit
  run_units((sums.size() + each - 1) / each, threads, [&](size_t unit) {
    for (size_t k = unit * each; k < std::min(sums.size(), (unit + 1) * each); ++k) {
      const SealedPiece& piece = pieces[k / parts];
      const size_t from = k % parts * kUnitBytes;
      const size_t bytes = std::min(kUnitBytes, piece_bytes - from);
      sums[k] = seal_sums(piece.src + from, piece.dst ? piece.dst + from : nullptr, from, bytes);
    }
  });
  for (size_t i = 0; i < pieces.size(); ++i) {
    SealSums& whole = sums[i * parts];
    for (size_t part = 1; part < parts; ++part) whole += sums[i * parts + part];
    seals[i] = whole.finish(piece_bytes);
  }
}

}  // namespace memserve
