// Vectors of floats in the width of the instruction set that this translation unit is compiled for. Everything is
// static: two translation units with different flags must never share an inline function.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr std::ptrdiff_t kLanes = 16;
#elif defined(__AVX2__)
constexpr std::ptrdiff_t kLanes = 8;
#else
constexpr std::ptrdiff_t kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(kLanes * 2)));

struct Bf16 { std::uint16_t bits; };
struct Fp16 { std::uint16_t bits; };

static inline Floats splat(float value) { return Floats{} + value; }

static inline Floats as_floats(Words bits) { return (Floats)bits; }
static inline Words as_words(Floats values) { return (Words)values; }

static inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline Floats load(const Bf16* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
  return as_floats(__builtin_convertvector(h, Words) << 16);
}

static inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

// Round to nearest even; a NaN stays one.
static inline Words bf16_bits(Floats v) {
  Words u = as_words(v);
  Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  Words nan = (Words)(v != v);
  return (rounded & ~nan) | (nan & 0x7fc0u);
}

static inline void store(Bf16* p, Floats v) {
  Halves h = __builtin_convertvector(bf16_bits(v), Halves);
  std::memcpy(p, &h, sizeof h);
}

static inline float to_float(float v) { return v; }
static inline float to_float(Bf16 v) {
  std::uint32_t u = std::uint32_t{v.bits} << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

static inline void put(float* p, float v) { *p = v; }
static inline void put(Bf16* p, float v) {
  std::uint32_t u;
  std::memcpy(&u, &v, 4);
  p->bits = v != v ? 0x7fc0 : static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#if defined(__AVX512F__)
static inline Floats load(const Fp16* p) {
  return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
static inline void store(Fp16* p, Floats v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__)
static inline Floats load(const Fp16* p) {
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
static inline void store(Fp16* p, Floats v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
}
#else
static inline Floats load(const Fp16* p) {
  _Float16 h[kLanes];
  Floats v;
  std::memcpy(h, p, sizeof h);
  for (std::ptrdiff_t i = 0; i < kLanes; ++i) v[i] = static_cast<float>(h[i]);
  return v;
}
static inline void store(Fp16* p, Floats v) {
  _Float16 h[kLanes];
  for (std::ptrdiff_t i = 0; i < kLanes; ++i) h[i] = static_cast<_Float16>(v[i]);
  std::memcpy(p, h, sizeof h);
}
#endif

static inline float to_float(Fp16 v) {
  Fp16 many[kLanes] = {v};
  return load(many)[0];
}
static inline void put(Fp16* p, float v) {
  Fp16 many[kLanes];
  store(many, splat(v));
  *p = many[0];
}

static inline float sum_of(Floats v) {
  float total = 0;
  for (std::ptrdiff_t i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

static inline float round_to(float v, const float*) { return v; }
static inline Floats round_to(Floats v, const float*) { return v; }
static inline Floats round_to(Floats v, const Bf16*) { return as_floats(bf16_bits(v) << 16); }
static inline Floats round_to(Floats v, const Fp16*) {
  Fp16 many[kLanes];
  store(many, v);
  return load(many);
}

// exp to about 1 ulp: 2^n * p(r), r in [-ln2/2, ln2/2] (Cephes' expf polynomial).
static inline Floats exp_of(Floats x) {
  const Floats high = splat(88.3f), low = splat(-87.3f);
  x = x > high ? high : x;
  x = x < low ? low : x;
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats n = (x * 1.44269504088896341f + magic) - magic;
  Floats r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return p * (Floats)exponent;
}

}  // namespace
