// Runs a program: every thread takes its share of each operation, then all meet at a barrier.
#include "fused_program.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <algorithm>

namespace memserve::fused {
namespace {

constexpr std::ptrdiff_t kColumns = 32;  // half a packed block: the finest cut of a linear

struct Range {
  std::ptrdiff_t begin, end;
};

Range share_of(std::ptrdiff_t count, std::ptrdiff_t part, std::ptrdiff_t parts) {
  return {count * part / parts, count * (part + 1) / parts};
}

}  // namespace

void Program::set_external(int index, void* address) {
  if (externals_.size() <= static_cast<std::size_t>(index)) externals_.resize(index + 1);
  externals_[index] = address;
}

void Program::run_share(const Kernels& kernels, const Step& step, std::ptrdiff_t part, std::ptrdiff_t parts) const {
  const std::ptrdiff_t rows = counts_[static_cast<int>(step.count)];
  const auto at = [&](int i) { return resolve(step.places[i]); };
  if (const auto* norm = std::get_if<RmsNorm>(&step.op)) {
    RmsNorm op = *norm;
    op.x = at(0), op.residual = at(1), op.sum = at(2), op.y = at(3);
    const Range r = share_of(rows * op.inner, part, parts);
    kernels.rms_norm(op, step.dtype, r.begin, r.end);
  } else if (const auto* gate = std::get_if<Gated>(&step.op)) {
    Gated op = *gate;
    op.gate = at(0), op.up = at(1), op.y = at(2);
    const Range r = share_of(rows, part, parts);
    kernels.gated(op, step.dtype, r.begin, r.end);
  } else if (const auto* turn = std::get_if<Rotary>(&step.op)) {
    Rotary op = *turn;
    op.x = at(0), op.cosine = at(1), op.sine = at(2), op.y = at(3);
    const Range r = share_of(rows, part, parts);
    kernels.rotary(op, step.dtype, r.begin, r.end);
  } else if (const auto* product = std::get_if<Linear>(&step.op)) {
    Linear op = *product;
    op.x = at(0), op.y = at(1), op.rows = rows;
    const Range r = share_of((op.n + kColumns - 1) / kColumns, part, parts);
    kernels.linear(op, step.dtype, r.begin * kColumns, std::min(r.end * kColumns, op.n));
  }
}

void Program::run(int begin, int end) {
  const Kernels& kernels = kernels_in_use();
#if defined(_OPENMP)
#pragma omp parallel
  for (int i = begin; i < end; ++i) {
    run_share(kernels, steps_[i], omp_get_thread_num(), omp_get_num_threads());
#pragma omp barrier
  }
#else
  for (int i = begin; i < end; ++i) run_share(kernels, steps_[i], 0, 1);
#endif
}

}  // namespace memserve::fused
