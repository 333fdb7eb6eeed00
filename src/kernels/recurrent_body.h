// The recurrent bodies, compiled once per instruction set (see recurrent.h for what each computes).
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "fused_vector.h"
#include "recurrent.h"

namespace {
using memserve::Dtype;
using namespace memserve::recurrent;

static inline std::ptrdiff_t whole_lanes(std::ptrdiff_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

template <class T>
static inline float rounded(float value) {
  T bits;
  put(&bits, value);
  return to_float(bits);
}

// `width` floats of x, and zeros up to whole vectors.
template <class T>
static inline void widen(float* to, const T* x, std::ptrdiff_t width) {
  std::ptrdiff_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(to + i, load(x + i));
  for (; i < width; ++i) to[i] = to_float(x[i]);
  for (; i < whole_lanes(width); ++i) to[i] = 0;
}

template <class T>
static inline void narrow(T* to, const float* x, std::ptrdiff_t width) {
  std::ptrdiff_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(to + i, load(x + i));
  for (; i < width; ++i) put(to + i, x[i]);
}

template <class T>
static inline const T* state_before(const Piece& piece, const Pieces& pieces) {
  return piece.from ? reinterpret_cast<const T*>(piece.from + pieces.offset) : nullptr;
}
template <class T>
static inline T* state_behind(const Piece& piece, const Pieces& pieces) {
  return reinterpret_cast<T*>(piece.to + pieces.offset);
}

// -- convolutions

// Up to kChannels channels from `first` on, of which `width` are there: rows of floats, the inputs before the piece first.
template <class T, int Taps>
static void convolve_piece(const Convolution& op, const Piece& piece, std::ptrdiff_t first, std::ptrdiff_t width,
                           const float* weight, const float* bias) {
  constexpr int kVectors = kChannels / kLanes;
  const std::ptrdiff_t count = piece.end - piece.begin, kept = op.kept;
  const T* before = state_before<T>(piece, op.pieces);
  const T* x = static_cast<const T*>(op.x) + piece.begin * op.stride_x + first;
  alignas(64) float earlier[Taps - 1][kChannels] = {};
  for (int tap = 0; before && tap < Taps - 1; ++tap)
    for (std::ptrdiff_t c = 0; c < width; ++c)
      earlier[tap][c] = to_float(before[(first + c) * kept + kept - (Taps - 1) + tap]);
  T* behind = state_behind<T>(piece, op.pieces) + first * kept;
  for (std::ptrdiff_t c = 0; c < width; ++c) {  // what is kept moves to the front: `behind` may be `before`
    for (std::ptrdiff_t i = 0; i < kept; ++i) {
      const std::ptrdiff_t at = i + count;  // in what was kept, with this piece behind it
      T value{};
      if (at >= kept) value = x[(at - kept) * op.stride_x + c];
      else if (before) value = before[(first + c) * kept + at];
      behind[c * kept + i] = value;
    }
  }
  Floats window[Taps - 1][kVectors];
  for (int tap = 0; tap < Taps - 1; ++tap)
    for (int v = 0; v < kVectors; ++v) window[tap][v] = load(earlier[tap] + v * kLanes);
  alignas(64) float in[kChannels], out[kChannels];
  T* y = static_cast<T*>(op.y) + piece.begin * op.channels + first;
  for (std::ptrdiff_t t = 0; t < count; ++t, x += op.stride_x, y += op.channels) {
    widen(in, x, width);
    for (int v = 0; v < kVectors && v * kLanes < width; ++v) {
      const Floats value = load(in + v * kLanes);
      Floats sum = load(bias + v * kLanes) + load(weight + (Taps - 1) * kChannels + v * kLanes) * value;
      for (int tap = 0; tap < Taps - 1; ++tap) sum += load(weight + tap * kChannels + v * kLanes) * window[tap][v];
      for (int tap = 0; tap + 1 < Taps - 1; ++tap) window[tap][v] = window[tap + 1][v];
      window[Taps - 2][v] = value;
      sum = round_to(sum, y);
      store(out + v * kLanes, op.silu ? sum / (1.0f + exp_of(-sum)) : sum);
    }
    narrow(y, out, width);
  }
}

template <class T, int Taps>
static void convolve_units(const Convolution& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  for (std::ptrdiff_t unit = begin; unit < end; ++unit) {
    const std::ptrdiff_t first = unit * kChannels, width = std::min(kChannels, op.channels - first);
    alignas(64) float weight[Taps * kChannels] = {}, bias[kChannels] = {};
    for (int tap = 0; tap < Taps; ++tap) std::copy_n(op.weight + tap * op.channels + first, width, weight + tap * kChannels);
    if (op.bias) std::copy_n(op.bias + first, width, bias);
    for (std::ptrdiff_t i = 0; i < op.pieces.count; ++i)
      convolve_piece<T, Taps>(op, op.pieces.rows[i], first, width, weight, bias);
  }
}

template <class T>
static void convolve_taps(const Convolution& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (op.taps == 2) return convolve_units<T, 2>(op, begin, end);
  if (op.taps == 3) return convolve_units<T, 3>(op, begin, end);
  convolve_units<T, 4>(op, begin, end);
}

// -- the gated delta rule

constexpr int kBlockVectors = kColumns / kLanes;

// What a head computes with, one token after the other.
struct DeltaToken {
  float* q;  // [key_dim]
  float* k;
  float decay, beta;
};

template <class T>
static void read_token(const DeltaRule& op, std::ptrdiff_t head, std::ptrdiff_t t, DeltaToken& token) {
  const std::ptrdiff_t key_head = head / (op.value_heads / op.key_heads), dim = op.key_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const auto read = [&](const void* from, std::ptrdiff_t stride, float* to, float factor) {
    widen(to, static_cast<const T*>(from) + t * stride + key_head * dim, dim);
    if (op.normalises) {
      Floats squares{};
      for (std::ptrdiff_t i = 0; i < dim; i += kLanes) squares += load(to + i) * load(to + i);
      factor *= 1.0f / std::sqrt(sum_of(squares) + 1e-6f);
    }
    for (std::ptrdiff_t i = 0; i < dim; i += kLanes) store(to + i, load(to + i) * factor);
  };
  read(op.q, op.stride_q, token.q, scale);
  read(op.k, op.stride_k, token.k, 1.0f);
  token.decay = std::exp(op.decay[t * op.stride_decay + head]);
  token.beta = to_float(static_cast<const T*>(op.beta)[t * op.stride_beta + head]);
}

// S^T k of a block of columns.
static inline void product(Floats (&sums)[kBlockVectors], const float* state, const float* k, std::ptrdiff_t dim) {
  for (auto& sum : sums) sum = Floats{};
  for (std::ptrdiff_t i = 0; i < dim; ++i)
    for (int v = 0; v < kBlockVectors; ++v) sums[v] += load(state + i * kColumns + v * kLanes) * k[i];
}

// Update the block by one token, and read it: with q for the output, and with the next token's key, while it is there.
template <bool HasNext>
static inline void update(float* state, const DeltaToken& token, const float* next_k, const Floats (&change)[kBlockVectors],
                          Floats (&out)[kBlockVectors], Floats (&next)[kBlockVectors], std::ptrdiff_t dim) {
  for (int v = 0; v < kBlockVectors; ++v) out[v] = next[v] = Floats{};
  for (std::ptrdiff_t i = 0; i < dim; ++i) {
    const float k = token.k[i], q = token.q[i], later = HasNext ? next_k[i] : 0.0f;
    for (int v = 0; v < kBlockVectors; ++v) {
      float* at = state + i * kColumns + v * kLanes;
      const Floats value = load(at) * token.decay + change[v] * k;
      store(at, value);
      out[v] += value * q;
      if (HasNext) next[v] += value * later;
    }
  }
}

template <class T>
static void delta_piece(const DeltaRule& op, const Piece& piece, std::ptrdiff_t head, std::ptrdiff_t first, float* state,
                        float* scratch) {
  const std::ptrdiff_t dim = op.key_dim, padded = whole_lanes(dim), width = std::min(kColumns, op.value_dim - first);
  const std::ptrdiff_t place = head * dim * op.value_dim + first;
  const float* before = state_before<float>(piece, op.pieces);
  for (std::ptrdiff_t i = 0; i < dim; ++i) {
    if (before) widen(state + i * kColumns, before + place + i * op.value_dim, width);
    else std::fill_n(state + i * kColumns, kColumns, 0.0f);
  }
  DeltaToken token{scratch, scratch + padded, 0, 0}, later{scratch + 2 * padded, scratch + 3 * padded, 0, 0};
  alignas(64) float values[kColumns] = {};
  Floats sums[kBlockVectors], change[kBlockVectors], out[kBlockVectors];
  read_token<T>(op, head, piece.begin, token);
  product(sums, state, token.k, dim);
  for (std::ptrdiff_t t = piece.begin; t < piece.end; ++t) {
    widen(values, static_cast<const T*>(op.v) + t * op.stride_v + head * op.value_dim + first, width);
    for (int v = 0; v < kBlockVectors; ++v)
      change[v] = (load(values + v * kLanes) - sums[v] * token.decay) * token.beta;
    if (t + 1 < piece.end) {
      read_token<T>(op, head, t + 1, later);
      update<true>(state, token, later.k, change, out, sums, dim);
    } else {
      update<false>(state, token, nullptr, change, out, sums, dim);
    }
    for (int v = 0; v < kBlockVectors; ++v) store(values + v * kLanes, out[v]);
    narrow(static_cast<T*>(op.y) + (t * op.value_heads + head) * op.value_dim + first, values, width);
    std::swap(token, later);
  }
  float* behind = state_behind<float>(piece, op.pieces) + place;
  for (std::ptrdiff_t i = 0; i < dim; ++i) narrow(behind + i * op.value_dim, state + i * kColumns, width);
}

template <class T>
static void delta_units(const DeltaRule& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  const std::ptrdiff_t blocks = (op.value_dim + kColumns - 1) / kColumns, padded = whole_lanes(op.key_dim);
  std::vector<float> memory(static_cast<std::size_t>(op.key_dim * kColumns + 4 * padded) + kLanes);
  float* state = memory.data();
  for (std::ptrdiff_t unit = begin; unit < end; ++unit)
    for (std::ptrdiff_t i = 0; i < op.pieces.count; ++i)
      delta_piece<T>(op, op.pieces.rows[i], unit / blocks, unit % blocks * kColumns, state, state + op.key_dim * kColumns);
}

// -- Mamba-2's scan

template <class T>
static float time_step(const Scan& op, const Piece& piece, std::ptrdiff_t head, std::ptrdiff_t t) {
  float step = to_float(static_cast<const T*>(op.dt)[t * op.stride_dt + head]);
  if (op.dt_bias) step = rounded<T>(step + op.dt_bias[head]);
  if (op.softplus) step = rounded<T>(step > 20.0f ? step : std::log1p(std::exp(step)));
  return piece.is_bounded ? std::min(std::max(step, op.least), op.most) : step;
}

template <class T>
static void scan_piece(const Scan& op, const Piece& piece, std::ptrdiff_t head, std::ptrdiff_t first, float* state,
                       float* scratch) {
  const std::ptrdiff_t size = op.state_size, padded = whole_lanes(size), rows = std::min(kRows, op.head_dim - first);
  const std::ptrdiff_t place = (head * op.head_dim + first) * size, group = head / (op.heads / op.groups);
  const float* before = state_before<float>(piece, op.pieces);
  for (std::ptrdiff_t p = 0; p < rows; ++p) {
    if (before) widen(state + p * padded, before + place + p * size, size);
    else std::fill_n(state + p * padded, padded, 0.0f);
  }
  float *b = scratch, *c = scratch + padded;
  const float a = op.a[head], skip = op.skip ? op.skip[head] : 0.0f;
  for (std::ptrdiff_t t = piece.begin; t < piece.end; ++t) {
    const float step = time_step<T>(op, piece, head, t), decay = std::exp(step * a);
    widen(b, static_cast<const T*>(op.b) + t * op.stride_b + group * size, size);
    widen(c, static_cast<const T*>(op.c) + t * op.stride_c + group * size, size);
    const T* x = static_cast<const T*>(op.x) + t * op.stride_x + head * op.head_dim + first;
    float* y = op.y + (t * op.heads + head) * op.head_dim + first;
    for (std::ptrdiff_t p = 0; p < rows; ++p) {
      const float value = to_float(x[p]), added = value * step;
      float* row = state + p * padded;
      Floats even{}, odd{};
      std::ptrdiff_t n = 0;
      for (; n + 2 * kLanes <= padded; n += 2 * kLanes) {
        const Floats low = load(row + n) * decay + load(b + n) * added;
        const Floats high = load(row + n + kLanes) * decay + load(b + n + kLanes) * added;
        store(row + n, low);
        store(row + n + kLanes, high);
        even += low * load(c + n);
        odd += high * load(c + n + kLanes);
      }
      if (n < padded) {
        const Floats low = load(row + n) * decay + load(b + n) * added;
        store(row + n, low);
        even += low * load(c + n);
      }
      y[p] = sum_of(even + odd) + value * skip;
    }
  }
  float* behind = state_behind<float>(piece, op.pieces) + place;
  for (std::ptrdiff_t p = 0; p < rows; ++p) narrow(behind + p * size, state + p * padded, size);
}

template <class T>
static void scan_units(const Scan& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  const std::ptrdiff_t blocks = (op.head_dim + kRows - 1) / kRows, padded = whole_lanes(op.state_size);
  std::vector<float> memory(static_cast<std::size_t>((kRows + 2) * padded));
  float* state = memory.data();
  for (std::ptrdiff_t unit = begin; unit < end; ++unit)
    for (std::ptrdiff_t i = 0; i < op.pieces.count; ++i)
      scan_piece<T>(op, op.pieces.rows[i], unit / blocks, unit % blocks * kRows, state, state + kRows * padded);
}

// -- by dtype

static void convolve(const Convolution& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (dtype == Dtype::float32) return convolve_taps<float>(op, begin, end);
  if (dtype == Dtype::bfloat16) return convolve_taps<Bf16>(op, begin, end);
  convolve_taps<Fp16>(op, begin, end);
}

static void delta_rule(const DeltaRule& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (dtype == Dtype::float32) return delta_units<float>(op, begin, end);
  if (dtype == Dtype::bfloat16) return delta_units<Bf16>(op, begin, end);
  delta_units<Fp16>(op, begin, end);
}

static void scan(const Scan& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (dtype == Dtype::float32) return scan_units<float>(op, begin, end);
  if (dtype == Dtype::bfloat16) return scan_units<Bf16>(op, begin, end);
  scan_units<Fp16>(op, begin, end);
}

}  // namespace
