// The elementwise bodies, compiled once per instruction set (see fused.h for what each computes).
#pragma once
#include "fused.h"
#include "fused_vector.h"

namespace {
using memserve::Dtype;
using memserve::fused::Gate;
using memserve::fused::Gated;
using memserve::fused::RmsNorm;
using memserve::fused::Rotary;

// Calls body(begin of a full vector) and tail(index) over [0, width).
template <class Body, class Tail>
static inline void sweep(std::ptrdiff_t width, Body body, Tail tail) {
  std::ptrdiff_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i);
  for (; i < width; ++i) tail(i);
}

// One element as a vector, for the tails: the same arithmetic, so the same rounding.
template <class T>
static inline Floats load_one(const T* p) { return splat(to_float(*p)); }
template <class T>
static inline void store_one(T* p, Floats v) { put(p, v[0]); }

template <class T>
static void rms_norm_row(const RmsNorm& op, const T* x, const T* residual, T* sum, T* y) {
  Floats squares{};
  float tail_squares = 0;
  if (residual) {
    sweep(op.width, [&](std::ptrdiff_t i) { store(sum + i, load(x + i) + load(residual + i)); },
          [&](std::ptrdiff_t i) { store_one(sum + i, load_one(x + i) + load_one(residual + i)); });
    x = sum;
  }
  sweep(op.width, [&](std::ptrdiff_t i) { Floats v = load(x + i); squares += v * v; },
        [&](std::ptrdiff_t i) { float v = to_float(x[i]); tail_squares += v * v; });
  const float mean = (sum_of(squares) + tail_squares) / static_cast<float>(op.width);
  const float scale = 1.0f / __builtin_sqrtf(mean + op.eps);
  const bool round_first = op.round_first;
  auto scaled = [&](Floats v, Floats weight) {
    v = v * scale;
    return (round_first ? round_to(v, y) : v) * weight;
  };
  sweep(op.width, [&](std::ptrdiff_t i) { store(y + i, scaled(load(x + i), load(op.weight + i))); },
        [&](std::ptrdiff_t i) { store_one(y + i, scaled(load_one(x + i), load_one(op.weight + i))); });
}

template <class T>
static void rms_norm_rows(const RmsNorm& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  for (std::ptrdiff_t row = begin; row < end; ++row) {
    const std::ptrdiff_t from = row / op.inner * op.stride_outer + row % op.inner * op.stride_inner;
    const std::ptrdiff_t to = row * op.width;
    const T* residual = op.residual ? static_cast<const T*>(op.residual) + to : nullptr;
    rms_norm_row(op, static_cast<const T*>(op.x) + from, residual, static_cast<T*>(op.sum) + to,
                 static_cast<T*>(op.y) + to);
  }
}

static inline Floats activate(Floats x, Gate kind) {
  if (kind == Gate::silu || kind == Gate::silu_wide) return x / (1.0f + exp_of(-x));
  if (kind == Gate::sigmoid) return 1.0f / (1.0f + exp_of(-x));
  if (kind == Gate::product) return x;
  const Floats inner = (x + x * x * x * 0.044715f) * 0.7978845608028654f;
  return x / (1.0f + exp_of(inner * -2.0f));  // 0.5 (1 + tanh u) = 1 / (1 + exp(-2u))
}

// Rounded as the operations are that this one replaces.
template <class T>
static inline Floats gated_values(Floats gate, Floats up, Gate kind, const T* y) {
  const Floats active = activate(gate, kind);
  return (kind == Gate::silu_wide ? active : round_to(active, y)) * up;
}

template <class T>
static void gated_rows(const Gated& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  for (std::ptrdiff_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(op.gate) + row * op.stride_gate;
    const T* up = static_cast<const T*>(op.up) + row * op.stride_up;
    T* y = static_cast<T*>(op.y) + row * op.width;
    sweep(op.width,
          [&](std::ptrdiff_t i) { store(y + i, gated_values(load(gate + i), load(up + i), op.kind, y)); },
          [&](std::ptrdiff_t i) { store_one(y + i, gated_values(load_one(gate + i), load_one(up + i), op.kind, y)); });
  }
}

template <class T>
static void rotary_head(const T* x, const T* c, const T* s, T* y, std::ptrdiff_t half) {
  auto turn = [&](Floats a, Floats b, Floats cosine, Floats sine) { return a * cosine + b * sine; };
  sweep(half,
        [&](std::ptrdiff_t i) {
          const Floats low = load(x + i), high = load(x + half + i);
          store(y + i, turn(low, -high, load(c + i), load(s + i)));
          store(y + half + i, turn(high, low, load(c + half + i), load(s + half + i)));
        },
        [&](std::ptrdiff_t i) {
          const Floats low = load_one(x + i), high = load_one(x + half + i);
          store_one(y + i, turn(low, -high, load_one(c + i), load_one(s + i)));
          store_one(y + half + i, turn(high, low, load_one(c + half + i), load_one(s + half + i)));
        });
}

template <class T>
static void rotary_rows(const Rotary& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  for (std::ptrdiff_t token = begin; token < end; ++token) {
    const T* c = static_cast<const T*>(op.cosine) + token * op.stride_table;
    const T* s = static_cast<const T*>(op.sine) + token * op.stride_table;
    for (std::ptrdiff_t head = 0; head < op.heads; ++head) {
      const T* x = static_cast<const T*>(op.x) + token * op.stride_token + head * op.stride_head;
      rotary_head(x, c, s, static_cast<T*>(op.y) + (token * op.heads + head) * op.dim, op.dim / 2);
    }
  }
}


static void rms_norm(const RmsNorm& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (dtype == Dtype::float32) return rms_norm_rows<float>(op, begin, end);
  if (dtype == Dtype::bfloat16) return rms_norm_rows<Bf16>(op, begin, end);
  rms_norm_rows<Fp16>(op, begin, end);
}

static void gated(const Gated& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (dtype == Dtype::float32) return gated_rows<float>(op, begin, end);
  if (dtype == Dtype::bfloat16) return gated_rows<Bf16>(op, begin, end);
  gated_rows<Fp16>(op, begin, end);
}

static void rotary(const Rotary& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (dtype == Dtype::float32) return rotary_rows<float>(op, begin, end);
  if (dtype == Dtype::bfloat16) return rotary_rows<Bf16>(op, begin, end);
  rotary_rows<Fp16>(op, begin, end);
}

}  // namespace
