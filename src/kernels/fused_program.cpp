// Runs a program: threads claim units of an operation, and start the next one when all are done.
#include "fused_program.h"

#if defined(_OPENMP)
#include <omp.h>
#endif
#include <sched.h>

#include <algorithm>

namespace memserve::fused {
namespace {

constexpr std::ptrdiff_t kColumns = 32;  // a linear's unit: half a packed block or a whole one, so that threads get equal parts
constexpr std::ptrdiff_t kColumnGrain = 2;
constexpr std::ptrdiff_t kManyRows = 32, kRowGrain = 4;
constexpr int kSpinsBeforeYield = 4096;  // about 50 us

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

void Units::reset(std::ptrdiff_t count, std::ptrdiff_t grain, int parts) {
  used_ = std::min(parts, kPartsMax);
  count_ = count;
  grain_ = grain;
  finished_.store(0, std::memory_order_relaxed);
  for (int i = 0; i < used_; ++i) {
    parts_[i].begin = count * i / used_;
    parts_[i].end = count * (i + 1) / used_;
    parts_[i].next.store(parts_[i].begin / grain, std::memory_order_relaxed);
  }
}

bool Units::claim(int part, Range& range) {
  for (int i = 0; i < used_; ++i) {
    Part& from = parts_[(part + i) % used_];
    if (from.next.load(std::memory_order_relaxed) * grain_ >= from.end) continue;
    const std::ptrdiff_t at = from.next.fetch_add(1, std::memory_order_relaxed) * grain_;
    range = {std::max(at, from.begin), std::min(at + grain_, from.end)};
    if (range.begin < range.end) return true;
  }
  return false;
}

void Program::add(Step step) {
  if (const auto* linear = std::get_if<QuantisedLinear>(&step.op)) {
    inputs_max_ = std::max(inputs_max_, linear->then.k);
    fine_ = fine_ || linear->fine;
  }
  steps_.push_back(std::move(step));
  units_.emplace_back();
  prepared_.emplace_back();
}

void Program::start(std::ptrdiff_t tokens, std::ptrdiff_t logits_rows) {
  counts_[0] = tokens, counts_[1] = logits_rows;
  const auto bytes = quantised::activation_bytes(std::max(tokens, logits_rows), inputs_max_, fine_);
  if (static_cast<std::size_t>(bytes) > integers_.size()) integers_.resize(static_cast<std::size_t>(bytes));
}

void Program::set_external(int index, void* address) {
  if (externals_.size() <= static_cast<std::size_t>(index)) externals_.resize(index + 1);
  externals_[index] = address;
}

void Program::reset(int index, int parts) {
  const Step& step = steps_[index];
  const std::ptrdiff_t rows = counts_[static_cast<int>(step.count)];
  const auto* linear = std::get_if<Linear>(&step.op);
  if (std::holds_alternative<Reduce>(step.op)) return units_[index].reset(rows > 0 ? 1 : 0, 1, parts);
  if (linear && rows > 0) return units_[index].reset((linear->n + kColumns - 1) / kColumns, kColumnGrain, parts);
  if (const auto* quantised = std::get_if<QuantisedLinear>(&step.op)) {
    prepared_[index].reset(rows, 1, parts);
    return units_[index].reset(rows > 0 ? quantised::strips_of(quantised->then.n) : 0, kColumnGrain, parts);
  }
  units_[index].reset(rows, rows < kManyRows ? 1 : kRowGrain, parts);
}

// The rows of a step as integers: one operation at a time uses this memory.
quantised::Activations Program::integers(const Step& step, const QuantisedLinear& linear) {
  return quantised::activations_in(integers_.data(), counts_[static_cast<int>(step.count)], linear.then.k, linear.fine);
}

void Program::run_quantised(const Step& step, const QuantisedLinear& linear, bool first, Range range) {
  const std::ptrdiff_t rows = counts_[static_cast<int>(step.count)];
  if (quantised::takes_numbers(linear.then.format, rows, linear.fine, step.dtype)) {
    if (first) return;
    return quantised::multiply_numbers({resolve(step.places[0]), linear.then.w, linear.then.bias,
                                        resolve(step.places[1]), rows, linear.then.k, linear.then.n, linear.first.stride,
                                        linear.then.stride_y, linear.then.format, false},
                                       step.dtype, step.dtype, range.begin, range.end);
  }
  if (first) {
    quantised::Quantise op = linear.first;
    op.x = resolve(step.places[0]), op.to = integers(step, linear);
    return quantised::kernels_in_use().quantise(op, step.dtype, range.begin, range.end);
  }
  quantised::Product op = linear.then;
  op.x = integers(step, linear), op.y = resolve(step.places[1]), op.rows = rows;
  quantised::product_kernels_in_use().multiply(op, step.dtype, range.begin, range.end);
}

void Program::reduce(const Step& step, const Reduce& op) {
  const std::ptrdiff_t rows = counts_[static_cast<int>(step.count)];
  const void* x = resolve(step.places[0]);
  void* y = resolve(step.places[1]);
  if (ending_ != Collective::Ending::good) return;
  if (collective_ != nullptr) {
    ending_ = collective_->all_reduce(x, y, size_t(rows * op.width), step.dtype);
    return;
  }
  for (std::ptrdiff_t row = 0; row < rows; ++row)
    for (std::ptrdiff_t column = 0; column < op.width; ++column) {
      const float made_up = float((row * 7 + column * 13) % 17 - 8) / 64;
      const std::ptrdiff_t at = row * op.width + column;
      add_to(x, y, at, made_up, step.dtype);
    }
}

void Program::run_range(const Kernels& kernels, const Step& step, Range range) {
  const auto at = [&](int i) { return resolve(step.places[i]); };
  if (const auto* norm = std::get_if<RmsNorm>(&step.op)) {
    RmsNorm op = *norm;
    op.x = at(0), op.residual = at(1), op.sum = at(2), op.y = at(3);
    kernels.rms_norm(op, step.dtype, range.begin * op.inner, range.end * op.inner);
  } else if (const auto* gate = std::get_if<Gated>(&step.op)) {
    Gated op = *gate;
    op.gate = at(0), op.up = at(1), op.y = at(2);
    kernels.gated(op, step.dtype, range.begin, range.end);
  } else if (const auto* turn = std::get_if<Rotary>(&step.op)) {
    Rotary op = *turn;
    op.x = at(0), op.cosine = at(1), op.sine = at(2), op.y = at(3);
    kernels.rotary(op, step.dtype, range.begin, range.end);
  } else if (const auto* sum = std::get_if<Reduce>(&step.op)) {
    reduce(step, *sum);
  } else if (const auto* product = std::get_if<Linear>(&step.op)) {
    Linear op = *product;
    op.x = at(0), op.y = at(1), op.rows = counts_[static_cast<int>(step.count)];
    kernels.linear(op, step.dtype, range.begin * kColumns, std::min(range.end * kColumns, op.n));
  }
}

// Runs units until all of them are done, by this thread or others.
template <class Run>
void Program::share(Units& units, int part, Run run_part) {
  Range range{};
  std::ptrdiff_t done = 0;
  for (; units.claim(part, range); done += range.end - range.begin) run_part(range);
  if (done > 0) units.finish(done);
  for (int spins = 0; !units.all_finished(); ++spins) {
    if (spins < kSpinsBeforeYield) pause_briefly();
    else sched_yield();
  }
}

void Program::work(const Kernels& kernels, int begin, int end, int part) {
  for (int i = begin; i < end; ++i) {
    const Step& step = steps_[i];
    if (const auto* linear = std::get_if<QuantisedLinear>(&step.op)) {
      share(prepared_[i], part, [&](Range range) { run_quantised(step, *linear, true, range); });
      share(units_[i], part, [&](Range range) { run_quantised(step, *linear, false, range); });
    } else {
      share(units_[i], part, [&](Range range) { run_range(kernels, step, range); });
    }
  }
}

Collective::Ending Program::run(int begin, int end) {
  ending_ = Collective::Ending::good;
  const Kernels& kernels = kernels_in_use();
#if defined(_OPENMP)
  const int parts = omp_get_max_threads();
#else
  const int parts = 1;
#endif
  for (int i = begin; i < end; ++i) reset(i, parts);
#if defined(_OPENMP)
#pragma omp parallel num_threads(parts)
  work(kernels, begin, end, omp_get_thread_num());
#else
  work(kernels, begin, end, 0);
#endif
  return ending_;
}

}  // namespace memserve::fused
