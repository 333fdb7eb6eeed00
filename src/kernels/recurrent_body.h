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

// The last `Kept` inputs of `width` channels, [channels, Kept] in memory, as rows of channels, and back. The compiler
// turns these loops into permutations.
template <int Kept, class T>
static inline void turn_to_rows(T (*rows)[kChannels], const T* state, std::ptrdiff_t width) {
  for (std::ptrdiff_t c = 0; c < width; ++c)
    for (int i = 0; i < Kept; ++i) rows[i][c] = state[c * Kept + i];
}
template <int Kept, class T>
static inline void turn_to_channels(T* state, const T (*rows)[kChannels], std::ptrdiff_t width) {
  for (std::ptrdiff_t c = 0; c < width; ++c)
    for (int i = 0; i < Kept; ++i) state[c * Kept + i] = rows[i][c];
}

// Up to kChannels channels from `first` on, of which `width` are there.
template <class T, int Taps, int Kept>
static void convolve_piece(const Convolution& op, const Piece& piece, std::ptrdiff_t first, std::ptrdiff_t width,
                           const float* weight, const float* bias) {
  constexpr int kVectors = kChannels / kLanes;
  const std::ptrdiff_t count = piece.end - piece.begin;
  const T* before = state_before<T>(piece, op.pieces);
  const T* x = static_cast<const T*>(op.x) + piece.begin * op.stride_x + first;
  alignas(64) T earlier[Kept][kChannels] = {}, later[Kept][kChannels] = {};
  if (before) {
    if (width == kChannels) turn_to_rows<Kept>(earlier, before + first * Kept, kChannels);
    else turn_to_rows<Kept>(earlier, before + first * Kept, width);
  }
  for (std::ptrdiff_t i = 0; i < Kept; ++i) {
    const std::ptrdiff_t at = i + count - Kept;  // in this piece; below 0: in what was kept
    std::copy_n(at < 0 ? earlier[at + Kept] : x + at * op.stride_x, width, later[i]);
  }
  T* behind = state_behind<T>(piece, op.pieces) + first * Kept;
  if (width == kChannels) turn_to_channels<Kept>(behind, later, kChannels);
  else turn_to_channels<Kept>(behind, later, width);
  Floats window[Taps - 1][kVectors];
  for (int tap = 0; tap < Taps - 1; ++tap)
    for (int v = 0; v < kVectors; ++v) window[tap][v] = load(earlier[Kept - (Taps - 1) + tap] + v * kLanes);
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

template <class T, int Taps, int Kept>
static void convolve_units(const Convolution& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  for (std::ptrdiff_t unit = begin; unit < end; ++unit) {
    const std::ptrdiff_t first = unit * kChannels, width = std::min(kChannels, op.channels - first);
    alignas(64) float weight[Taps * kChannels] = {}, bias[kChannels] = {};
    for (int tap = 0; tap < Taps; ++tap)
      std::copy_n(op.weight + tap * op.channels + first, width, weight + tap * kChannels);
    if (op.bias) std::copy_n(op.bias + first, width, bias);
    for (std::ptrdiff_t i = 0; i < op.pieces.count; ++i)
      convolve_piece<T, Taps, Kept>(op, op.pieces.rows[i], first, width, weight, bias);
  }
}

template <class T, int Taps>
static void convolve_kept(const Convolution& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (op.kept == Taps) return convolve_units<T, Taps, Taps>(op, begin, end);
  convolve_units<T, Taps, Taps - 1>(op, begin, end);
}

template <class T>
static void convolve_taps(const Convolution& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (op.taps == 2) return convolve_kept<T, 2>(op, begin, end);
  if (op.taps == 3) return convolve_kept<T, 3>(op, begin, end);
  convolve_kept<T, 4>(op, begin, end);
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

// S^T k of a block of columns, whose rows lie `stride` apart.
static inline void product(Floats (&sums)[kBlockVectors], const float* state, std::ptrdiff_t stride, const float* k,
                           std::ptrdiff_t dim) {
  for (auto& sum : sums) sum = Floats{};
  for (std::ptrdiff_t i = 0; i < dim; ++i)
    for (int v = 0; v < kBlockVectors; ++v) sums[v] += load(state + i * stride + v * kLanes) * k[i];
}

// Update the block by one token, and read it: with q for the output, and with the next token's key, while it is there.
template <bool HasNext>
static inline void update(float* state, std::ptrdiff_t stride, const DeltaToken& token, const float* next_k,
                          const Floats (&change)[kBlockVectors], Floats (&out)[kBlockVectors],
                          Floats (&next)[kBlockVectors], std::ptrdiff_t dim) {
  for (int v = 0; v < kBlockVectors; ++v) out[v] = next[v] = Floats{};
  for (std::ptrdiff_t i = 0; i < dim; ++i) {
    const float k = token.k[i], q = token.q[i], later = HasNext ? next_k[i] : 0.0f;
    for (int v = 0; v < kBlockVectors; ++v) {
      float* at = state + i * stride + v * kLanes;
      const Floats value = load(at) * token.decay + change[v] * k;
      store(at, value);
      out[v] += value * q;
      if (HasNext) next[v] += value * later;
    }
  }
}

// A single token's state is computed with where it lies; those of several are brought near first.
template <class T>
static void delta_piece(const DeltaRule& op, const Piece& piece, std::ptrdiff_t head, std::ptrdiff_t first, float* near,
                        float* scratch) {
  const std::ptrdiff_t dim = op.key_dim, padded = whole_lanes(dim), width = std::min(kColumns, op.value_dim - first);
  const std::ptrdiff_t place = head * dim * op.value_dim + first;
  const float* before = state_before<float>(piece, op.pieces);
  float* behind = state_behind<float>(piece, op.pieces) + place;
  const bool stays = before && before + place == behind && piece.end - piece.begin == 1 && width == kColumns;
  float* state = stays ? behind : near;
  const std::ptrdiff_t stride = stays ? op.value_dim : kColumns;
  for (std::ptrdiff_t i = 0; !stays && i < dim; ++i) {
    if (before) widen(state + i * kColumns, before + place + i * op.value_dim, width);
    else std::fill_n(state + i * kColumns, kColumns, 0.0f);
  }
  DeltaToken token{scratch, scratch + padded, 0, 0}, later{scratch + 2 * padded, scratch + 3 * padded, 0, 0};
  alignas(64) float values[kColumns] = {};
  Floats sums[kBlockVectors], change[kBlockVectors], out[kBlockVectors];
  read_token<T>(op, head, piece.begin, token);
  product(sums, state, stride, token.k, dim);
  for (std::ptrdiff_t t = piece.begin; t < piece.end; ++t) {
    widen(values, static_cast<const T*>(op.v) + t * op.stride_v + head * op.value_dim + first, width);
    for (int v = 0; v < kBlockVectors; ++v)
      change[v] = (load(values + v * kLanes) - sums[v] * token.decay) * token.beta;
    if (t + 1 < piece.end) {
      read_token<T>(op, head, t + 1, later);
      update<true>(state, stride, token, later.k, change, out, sums, dim);
    } else {
      update<false>(state, stride, token, nullptr, change, out, sums, dim);
    }
    for (int v = 0; v < kBlockVectors; ++v) store(values + v * kLanes, out[v]);
    narrow(static_cast<T*>(op.y) + (t * op.value_heads + head) * op.value_dim + first, values, width);
    std::swap(token, later);
  }
  for (std::ptrdiff_t i = 0; !stays && i < dim; ++i) narrow(behind + i * op.value_dim, state + i * kColumns, width);
}

// Piece by piece, so that memory is read from one end to the other.
template <class T>
static void delta_units(const DeltaRule& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  const std::ptrdiff_t blocks = (op.value_dim + kColumns - 1) / kColumns, padded = whole_lanes(op.key_dim);
  std::vector<float> memory(static_cast<std::size_t>(op.key_dim * kColumns + 4 * padded));
  float *near = memory.data(), *scratch = near + op.key_dim * kColumns;
  for (std::ptrdiff_t i = 0; i < op.pieces.count; ++i)
    for (std::ptrdiff_t unit = begin; unit < end; ++unit)
      delta_piece<T>(op, op.pieces.rows[i], unit / blocks, unit % blocks * kColumns, near, scratch);
}

// -- Mamba-2's scan

template <class T>
static float time_step(const Scan& op, const Piece& piece, std::ptrdiff_t head, std::ptrdiff_t t) {
  float step = to_float(static_cast<const T*>(op.dt)[t * op.stride_dt + head]);
  if (op.dt_bias) step = rounded<T>(step + op.dt_bias[head]);
  if (op.softplus) step = rounded<T>(step > 20.0f ? step : std::log1p(std::exp(step)));
  return piece.is_bounded ? std::min(std::max(step, op.least), op.most) : step;
}

// The sum of all lanes, by halves: those of several rows are added at the same time.
static inline float total_of(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  return sum_of(v);
#endif
}

constexpr int kScanRows = 4;  // that share what they read of b and c

template <int Rows, class T>
static inline void scan_rows(float* state, const T* x, float* y, const float* b, const float* c, std::ptrdiff_t padded,
                             float step, float decay, float skip) {
  float value[Rows], added[Rows];
  Floats sums[Rows];
  for (int r = 0; r < Rows; ++r) {
    value[r] = to_float(x[r]), added[r] = value[r] * step, sums[r] = Floats{};
  }
  for (std::ptrdiff_t n = 0; n < padded; n += kLanes) {
    const Floats before = load(b + n), after = load(c + n);
    for (int r = 0; r < Rows; ++r) {
      const Floats now = load(state + r * padded + n) * decay + before * added[r];
      store(state + r * padded + n, now);
      sums[r] += now * after;
    }
  }
  for (int r = 0; r < Rows; ++r) y[r] = total_of(sums[r]) + value[r] * skip;
}

// As delta_piece: whole rows of a single token's state are computed with where they lie.
template <class T>
static void scan_piece(const Scan& op, const Piece& piece, std::ptrdiff_t head, std::ptrdiff_t first, float* near,
                       float* scratch) {
  const std::ptrdiff_t size = op.state_size, padded = whole_lanes(size), rows = std::min(kRows, op.head_dim - first);
  const std::ptrdiff_t place = (head * op.head_dim + first) * size, group = head / (op.heads / op.groups);
  const float* before = state_before<float>(piece, op.pieces);
  float* behind = state_behind<float>(piece, op.pieces) + place;
  const bool stays = before && before + place == behind && piece.end - piece.begin == 1 && padded == size;
  float* state = stays ? behind : near;
  for (std::ptrdiff_t p = 0; !stays && p < rows; ++p) {
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
    std::ptrdiff_t p = 0;
    for (; p + kScanRows <= rows; p += kScanRows)
      scan_rows<kScanRows>(state + p * padded, x + p, y + p, b, c, padded, step, decay, skip);
    for (; p < rows; ++p) scan_rows<1>(state + p * padded, x + p, y + p, b, c, padded, step, decay, skip);
  }
  for (std::ptrdiff_t p = 0; !stays && p < rows; ++p) narrow(behind + p * size, state + p * padded, size);
}

template <class T>
static void scan_units(const Scan& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  const std::ptrdiff_t blocks = (op.head_dim + kRows - 1) / kRows, padded = whole_lanes(op.state_size);
  std::vector<float> memory(static_cast<std::size_t>((kRows + 2) * padded));
  float *near = memory.data(), *scratch = near + kRows * padded;
  for (std::ptrdiff_t i = 0; i < op.pieces.count; ++i)
    for (std::ptrdiff_t unit = begin; unit < end; ++unit)
      scan_piece<T>(op, op.pieces.rows[i], unit / blocks, unit % blocks * kRows, near, scratch);
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
