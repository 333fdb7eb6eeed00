#include "codec/tiers.h"

#include <bit>
#include <cstring>

#include "isa_paths.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memserve::codec {

namespace {

uint64_t load64(const uint8_t* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

void store64(uint8_t* to, uint64_t word) { std::memcpy(to, &word, sizeof word); }

uint64_t first_bits(size_t count) { return count >= kGroup ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

// -- every processor

// The code of each exponent.
struct Codes {
  uint8_t of[256];
  Codes(const uint8_t* table, int width) {
    const int escape = (1 << width) - 1;
    std::memset(of, escape, sizeof of);
    for (int code = 0; code < escape; ++code) of[table[code]] = static_cast<uint8_t>(code);
  }
};

size_t pack_group(const uint8_t* exponents, size_t count, const Codes& codes, int width, uint8_t* planes,
                  uint8_t* escapes) {
  const uint8_t escape = static_cast<uint8_t>((1 << width) - 1);
  uint64_t bits[kWidthMax] = {};
  size_t escaped = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint8_t code = codes.of[exponents[i]];
    for (int plane = 0; plane < width; ++plane) bits[plane] |= uint64_t{code} >> plane << 63 >> (63 - i);
    escapes[escaped] = exponents[i];
    escaped += code == escape;
  }
  for (int plane = 0; plane < width; ++plane) store64(planes + 8 * plane, bits[plane]);
  return escaped;
}

size_t pack_portable(const uint8_t* exponents, size_t count, const uint8_t* table, int width, uint8_t* planes,
                     uint8_t* escapes) {
  const Codes codes(table, width);
  size_t escaped = 0;
  for (size_t from = 0; from < count; from += kGroup, planes += 8 * width) {
    escaped += pack_group(exponents + from, std::min(kGroup, count - from), codes, width, planes, escapes + escaped);
  }
  return escaped;
}

size_t unpack_group(const uint8_t* planes, size_t count, const uint8_t* table, int width, const uint8_t* escapes,
                    uint8_t* exponents) {
  const unsigned escape = (1u << width) - 1;
  uint64_t bits[kWidthMax] = {};
  for (int plane = 0; plane < width; ++plane) bits[plane] = load64(planes + 8 * plane);
  size_t escaped = 0;
  for (size_t i = 0; i < count; ++i) {
    unsigned code = 0;
    for (int plane = 0; plane < width; ++plane) code |= static_cast<unsigned>(bits[plane] >> i & 1) << plane;
    exponents[i] = code == escape ? escapes[escaped] : table[code];
    escaped += code == escape;
  }
  return escaped;
}

size_t unpack_portable(const uint8_t* planes, size_t count, const uint8_t* table, int width, const uint8_t* escapes,
                       uint8_t* exponents) {
  size_t escaped = 0;
  for (size_t from = 0; from < count; from += kGroup, planes += 8 * width) {
    escaped += unpack_group(planes, std::min(kGroup, count - from), table, width, escapes + escaped, exponents + from);
  }
  return escaped;
}

uint16_t load16(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

size_t split_portable(const uint8_t* src, size_t count, const uint8_t* table, int width, uint8_t* low, uint8_t* planes,
                      uint8_t* escapes) {
  uint8_t exponents[kScratchBytes];
  for (size_t i = 0; i < count; ++i) {
    const uint16_t bits = load16(src + 2 * i);
    low[i] = static_cast<uint8_t>((bits >> 8 & 0x80) | (bits & 0x7f));
    exponents[i] = static_cast<uint8_t>(bits >> 7);
  }
  return pack_portable(exponents, count, table, width, planes, escapes);
}

size_t join_portable(const uint8_t* low, const uint8_t* planes, size_t count, const uint8_t* table, int width,
                     const uint8_t* escapes, uint8_t* out) {
  uint8_t exponents[kScratchBytes];
  const size_t escaped = unpack_portable(planes, count, table, width, escapes, exponents);
  for (size_t i = 0; i < count; ++i) {
    const auto bits = static_cast<uint16_t>((low[i] & 0x80) << 8 | exponents[i] << 7 | (low[i] & 0x7f));
    std::memcpy(out + 2 * i, &bits, sizeof bits);
  }
  return escaped;
}

// Of a float16 the two highest bits of the mantissa, and the sign.
constexpr int kHighBits[3] = {8, 9, 15};

size_t split_half_portable(const uint8_t* src, size_t count, const uint8_t* table, int width, uint8_t* low,
                           uint8_t* high, uint8_t* planes, uint8_t* escapes) {
  uint8_t exponents[kScratchBytes];
  for (size_t from = 0; from < count; from += kGroup, high += 24) {
    uint64_t bits_high[3] = {};
    for (size_t i = from; i < std::min(count, from + kGroup); ++i) {
      const uint16_t bits = load16(src + 2 * i);
      low[i] = static_cast<uint8_t>(bits);
      exponents[i] = bits >> 10 & 0x1f;
      for (int plane = 0; plane < 3; ++plane) {
        bits_high[plane] |= uint64_t{bits} >> kHighBits[plane] << 63 >> (63 - (i - from));
      }
    }
    for (int plane = 0; plane < 3; ++plane) store64(high + 8 * plane, bits_high[plane]);
  }
  return pack_portable(exponents, count, table, width, planes, escapes);
}

size_t join_half_portable(const uint8_t* low, const uint8_t* high, const uint8_t* planes, size_t count,
                          const uint8_t* table, int width, const uint8_t* escapes, uint8_t* out) {
  uint8_t exponents[kScratchBytes];
  const size_t escaped = unpack_portable(planes, count, table, width, escapes, exponents);
  for (size_t i = 0; i < count; ++i) {
    auto bits = static_cast<uint16_t>(low[i] | (exponents[i] & 0x1f) << 10);
    for (int plane = 0; plane < 3; ++plane) {
      const uint64_t word = load64(high + i / kGroup * 24 + 8 * plane);
      bits |= static_cast<uint16_t>((word >> i % kGroup & 1) << kHighBits[plane]);
    }
    std::memcpy(out + 2 * i, &bits, sizeof bits);
  }
  return escaped;
}

#if defined(__x86_64__)

// -- AVX2

#define MEMSERVE_AVX2 __attribute__((target("avx2,popcnt,bmi,bmi2")))

// The planes of 64 exponents; returns the mask of those in no table.
MEMSERVE_AVX2 inline uint64_t pack64_avx2(__m256i first, __m256i second, const uint8_t* table, int width,
                                          uint64_t valid, uint8_t* planes) {
  const int escape = (1 << width) - 1;
  const __m256i none = _mm256_set1_epi8(static_cast<char>(escape));
  __m256i codes[2] = {none, none};  // a code differs from `escape` in the bits that are xored
  for (int code = 0; code < escape; ++code) {
    const __m256i exponent = _mm256_set1_epi8(static_cast<char>(table[code]));
    const __m256i differs = _mm256_set1_epi8(static_cast<char>(escape ^ code));
    codes[0] = _mm256_xor_si256(codes[0], _mm256_and_si256(_mm256_cmpeq_epi8(first, exponent), differs));
    codes[1] = _mm256_xor_si256(codes[1], _mm256_and_si256(_mm256_cmpeq_epi8(second, exponent), differs));
  }
  uint64_t escaped = valid;
  for (int plane = 0; plane < width; ++plane) {
    const __m128i shift = _mm_cvtsi32_si128(7 - plane);
    const auto low = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_sll_epi16(codes[0], shift)));
    const auto high = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_sll_epi16(codes[1], shift)));
    const uint64_t bits = (uint64_t{high} << 32 | low) & valid;
    store64(planes + 8 * plane, bits);
    escaped &= bits;
  }
  return escaped;
}

