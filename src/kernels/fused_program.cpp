// Runs a program: threads claim pieces of an operation, and go on when all of its pieces are done.
#include "fused_program.h"

#if defined(_OPENMP)
#include <omp.h>
#endif
#include <sched.h>

#include <algorithm>

namespace memserve::fused {
namespace {

constexpr std::ptrdiff_t kColumns = 64;        // of a linear, in one piece: a packed block
constexpr std::ptrdiff_t kNarrowColumns = 32;  // half a block, where blocks are few: two threads get equal shares
constexpr std::ptrdiff_t kFewBlocks = 16;
constexpr int kSpinsBeforeYield = 4096;  // about 50 us

std::ptrdiff_t columns_of(const Linear& op) { return op.n > kFewBlocks * kColumns ? kColumns : kNarrowColumns; }

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

void Pieces::reset(std::ptrdiff_t count, int parts) {
  used_ = std::min(parts, kPartsMax);
  count_ = count;
  finished_.store(0, std::memory_order_relaxed);
  for (int i = 0; i < used_; ++i) {
    parts_[i].next.store(count * i / used_, std::memory_order_relaxed);
    parts_[i].end = count * (i + 1) / used_;
  }
}

bool Pieces::claim(int part, std::ptrdiff_t& piece) {
  for (int i = 0; i < used_; ++i) {
    Part& from = parts_[(part + i) % used_];
    if (from.next.load(std::memory_order_relaxed) >= from.end) continue;
    piece = from.next.fetch_add(1, std::memory_order_relaxed);
    if (piece < from.end) return true;
  }
  return false;
}

void Program::add(Step step) {
  steps_.push_back(std::move(step));
  pieces_.emplace_back();
}

void Program::set_external(int index, void* address) {
  if (externals_.size() <= static_cast<std::size_t>(index)) externals_.resize(index + 1);
  externals_[index] = address;
}

std::ptrdiff_t Program::pieces_of(const Step& step) const {
  const std::ptrdiff_t rows = counts_[static_cast<int>(step.count)];
  const auto* linear = std::get_if<Linear>(&step.op);
  return linear && rows > 0 ? (linear->n + columns_of(*linear) - 1) / columns_of(*linear) : rows;
}

void Program::run_piece(const Kernels& kernels, const Step& step, std::ptrdiff_t piece) const {
  const auto at = [&](int i) { return resolve(step.places[i]); };
  if (const auto* norm = std::get_if<RmsNorm>(&step.op)) {
    RmsNorm op = *norm;
    op.x = at(0), op.residual = at(1), op.sum = at(2), op.y = at(3);
    kernels.rms_norm(op, step.dtype, piece * op.inner, (piece + 1) * op.inner);
  } else if (const auto* gate = std::get_if<Gated>(&step.op)) {
    Gated op = *gate;
    op.gate = at(0), op.up = at(1), op.y = at(2);
    kernels.gated(op, step.dtype, piece, piece + 1);
  } else if (const auto* turn = std::get_if<Rotary>(&step.op)) {
    Rotary op = *turn;
    op.x = at(0), op.cosine = at(1), op.sine = at(2), op.y = at(3);
    kernels.rotary(op, step.dtype, piece, piece + 1);
  } else if (const auto* product = std::get_if<Linear>(&step.op)) {
    Linear op = *product;
    op.x = at(0), op.y = at(1), op.rows = counts_[static_cast<int>(step.count)];
    const std::ptrdiff_t columns = columns_of(op), first = piece * columns;
    kernels.linear(op, step.dtype, first, std::min(first + columns, op.n));
  }
}

void Program::work(const Kernels& kernels, int begin, int end, int part) {
  for (int i = begin; i < end; ++i) {
    std::ptrdiff_t piece = 0, done = 0;
    for (; pieces_[i].claim(part, piece); ++done) run_piece(kernels, steps_[i], piece);
    if (done > 0) pieces_[i].finish(done);
    for (int spins = 0; !pieces_[i].all_finished(); ++spins) {
      if (spins < kSpinsBeforeYield) pause_briefly();
      else sched_yield();
    }
  }
}

void Program::run(int begin, int end) {
  const Kernels& kernels = kernels_in_use();
#if defined(_OPENMP)
  const int parts = omp_get_max_threads();
#else
  const int parts = 1;
#endif
  for (int i = begin; i < end; ++i) pieces_[i].reset(pieces_of(steps_[i]), parts);
#if defined(_OPENMP)
#pragma omp parallel num_threads(parts)
  work(kernels, begin, end, omp_get_thread_num());
#else
  work(kernels, begin, end, 0);
#endif
}

}  // namespace memserve::fused
