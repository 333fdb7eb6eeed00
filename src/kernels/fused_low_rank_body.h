// What adapters add to rows, compiled once per instruction set (see fused.h).
#pragma once
#include "fused_body.h"

namespace {
using memserve::fused::LowRank;

template <class T>
static inline float dot(const T* a, const T* x, std::ptrdiff_t k) {
  Floats sums{};
  float tail = 0;
  sweep(k, [&](std::ptrdiff_t i) { sums += load(a + i) * load(x + i); },
        [&](std::ptrdiff_t i) { tail += to_float(a[i]) * to_float(x[i]); });
  return sum_of(sums) + tail;
}

template <class T>
static void low_rank_row(const LowRank& op, const LowRank::Row& row) {
  const T *x = static_cast<const T*>(op.x) + row.row * op.k, *a = static_cast<const T*>(row.a);
  const T* b = static_cast<const T*>(row.b);
  T* y = static_cast<T*>(op.y) + row.row * op.n;
  float inner[LowRank::kRankMax];
  for (std::ptrdiff_t j = 0; j < row.rank; ++j) inner[j] = dot(a + j * op.k, x, op.k);
  sweep(op.n,
        [&](std::ptrdiff_t i) {
          Floats sum{};
          for (std::ptrdiff_t j = 0; j < row.rank; ++j) sum += load(b + j * op.n + i) * inner[j];
          store(y + i, load(y + i) + sum);
        },
        [&](std::ptrdiff_t i) {
          float sum = 0;
          for (std::ptrdiff_t j = 0; j < row.rank; ++j) sum += to_float(b[j * op.n + i]) * inner[j];
          put(y + i, to_float(y[i]) + sum);
        });
}

template <class T>
static void low_rank_rows(const LowRank& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  for (std::ptrdiff_t i = begin; i < end; ++i)
    if (op.rows[i].a) low_rank_row<T>(op, op.rows[i]);
}

static void low_rank(const LowRank& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (dtype == Dtype::float32) return low_rank_rows<float>(op, begin, end);
  if (dtype == Dtype::bfloat16) return low_rank_rows<Bf16>(op, begin, end);
  low_rank_rows<Fp16>(op, begin, end);
}

}  // namespace
