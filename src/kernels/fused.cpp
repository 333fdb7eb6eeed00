// Distributes the fused kernels over threads.
#include "fused.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <algorithm>

#include "isa.h"

namespace memserve::fused {
namespace {

// With fewer elements a second thread costs more than it gains (waking it takes 1 to 5 us).
constexpr std::ptrdiff_t kElementsPerThread = 8192;

int threads_for(std::ptrdiff_t elements) {
#if defined(_OPENMP)
  return static_cast<int>(std::clamp<std::ptrdiff_t>(elements / kElementsPerThread, 1, omp_get_max_threads()));
#else
  return elements < 0 ? 0 : 1;
#endif
}

// Calls work(begin, end) so that the ranges cover [0, count).
template <class Work>
void share(std::ptrdiff_t count, int threads, Work work) {
  if (threads <= 1 || count <= 1) return work(0, count);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
  {
    const std::ptrdiff_t n = omp_get_num_threads(), i = omp_get_thread_num();
    work(count * i / n, count * (i + 1) / n);
  }
#endif
}

}  // namespace

const Kernels& kernels_in_use() {
#if defined(MEMSERVE_X86_ISAS)
  switch (current_isa()) {
#if defined(MEMSERVE_AMX)
    case Isa::amx: return amx::fused_kernels;
#else
    case Isa::amx:
#endif
    case Isa::avx512_bf16: return avx512_bf16::fused_kernels;
    case Isa::avx512: return avx512::fused_kernels;
    case Isa::avx2: return avx2::fused_kernels;
    case Isa::portable: break;
  }
#endif
  return portable::fused_kernels;
}

void run(const RmsNorm& op, Dtype dtype, std::ptrdiff_t rows) {
  const auto body = kernels_in_use().rms_norm;
  share(rows, threads_for(rows * op.width), [&](auto begin, auto end) { body(op, dtype, begin, end); });
}

void run(const Gated& op, Dtype dtype, std::ptrdiff_t rows) {
  const auto body = kernels_in_use().gated;
  share(rows, threads_for(rows * op.width), [&](auto begin, auto end) { body(op, dtype, begin, end); });
}

void run(const Rotary& op, Dtype dtype, std::ptrdiff_t tokens) {
  const auto body = kernels_in_use().rotary;
  const auto elements = tokens * op.heads * op.dim;
  share(tokens, threads_for(elements), [&](auto begin, auto end) { body(op, dtype, begin, end); });
}

void run(const Linear& op, Dtype dtype) {
  const auto body = kernels_in_use().linear;
  constexpr std::ptrdiff_t columns = 32;  // half a packed block or a whole one: small, so that threads get equal shares
  share((op.n + columns - 1) / columns, threads_for(op.n * op.k), [&](auto begin, auto end) {
    body(op, dtype, begin * columns, std::min(end * columns, op.n));
  });
}

void run(const LowRank& op, Dtype dtype, std::ptrdiff_t rows) {
  const auto body = kernels_in_use().low_rank;
  std::ptrdiff_t elements = 0;
  for (std::ptrdiff_t i = 0; i < rows; ++i) elements += op.rows[i].rank * (op.k + op.n);
  share(rows, threads_for(elements), [&](auto begin, auto end) { body(op, dtype, begin, end); });
}

}  // namespace memserve::fused
