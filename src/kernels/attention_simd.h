// Vectors for the attention kernels, in GCC's vector extensions: one source for every instruction set.
//
// Included only by sources that are compiled once per instruction set; everything is local to each of them.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace memserve::MEMSERVE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kBlockRows = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kLanes = 8, kBlockRows = 6;  // 12 accumulators of 16 registers
#else
constexpr int kLanes = 4, kBlockRows = 6;
#endif
constexpr int kBlockColumns = 2 * kLanes;

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef float VecFLoose __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline VecF load(const float* p) { return *reinterpret_cast<const VecFLoose*>(p); }
inline void store(float* p, VecF v) { *reinterpret_cast<VecFLoose*>(p) = v; }
inline VecF splat(float x) { return VecF{} + x; }
inline VecF larger(VecF a, VecF b) { return a > b ? a : b; }

inline VecI lane_numbers() {
  VecI v{};
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

inline float largest_lane(VecF v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

inline float sum_of_lanes(VecF v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float sum = v[0];
  for (int i = 1; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

// 2^f for f in [-1/2, 1/2]. Relative error: 8e-5 (Fast, for weights that bfloat16 rounds anyway), 2e-7 (Cephes exp2f).
template <bool Fast>
inline VecF exp2_fraction(VecF f) {
  if constexpr (Fast) {
    const VecF p = f * 5.5171664924e-02f + 2.4261112188e-01f;
    return (p * f + 6.9326098622e-01f) * f + 9.9992807358e-01f;
  }
  VecF p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  return p * f + 1.0f;
}

// 2^x for x <= 64; exactly 0 for x < -126, minus infinity included.
template <bool Fast>
inline VecF exp2(VecF x) {
#if defined(__AVX512F__)
  const VecF clamped = _mm512_max_ps(x, _mm512_set1_ps(-1000.0f));
  const VecF whole = _mm512_roundscale_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(exp2_fraction<Fast>(clamped - whole), whole);
#else
  const VecF floor = splat(-126.0f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VecF clamped = larger(x, floor);
  const VecF shifted = clamped + magic;
  const VecF power = exp2_fraction<Fast>(clamped - (shifted - magic));
  const VecF scaled = (VecF)((VecI)power + ((VecI)shifted << 23));
  return x < floor ? VecF{} : scaled;
#endif
}

// tanh: a polynomial near 0 (Cephes tanhf), (1 - e^-2|x|) / (1 + e^-2|x|) elsewhere.
inline VecF tanh(VecF x) {
  const VecF a = x < 0.0f ? -x : x;
  const VecF z = x * x;
  VecF p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const VecF e = exp2<false>(a * -2.885390081777927f);
  const VecF far = (1.0f - e) / (1.0f + e);
  return a < 0.625f ? x + x * z * p : (x < 0.0f ? -far : far);
}

// ---- element types ----

inline void widen(const float* from, float* to, int n) { std::memcpy(to, from, size_t(n) * sizeof(float)); }

inline void widen(const BFloat16* from, float* to, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = uint32_t(from[i].bits) << 16;
    std::memcpy(to + i, &bits, 4);
  }
}

// n is a multiple of 8.
inline void widen(const Float16* from, float* to, int n) {
#if defined(__F16C__)
  for (int i = 0; i < n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#else
  for (int i = 0; i < n; ++i) {
    const uint32_t h = from[i].bits, magnitude = (h & 0x7fff) << 13;
    float scaled;
    std::memcpy(&scaled, &magnitude, 4);
    scaled *= 0x1p112f;  // the exponent's bias goes from 15 to 127; correct for subnormals too
    uint32_t bits;
    std::memcpy(&bits, &scaled, 4);
    if (magnitude >= 0x0f800000) bits |= 0x7f800000;  // infinity and NaN
    bits |= (h & 0x8000) << 16;
    std::memcpy(to + i, &bits, 4);
  }
#endif
}

inline void narrow(const float* from, float* to, int n) { std::memcpy(to, from, size_t(n) * sizeof(float)); }

// Round to nearest, ties to even; NaN stays NaN.
inline void narrow(const float* from, BFloat16* to, int n) {
  for (int i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to[i].bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
}

inline uint16_t half_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 65,520 or more
  if (bits < 0x38800000) {                                 // subnormal: the addition rounds at 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  return uint16_t(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
}

inline void narrow(const float* from, Float16* to, int n) {
#if defined(__F16C__)
  for (int i = 0; i < n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#else
  for (int i = 0; i < n; ++i) to[i].bits = half_bits(from[i]);
#endif
}

}  // namespace
}  // namespace memserve::MEMSERVE_ISA