MEMSERVE_AVX2 inline uint8_t* append_avx2(const uint8_t* exponents, uint64_t escaped, uint8_t* to) {
  for (; escaped; escaped &= escaped - 1) *to++ = exponents[std::countr_zero(escaped)];
  return to;
}

MEMSERVE_AVX2 size_t pack_avx2(const uint8_t* exponents, size_t count, const uint8_t* table, int width, uint8_t* planes,
                               uint8_t* escapes) {
  uint8_t* to = escapes;
  for (size_t from = 0; from < count; from += kGroup, planes += 8 * width) {
    const auto* const at = reinterpret_cast<const __m256i*>(exponents + from);
    const uint64_t valid = first_bits(count - from);
    const uint64_t escaped =
        pack64_avx2(_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1), table, width, valid, planes);
    to = append_avx2(exponents + from, escaped, to);
  }
  return static_cast<size_t>(to - escapes);
}

// A byte of ones for each bit that is set.
MEMSERVE_AVX2 inline __m256i bytes_of_bits(uint32_t bits) {
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3,
                                          3, 3, 3, 3, 3, 3);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  const __m256i all = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), spread);
  return _mm256_cmpeq_epi8(_mm256_and_si256(all, bit), bit);
}

// 64 exponents to `to`; returns how many came from `escapes`.
MEMSERVE_AVX2 inline size_t unpack64_avx2(const uint8_t* planes, uint64_t valid, __m256i table, int width,
                                          const uint8_t* escapes, uint8_t* to) {
  __m256i codes[2] = {};
  uint64_t escaped = valid;
  for (int plane = 0; plane < width; ++plane) {
    const uint64_t bits = load64(planes + 8 * plane);
    const __m256i value = _mm256_set1_epi8(static_cast<char>(1 << plane));
    codes[0] = _mm256_or_si256(codes[0], _mm256_and_si256(bytes_of_bits(static_cast<uint32_t>(bits)), value));
    codes[1] = _mm256_or_si256(codes[1], _mm256_and_si256(bytes_of_bits(static_cast<uint32_t>(bits >> 32)), value));
    escaped &= bits;
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(table, codes[0]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, _mm256_shuffle_epi8(table, codes[1]));
  const auto count = static_cast<size_t>(std::popcount(escaped));
  for (; escaped; escaped &= escaped - 1) to[std::countr_zero(escaped)] = *escapes++;
  return count;
}

MEMSERVE_AVX2 inline __m256i table_avx2(const uint8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(table)));
}

