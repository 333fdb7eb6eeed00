#include "transfer/seal_sums.h"

#include <cstring>

#include "isa_paths.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memserve {

namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio: its multiples have well-spread upper halves

// Bits without a pattern: a counter through a bijective mixer.
constexpr uint64_t scatter(uint64_t x) {
  x *= kGolden;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

alignas(64) constexpr uint64_t kKeys[8] = {scatter(1), scatter(2), scatter(3), scatter(4),
                                           scatter(5), scatter(6), scatter(7), scatter(8)};

template <bool kCopy>
void add_portable(const uint8_t* src, uint8_t* dst, uint64_t first, size_t stripes, SealSums& sums) {
  for (size_t s = 0; s < stripes; ++s, src += kStripeBytes) {
    uint64_t words[8];
    std::memcpy(words, src, sizeof words);
    if constexpr (kCopy) std::memcpy(dst + s * kStripeBytes, words, sizeof words);
    for (int l = 0; l < 8; ++l) {
      const uint64_t x = words[l] ^ (kKeys[l] + (first + s) * kGolden);
      sums.lane[l] += (x & 0xffffffff) * (x >> 32) + words[l ^ 1];
    }
  }
}

#if defined(__x86_64__)
template <bool kCopy>
__attribute__((target("avx2"))) void add_avx2(const uint8_t* src, uint8_t* dst, uint64_t first, size_t stripes,
                                              SealSums& sums) {
  const __m256i step = _mm256_set1_epi64x(static_cast<long long>(kGolden));
  const __m256i start = _mm256_set1_epi64x(static_cast<long long>(first * kGolden));
  __m256i key[2], sum[2];
  for (int h = 0; h < 2; ++h) {
    key[h] = _mm256_add_epi64(start, _mm256_load_si256(reinterpret_cast<const __m256i*>(kKeys) + h));
    sum[h] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums.lane) + h);
  }
  for (size_t s = 0; s < stripes; ++s) {
    for (int h = 0; h < 2; ++h) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + s * kStripeBytes) + h);
      if constexpr (kCopy) _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + s * kStripeBytes) + h, words);
      const __m256i x = _mm256_xor_si256(words, key[h]);
      const __m256i product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
      const __m256i neighbour = _mm256_shuffle_epi32(words, 0x4e);
      sum[h] = _mm256_add_epi64(sum[h], _mm256_add_epi64(product, neighbour));
      key[h] = _mm256_add_epi64(key[h], step);
    }
  }
  for (int h = 0; h < 2; ++h) _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums.lane) + h, sum[h]);
}

template <bool kCopy>
__attribute__((target("avx512f"))) void add_avx512(const uint8_t* src, uint8_t* dst, uint64_t first, size_t stripes,
                                                   SealSums& sums) {
  const __m512i step = _mm512_set1_epi64(static_cast<long long>(kGolden));
  __m512i key = _mm512_add_epi64(_mm512_load_si512(kKeys), _mm512_set1_epi64(static_cast<long long>(first * kGolden)));
  __m512i sum = _mm512_loadu_si512(sums.lane);
  for (size_t s = 0; s < stripes; ++s) {
    const __m512i words = _mm512_loadu_si512(src + s * kStripeBytes);
    if constexpr (kCopy) _mm512_storeu_si512(dst + s * kStripeBytes, words);
    const __m512i x = _mm512_xor_si512(words, key);
    const __m512i product = _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32));
    const __m512i neighbour = _mm512_shuffle_epi32(words, _MM_PERM_BADC);
    sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, neighbour));
    key = _mm512_add_epi64(key, step);
  }
  _mm512_storeu_si512(sums.lane, sum);
}
#endif

using Add = void (*)(const uint8_t* src, uint8_t* dst, uint64_t first, size_t stripes, SealSums& sums);

// The implementation for one instruction set.
struct Path {
  const char* name;
  Add add, add_and_copy;
};

std::vector<Path> supported() {
  std::vector<Path> paths{{"portable", add_portable<false>, add_portable<true>}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) paths.push_back({"avx2", add_avx2<false>, add_avx2<true>});
  if (__builtin_cpu_supports("avx512f")) paths.push_back({"avx512", add_avx512<false>, add_avx512<true>});
#endif
  return paths;
}

IsaPaths<Path>& paths() {
  static IsaPaths<Path> all(supported());
  return all;
}

}  // namespace

std::vector<std::string> seal_isas() { return paths().names(); }

bool force_seal_isa(const std::string& name) { return paths().force(name); }

SealSums seal_sums(const uint8_t* src, uint8_t* dst, size_t offset, size_t bytes) {
  const Path& path = paths().in_use();
  SealSums sums;
  const uint64_t first = offset / kStripeBytes;
  const size_t stripes = bytes / kStripeBytes, rest = bytes % kStripeBytes;
  (dst ? path.add_and_copy : path.add)(src, dst, first, stripes, sums);
  if (rest > 0) {
    uint8_t last[kStripeBytes] = {};
    std::memcpy(last, src + stripes * kStripeBytes, rest);
    if (dst) std::memcpy(dst + stripes * kStripeBytes, last, rest);
    add_portable<false>(last, nullptr, first + stripes, 1, sums);
  }
  return sums;
}

uint64_t SealSums::finish(size_t range_bytes) const {
  uint64_t seal = scatter(range_bytes);
  for (const uint64_t sum : lane) seal = scatter(seal ^ sum);  // each step is bijective: one changed lane always shows
  return seal;
}

}  // namespace memserve
