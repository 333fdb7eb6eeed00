// Distributes the recurrent kernels over threads.
#include "recurrent.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <algorithm>

#include "isa.h"

namespace memserve::recurrent {
namespace {

// With fewer products a second thread costs more than it gains.
constexpr std::ptrdiff_t kProductsPerThread = 16384;

const Kernels& kernels_in_use() {
#if defined(MEMSERVE_X86_ISAS)
  if (current_isa() >= Isa::avx512) return avx512::recurrent_kernels;  // nothing here multiplies in bf16
  if (current_isa() == Isa::avx2) return avx2::recurrent_kernels;
#endif
  return portable::recurrent_kernels;
}

std::ptrdiff_t tokens_of(const Pieces& pieces) {
  std::ptrdiff_t tokens = 0;
  for (std::ptrdiff_t i = 0; i < pieces.count; ++i) tokens += pieces.rows[i].end - pieces.rows[i].begin;
  return tokens;
}

// Calls work(begin, end) so that the ranges cover [0, units).
template <class Work>
void share(std::ptrdiff_t units, std::ptrdiff_t products, Work work) {
#if defined(_OPENMP)
  const auto threads = std::clamp<std::ptrdiff_t>(products / kProductsPerThread, 1, omp_get_max_threads());
  if (threads > 1 && units > 1) {
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      const std::ptrdiff_t n = omp_get_num_threads(), i = omp_get_thread_num();
      work(units * i / n, units * (i + 1) / n);
    }
    return;
  }
#endif
  if (products > 0) work(std::ptrdiff_t{0}, units);
}

std::ptrdiff_t blocks(std::ptrdiff_t size, std::ptrdiff_t each) { return (size + each - 1) / each; }

}  // namespace

void run(const Convolution& op, Dtype dtype) {
  const auto body = kernels_in_use().convolve;
  share(blocks(op.channels, kChannels), tokens_of(op.pieces) * op.channels * op.taps,
        [&](auto begin, auto end) { body(op, dtype, begin, end); });
}

void run(const DeltaRule& op, Dtype dtype) {
  const auto body = kernels_in_use().delta_rule;
  share(op.value_heads * blocks(op.value_dim, kColumns),
        tokens_of(op.pieces) * op.value_heads * op.key_dim * op.value_dim,
        [&](auto begin, auto end) { body(op, dtype, begin, end); });
}

void run(const Scan& op, Dtype dtype) {
  const auto body = kernels_in_use().scan;
  share(op.heads * blocks(op.head_dim, kRows), tokens_of(op.pieces) * op.heads * op.head_dim * op.state_size,
        [&](auto begin, auto end) { body(op, dtype, begin, end); });
}

}  // namespace memserve::recurrent