MEMSERVE_AVX2 size_t unpack_avx2(const uint8_t* planes, size_t count, const uint8_t* table, int width,
                                 const uint8_t* escapes, uint8_t* exponents) {
  const __m256i all = table_avx2(table);
  size_t escaped = 0;
  for (size_t from = 0; from < count; from += kGroup, planes += 8 * width) {
    escaped += unpack64_avx2(planes, first_bits(count - from), all, width, escapes + escaped, exponents + from);
  }
  return escaped;
}

// The low bytes of 32 words, and their high ones.
MEMSERVE_AVX2 inline void halves_avx2(const uint8_t* src, __m256i& low, __m256i& high) {
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
  const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src) + 1);
  const __m256i mask = _mm256_set1_epi16(0xff);
  low = _mm256_packus_epi16(_mm256_and_si256(first, mask), _mm256_and_si256(second, mask));
  high = _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
  low = _mm256_permute4x64_epi64(low, 0xd8);
  high = _mm256_permute4x64_epi64(high, 0xd8);
}

// 32 words of their halves.
MEMSERVE_AVX2 inline void store_halves_avx2(__m256i low, __m256i high, uint8_t* out) {
  low = _mm256_permute4x64_epi64(low, 0xd8);
  high = _mm256_permute4x64_epi64(high, 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_unpacklo_epi8(low, high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + 1, _mm256_unpackhi_epi8(low, high));
}

MEMSERVE_AVX2 inline __m256i shift_right_avx2(__m256i bytes, int bits) {
  const __m256i shifted = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(bits));
  return _mm256_and_si256(shifted, _mm256_set1_epi8(static_cast<char>(0xff >> bits)));
}

MEMSERVE_AVX2 inline __m256i shift_left_avx2(__m256i bytes, int bits) {
  const __m256i shifted = _mm256_sll_epi16(bytes, _mm_cvtsi32_si128(bits));
  return _mm256_and_si256(shifted, _mm256_set1_epi8(static_cast<char>(0xff << bits)));
}

MEMSERVE_AVX2 size_t split_avx2(const uint8_t* src, size_t count, const uint8_t* table, int width, uint8_t* low,
                                uint8_t* planes, uint8_t* escapes) {
  const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
  uint8_t* to = escapes;
  size_t from = 0;
  for (; from + kGroup <= count; from += kGroup, planes += 8 * width) {
    alignas(32) uint8_t exponents[kGroup];
    __m256i exponent[2];
    for (int half = 0; half < 2; ++half) {
      __m256i low_bytes, high_bytes;
      halves_avx2(src + 2 * from + 64 * half, low_bytes, high_bytes);
      const __m256i mantissas = _mm256_or_si256(_mm256_and_si256(high_bytes, top), _mm256_andnot_si256(top, low_bytes));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + from) + half, mantissas);
      exponent[half] = _mm256_or_si256(_mm256_add_epi8(high_bytes, high_bytes), shift_right_avx2(low_bytes, 7));
      _mm256_store_si256(reinterpret_cast<__m256i*>(exponents) + half, exponent[half]);
    }
    to = append_avx2(exponents, pack64_avx2(exponent[0], exponent[1], table, width, ~uint64_t{0}, planes), to);
  }
  const auto escaped = static_cast<size_t>(to - escapes);
  if (from == count) return escaped;
  return escaped + split_portable(src + 2 * from, count - from, table, width, low + from, planes, to);
}

