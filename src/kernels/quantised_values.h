// Integers of packed weights in vectors: unpacking, scales, the dot product of bytes. See quantised.h for the layout.
//
// A vector holds kLanes outputs x 4 inputs, a byte each: a line of 64 bytes (16 outputs) or a part of one. How n bits a
// value lie in the n lines of 16 outputs x 32 inputs (8 steps of 4 inputs), byte for byte:
//
//   8 bits   line s: step s
//   4        line s / 2: step s in the low half of the byte for even s, in the high half for odd s
//   5, 6     4 bits as above, then the fifth bit of step s in bit s of line 4; or two bits in lines 4 and 5, as of 2
//   2        line s / 4: step s in bits 2 (s % 4) and the next
//   3        2 bits as above, then the third bit of step s in bit s of line 2
#pragma once
#include "fused_vector.h"
#include "quantised.h"

namespace {
namespace q = memserve::quantised;
using q::Layout;

typedef std::int8_t Small __attribute__((vector_size(kLanes)));
typedef std::uint8_t SmallUnsigned __attribute__((vector_size(kLanes)));

static inline Words load_words(const void* p) {
  Words v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

constexpr std::uint32_t in_each_byte(std::uint32_t bits) { return bits * 0x01010101u; }

// `bits` bits of each byte from bit `from` on, moved to bit `to`.
template <int kFrom, int kTo, int kBits>
static inline Words bits_moved(Words line) {
  constexpr std::uint32_t mask = in_each_byte(((1u << kBits) - 1) << kTo);
  if constexpr (kFrom > kTo) return (line >> (kFrom - kTo)) & mask;
  else if constexpr (kFrom < kTo) return (line << (kTo - kFrom)) & mask;
  else return line & mask;
}

template <q::Table kTable>
constexpr const std::uint8_t* kLookup = kTable == q::Table::nonlinear ? q::kNonlinear : q::kFloat4;

template <q::Table kTable>
static inline Words looked_up(Words indices) {
#if defined(__AVX512F__)
  const __m512i table =
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kLookup<kTable>)));
  return (Words)_mm512_shuffle_epi8(table, (__m512i)indices);
#elif defined(__AVX2__)
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kLookup<kTable>)));
  return (Words)_mm256_shuffle_epi8(table, (__m256i)indices);
#else
  std::uint8_t bytes[sizeof(Words)];
  std::memcpy(bytes, &indices, sizeof bytes);
  for (auto& byte : bytes) byte = kLookup<kTable>[byte];
  return load_words(bytes);
#endif
}

// Step `kStep` of the outputs whose first line begins at `lines`.
template <q::Format kFormat, int kStep>
static inline Words values_of(const std::uint8_t* lines) {
  constexpr Layout of = q::layout_of(kFormat);
  const auto line = [&](int i) { return load_words(lines + i * q::kLine); };
  if constexpr (of.bits == 8) {
    return line(kStep);
  } else if constexpr (of.bits < 4) {
    const Words low = bits_moved<kStep % 4 * 2, 0, 2>(line(kStep / 4));
    if constexpr (of.bits == 2) return low;
    else return low | bits_moved<kStep, 2, 1>(line(2));
  } else {
    const Words low = bits_moved<kStep % 2 * 4, 0, 4>(line(kStep / 2));
    if constexpr (of.table != q::Table::none) return looked_up<of.table>(low);
    else if constexpr (of.bits == 5) return low | bits_moved<kStep, 4, 1>(line(4));
    else if constexpr (of.bits == 6) return low | bits_moved<kStep % 4 * 2, 4, 2>(line(4 + kStep / 4));
    else return low;
  }
}

// Whether values are so large that sums of two products with int8 overflow 16 bits.
constexpr bool is_wide(const Layout& of) { return of.bits == 8 || of.table == q::Table::nonlinear; }

// sums += weights (without a sign) . four activations, for each lane.
template <bool kWide>
static inline Ints dot(Ints sums, Words weights, std::int32_t activations) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(activations));
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(activations));
#elif defined(__AVX512F__)
  const __m512i x = _mm512_set1_epi32(activations), w = (__m512i)weights;
  if constexpr (kWide) {
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
    return sums + (Ints)even + (Ints)odd;
  }
  return sums + (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i x = _mm256_set1_epi32(activations), w = (__m256i)weights;
  if constexpr (kWide) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return sums + (Ints)even + (Ints)odd;
  }
  return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