MEMSERVE_AVX2 size_t join_avx2(const uint8_t* low, const uint8_t* planes, size_t count, const uint8_t* table, int width,
                               const uint8_t* escapes, uint8_t* out) {
  const __m256i all = table_avx2(table), top = _mm256_set1_epi8(static_cast<char>(0x80));
  size_t from = 0, escaped = 0;
  for (; from + kGroup <= count; from += kGroup, planes += 8 * width) {
    alignas(32) uint8_t exponents[kGroup];
    escaped += unpack64_avx2(planes, ~uint64_t{0}, all, width, escapes + escaped, exponents);
    for (int half = 0; half < 2; ++half) {
      const __m256i exponent = _mm256_load_si256(reinterpret_cast<const __m256i*>(exponents) + half);
      const __m256i mantissa = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + from) + half);
      const __m256i high_bytes = _mm256_or_si256(_mm256_and_si256(mantissa, top), shift_right_avx2(exponent, 1));
      const __m256i low_bytes = _mm256_or_si256(_mm256_andnot_si256(top, mantissa), shift_left_avx2(exponent, 7));
      store_halves_avx2(low_bytes, high_bytes, out + 2 * from + 64 * half);
    }
  }
  if (from == count) return escaped;
  return escaped + join_portable(low + from, planes, count - from, table, width, escapes + escaped, out + 2 * from);
}

MEMSERVE_AVX2 size_t split_half_avx2(const uint8_t* src, size_t count, const uint8_t* table, int width, uint8_t* low,
                                     uint8_t* high, uint8_t* planes, uint8_t* escapes) {
  uint8_t* to = escapes;
  size_t from = 0;
  for (; from + kGroup <= count; from += kGroup, planes += 8 * width, high += 24) {
    alignas(32) uint8_t exponents[kGroup];
    __m256i exponent[2];
    uint64_t bits[3] = {};
    for (int half = 0; half < 2; ++half) {
      __m256i low_bytes, high_bytes;
      halves_avx2(src + 2 * from + 64 * half, low_bytes, high_bytes);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + from) + half, low_bytes);
      for (int plane = 0; plane < 3; ++plane) {
        const __m256i moved = _mm256_sll_epi16(high_bytes, _mm_cvtsi32_si128(15 - kHighBits[plane]));
        bits[plane] |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(moved))} << 32 * half;
      }
      exponent[half] = _mm256_and_si256(shift_right_avx2(high_bytes, 2), _mm256_set1_epi8(0x1f));
      _mm256_store_si256(reinterpret_cast<__m256i*>(exponents) + half, exponent[half]);
    }
    for (int plane = 0; plane < 3; ++plane) store64(high + 8 * plane, bits[plane]);
    to = append_avx2(exponents, pack64_avx2(exponent[0], exponent[1], table, width, ~uint64_t{0}, planes), to);
  }
  const auto escaped = static_cast<size_t>(to - escapes);
  if (from == count) return escaped;
  return escaped + split_half_portable(src + 2 * from, count - from, table, width, low + from, high, planes, to);
}

MEMSERVE_AVX2 size_t join_half_avx2(const uint8_t* low, const uint8_t* high, const uint8_t* planes, size_t count,
                                    const uint8_t* table, int width, const uint8_t* escapes, uint8_t* out) {
  const __m256i all = table_avx2(table);
  size_t from = 0, escaped = 0;
  for (; from + kGroup <= count; from += kGroup, planes += 8 * width, high += 24) {
    alignas(32) uint8_t exponents[kGroup];
    escaped += unpack64_avx2(planes, ~uint64_t{0}, all, width, escapes + escaped, exponents);
    for (int half = 0; half < 2; ++half) {
      const __m256i exponent = _mm256_load_si256(reinterpret_cast<const __m256i*>(exponents) + half);
      const __m256i low_bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + from) + half);
      __m256i high_bytes = shift_left_avx2(_mm256_and_si256(exponent, _mm256_set1_epi8(0x1f)), 2);
      for (int plane = 0; plane < 3; ++plane) {
        const auto bits = static_cast<uint32_t>(load64(high + 8 * plane) >> 32 * half);
        const __m256i value = _mm256_set1_epi8(static_cast<char>(1 << (kHighBits[plane] - 8)));
        high_bytes = _mm256_or_si256(high_bytes, _mm256_and_si256(bytes_of_bits(bits), value));
      }
      store_halves_avx2(low_bytes, high_bytes, out + 2 * from + 64 * half);
    }
  }
  if (from == count) return escaped;
  return escaped +
         join_half_portable(low + from, high, planes, count - from, table, width, escapes + escaped, out + 2 * from);
}

// -- AVX-512 with VBMI2: Ice Lake, Zen 4 and later

#define MEMSERVE_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt,bmi,bmi2")))

template <int width>
MEMSERVE_AVX512 inline uint64_t pack64_avx512(__m512i exponents, const __m512i* table, uint64_t valid, uint8_t* planes) {
  uint64_t in_table = 0, bits[kWidthMax] = {};
  for (int code = 0; code < (1 << width) - 1; ++code) {
    const uint64_t same = _cvtmask64_u64(_mm512_cmpeq_epi8_mask(exponents, table[code]));
    in_table |= same;
    for (int plane = 0; plane < width; ++plane) {
      if (code >> plane & 1) bits[plane] |= same;
    }
  }
  for (int plane = 0; plane < width; ++plane) store64(planes + 8 * plane, (bits[plane] | ~in_table) & valid);
  return ~in_table & valid;
}

// Registers only: in memory these instructions take a hundred times as long on some processors.
MEMSERVE_AVX512 inline uint8_t* append_avx512(__m512i exponents, uint64_t escaped, uint8_t* to) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(_cvtu64_mask64(escaped), exponents));
  return to + std::popcount(escaped);
}

template <int width>
MEMSERVE_AVX512 inline __m512i unpack64_avx512(const uint8_t* planes, uint64_t valid, __m512i table,
                                               const uint8_t*& escapes) {
  __m512i codes = _mm512_setzero_si512();
  uint64_t escaped = valid;
  for (int plane = 0; plane < width; ++plane) {
    const uint64_t bits = load64(planes + 8 * plane);
    const __m512i value = _mm512_set1_epi8(static_cast<char>(1 << plane));
    codes = _mm512_mask_or_epi64(codes, 0xff, codes, _mm512_maskz_mov_epi8(_cvtu64_mask64(bits), value));
    escaped &= bits;
  }
  const __m512i next = _mm512_loadu_si512(escapes);
  escapes += std::popcount(escaped);
  return _mm512_mask_expand_epi8(_mm512_shuffle_epi8(table, codes), _cvtu64_mask64(escaped), next);
}

MEMSERVE_AVX512 inline __m512i table_avx512(const uint8_t* table) {
  return _mm512_broadcast_i32x4(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(table)));
}

MEMSERVE_AVX512 inline void spread_table(const uint8_t* table, int width, __m512i* to) {
  for (int code = 0; code < (1 << width) - 1; ++code) to[code] = _mm512_set1_epi8(static_cast<char>(table[code]));
}

struct Interleave {
  alignas(64) uint8_t even[64], odd[64], first[64], second[64];
  constexpr Interleave() : even(), odd(), first(), second() {
    for (int i = 0; i < 64; ++i) {
      even[i] = static_cast<uint8_t>(2 * i);
      odd[i] = static_cast<uint8_t>(2 * i + 1);
      first[i] = static_cast<uint8_t>((i & 1) << 6 | i >> 1);
      second[i] = static_cast<uint8_t>((i & 1) << 6 | ((i >> 1) + 32));
    }
  }
};
constexpr Interleave kInterleave;

template <int width>
MEMSERVE_AVX512 size_t pack_of(const uint8_t* exponents, size_t count, const uint8_t* table, uint8_t* planes,
                               uint8_t* escapes) {
  __m512i all[kTableMax];
  spread_table(table, width, all);
  uint8_t* to = escapes;
  for (size_t from = 0; from < count; from += kGroup, planes += 8 * width) {
    const __m512i exponent = _mm512_loadu_si512(exponents + from);
    to = append_avx512(exponent, pack64_avx512<width>(exponent, all, first_bits(count - from), planes), to);
  }
  return static_cast<size_t>(to - escapes);
}