#else
  const auto x = static_cast<std::uint32_t>(activations);
  for (int i = 0; i < 4; ++i)
    sums += (Ints)((weights >> (8 * i)) & 255u) * static_cast<std::int8_t>(x >> (8 * i));
  return sums;
#endif
}

// Of numbers of 8 bits (e4m3), in the low byte of each lane: as float16 they are 2^-8 of themselves, small ones too.
static inline Floats floats_of_float8(Words v) {
  const Halves bits = __builtin_convertvector((v & 0x80u) << 8 | (v & 0x7fu) << 7, Halves);
  Fp16 halves[kLanes];
  std::memcpy(halves, &bits, sizeof bits);
  return load(halves) * 256.0f;
}

static inline Floats floats_of(Ints v) { return __builtin_convertvector(v, Floats); }

static inline Floats load_small(const std::int8_t* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return v;
#endif
}

// The scales of a block of one strip, which begins at `at`; `output`: one of the strip's, a multiple of kLanes.
template <q::Format kFormat>
struct Header {
  static constexpr Layout of = q::layout_of(kFormat);
  const std::uint8_t* at;

  // Of part `part` of group `group`.
  Floats scale(std::ptrdiff_t group, int part, std::ptrdiff_t output) const {
    if constexpr (of.scale == q::Scale::bfloat) return load(reinterpret_cast<const Bf16*>(at) + output);
    if constexpr (of.scale == q::Scale::single) return load(reinterpret_cast<const float*>(at) + output);
    const Floats number = load(reinterpret_cast<const Fp16*>(at) + output);
    if constexpr (of.scale == q::Scale::levels) return number * load_small(level(0, group, part) + output);
    return number;
  }

  // `scale`: what the function above gives for the same outputs.
  Floats minimum(std::ptrdiff_t group, int part, std::ptrdiff_t output, Floats scale) const {
    const Floats number = load(reinterpret_cast<const Fp16*>(at) + q::kStrip + output);
    if constexpr (of.minimum == q::Minimum::levels) return number * load_small(level(1, group, part) + output);
    else if constexpr (of.minimum == q::Minimum::zero) return number * scale;
    else return number;
  }

  const std::int8_t* level(int which, std::ptrdiff_t group, int part) const {
    const std::uint8_t* levels = at + q::number_bytes(of) + which * q::level_bytes(of);
    return reinterpret_cast<const std::int8_t*>(levels) + (group * of.parts + part) * q::kStrip;
  }

  // The lines of kLanes outputs of a group, from `output` on.
  const std::uint8_t* lines(std::ptrdiff_t group, std::ptrdiff_t output) const {
    const std::uint8_t* values = at + q::header_bytes(of) + group * 2 * q::half_bytes(of);
    return values + output / q::kHalfStrip * q::half_bytes(of) + output % q::kHalfStrip * 4;
  }
};

constexpr std::ptrdiff_t kAheadBytes = 3072;

// Fetches weights that are needed soon, some lines at a time: processors do not foresee the order in which a strip is
// read. It may fetch a little beyond the weights, which cannot fault.
struct Ahead {
  const std::uint8_t* at;

  void fetch_into_first(std::ptrdiff_t lines) {
    for (; lines > 0; --lines, at += q::kLine) __builtin_prefetch(at, 0, 3);
  }
  void fetch_into_second(std::ptrdiff_t lines) {
    for (; lines > 0; --lines, at += q::kLine) __builtin_prefetch(at, 0, 2);
  }
};

// Calls body with std::integral_constant-like steps [0, 8), unrolled.
template <int kStep>
struct Step {
  static constexpr int value = kStep;
};
template <int kBegin, int kEnd, class Body>
static inline __attribute__((always_inline)) void each_step(Body body) {
  if constexpr (kBegin < kEnd) {
    body(Step<kBegin>{});
    each_step<kBegin + 1, kEnd>(body);
  }
}

// Calls body with the format as a type.
template <q::Format kFormat>
struct Named {
  static constexpr q::Format value = kFormat;
};
template <int kIndex = 0, class Body>
static inline void with_format(q::Format format, Body body) {
  if constexpr (kIndex < q::kFormats) {
    if (format == q::Format(kIndex)) return body(Named<q::Format(kIndex)>{});
    with_format<kIndex + 1>(format, body);
  }
}

}  // namespace