template <int width>
MEMSERVE_AVX512 size_t unpack_of(const uint8_t* planes, size_t count, const uint8_t* table, const uint8_t* escapes,
                                 uint8_t* exponents) {
  const __m512i all = table_avx512(table);
  const uint8_t* next = escapes;
  for (size_t from = 0; from < count; from += kGroup, planes += 8 * width) {
    _mm512_storeu_si512(exponents + from, unpack64_avx512<width>(planes, first_bits(count - from), all, next));
  }
  return static_cast<size_t>(next - escapes);
}

template <int width, bool half>
MEMSERVE_AVX512 size_t split_of(const uint8_t* src, size_t count, const uint8_t* table, uint8_t* low, uint8_t* high,
                                uint8_t* planes, uint8_t* escapes) {
  __m512i all[kTableMax];
  spread_table(table, width, all);
  const __m512i even = _mm512_load_si512(kInterleave.even), odd = _mm512_load_si512(kInterleave.odd);
  const __m512i top = _mm512_set1_epi8(static_cast<char>(0x80)), five = _mm512_set1_epi8(0x1f);
  uint8_t* to = escapes;
  size_t from = 0;
  for (; from + kGroup <= count; from += kGroup, planes += 8 * width) {
    const __m512i first = _mm512_loadu_si512(src + 2 * from), second = _mm512_loadu_si512(src + 2 * from + 64);
    const __m512i low_bytes = _mm512_permutex2var_epi8(first, even, second);
    const __m512i high_bytes = _mm512_permutex2var_epi8(first, odd, second);
    __m512i exponent;
    if constexpr (half) {
      _mm512_storeu_si512(low + from, low_bytes);
      for (int plane = 0; plane < 3; ++plane, high += 8) {
        const __m512i bit = _mm512_set1_epi8(static_cast<char>(1 << (kHighBits[plane] - 8)));
        store64(high, _cvtmask64_u64(_mm512_test_epi8_mask(high_bytes, bit)));
      }
      exponent = _mm512_and_si512(_mm512_srli_epi16(high_bytes, 2), five);
    } else {
      _mm512_storeu_si512(low + from, _mm512_ternarylogic_epi64(top, high_bytes, low_bytes, 0xca));
      const __m512i doubled = _mm512_add_epi8(high_bytes, high_bytes);
      const __mmask64 odd_ones = _mm512_movepi8_mask(low_bytes);
      exponent = _mm512_mask_sub_epi8(doubled, odd_ones, doubled, _mm512_set1_epi8(-1));
    }
    to = append_avx512(exponent, pack64_avx512<width>(exponent, all, ~uint64_t{0}, planes), to);
  }
  const auto escaped = static_cast<size_t>(to - escapes);
  if (from == count) return escaped;
  if constexpr (half) {
    return escaped + split_half_portable(src + 2 * from, count - from, table, width, low + from, high, planes, to);
  }
  return escaped + split_portable(src + 2 * from, count - from, table, width, low + from, planes, to);
}

template <int width, bool half>
MEMSERVE_AVX512 size_t join_of(const uint8_t* low, const uint8_t* high, const uint8_t* planes, size_t count,
                               const uint8_t* table, const uint8_t* escapes, uint8_t* out) {
  const __m512i all = table_avx512(table), top = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i first = _mm512_load_si512(kInterleave.first), second = _mm512_load_si512(kInterleave.second);
  const __m512i five = _mm512_set1_epi8(0x1f);
  const uint8_t* next = escapes;
  size_t from = 0;
  for (; from + kGroup <= count; from += kGroup, planes += 8 * width) {
    const __m512i exponent = unpack64_avx512<width>(planes, ~uint64_t{0}, all, next);
    __m512i low_bytes = _mm512_loadu_si512(low + from), high_bytes;
    if constexpr (half) {
      high_bytes = _mm512_slli_epi16(_mm512_and_si512(exponent, five), 2);
      for (int plane = 0; plane < 3; ++plane, high += 8) {
        const __m512i bit = _mm512_set1_epi8(static_cast<char>(1 << (kHighBits[plane] - 8)));
        high_bytes = _mm512_or_si512(high_bytes, _mm512_maskz_mov_epi8(_cvtu64_mask64(load64(high)), bit));
      }
    } else {
      // The exponent's lowest bit becomes the low byte's top bit, the others stand below the sign.
      const __m512i seven = _mm512_srli_epi16(_mm512_andnot_si512(_mm512_set1_epi8(1), exponent), 1);
      high_bytes = _mm512_ternarylogic_epi64(top, low_bytes, seven, 0xca);
      low_bytes = _mm512_ternarylogic_epi64(top, _mm512_slli_epi16(exponent, 7), low_bytes, 0xca);
    }
    _mm512_storeu_si512(out + 2 * from, _mm512_permutex2var_epi8(low_bytes, first, high_bytes));
    _mm512_storeu_si512(out + 2 * from + 64, _mm512_permutex2var_epi8(low_bytes, second, high_bytes));
  }
  const auto escaped = static_cast<size_t>(next - escapes);
  if (from == count) return escaped;
  if constexpr (half) {
    return escaped + join_half_portable(low + from, high, planes, count - from, table, width, next, out + 2 * from);
  }
  return escaped + join_portable(low + from, planes, count - from, table, width, next, out + 2 * from);
}

size_t pack_avx512(const uint8_t* exponents, size_t count, const uint8_t* table, int width, uint8_t* planes,
                   uint8_t* escapes) {
  if (width == 1) return pack_of<1>(exponents, count, table, planes, escapes);
  if (width == 2) return pack_of<2>(exponents, count, table, planes, escapes);
  return pack_of<3>(exponents, count, table, planes, escapes);
}

size_t unpack_avx512(const uint8_t* planes, size_t count, const uint8_t* table, int width, const uint8_t* escapes,
                     uint8_t* exponents) {
  if (width == 1) return unpack_of<1>(planes, count, table, escapes, exponents);
  if (width == 2) return unpack_of<2>(planes, count, table, escapes, exponents);
  return unpack_of<3>(planes, count, table, escapes, exponents);
}

template <bool half>
size_t split_any(const uint8_t* src, size_t count, const uint8_t* table, int width, uint8_t* low, uint8_t* high,
                 uint8_t* planes, uint8_t* escapes) {
  if (width == 1) return split_of<1, half>(src, count, table, low, high, planes, escapes);
  if (width == 2) return split_of<2, half>(src, count, table, low, high, planes, escapes);
  return split_of<3, half>(src, count, table, low, high, planes, escapes);
}

template <bool half>
size_t join_any(const uint8_t* low, const uint8_t* high, const uint8_t* planes, size_t count, const uint8_t* table,
                int width, const uint8_t* escapes, uint8_t* out) {
  if (width == 1) return join_of<1, half>(low, high, planes, count, table, escapes, out);
  if (width == 2) return join_of<2, half>(low, high, planes, count, table, escapes, out);
  return join_of<3, half>(low, high, planes, count, table, escapes, out);
}

size_t split_avx512(const uint8_t* src, size_t count, const uint8_t* table, int width, uint8_t* low, uint8_t* planes,
                    uint8_t* escapes) {
  return split_any<false>(src, count, table, width, low, nullptr, planes, escapes);
}

size_t join_avx512(const uint8_t* low, const uint8_t* planes, size_t count, const uint8_t* table, int width,
                   const uint8_t* escapes, uint8_t* out) {
  return join_any<false>(low, nullptr, planes, count, table, width, escapes, out);
}
#endif

std::vector<Path> supported() {
  std::vector<Path> paths{{"portable", split_portable, split_half_portable, pack_portable, unpack_portable,
                           join_portable, join_half_portable}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) {
    paths.push_back({"avx2", split_avx2, split_half_avx2, pack_avx2, unpack_avx2, join_avx2, join_half_avx2});
  }
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2")) {
    paths.push_back({"avx512", split_avx512, split_any<true>, pack_avx512, unpack_avx512, join_avx512, join_any<true>});
  }
#endif
  return paths;
}

IsaPaths<Path>& paths() {
  static IsaPaths<Path> all(supported());
  return all;
}

}  // namespace

const Path& path() { return paths().in_use(); }

std::vector<std::string> isas() { return paths().names(); }

bool force_isa(const std::string& name) { return paths().force(name); }

}  // namespace memserve::codec
