// KV of a byte or less: pages of codes. The rule of rounding and the inside of such a page, for attention and for tiers.
//
//   one head of a page (its K and its V are rounded apart)
//   +-----------------------------+-----------------------------+------------------------+------------------------+
//   | K [units of dim_k, tokens]  | V [units of tokens, dim_v]  | K maxima [groups, tok] | V maxima [groups, tok] |
//   +-----------------------------+-----------------------------+------------------------+------------------------+
//
// A unit is 4 bytes: 4 codes of a byte that are neighbours in the depth of the product (K: elements of a head, V: tokens),
// as dot products of bytes want them; or 8 codes of half a byte, of which byte i has code i low and code 4 + i high.
//
// A group is some elements of one token's K or V: the whole head, or 32 of it (int4). Its maximum is the largest
// magnitude, rounded to bfloat16; the largest code stands for it (int8: 127, fp8 (e4m3): 448, int4: 7), and a value is
// its code times maximum / largest. So codes depend on their own token and head alone: on no batch, chunk or block border.
//
// Nothing drifts: a group whose values are widened to bfloat16, float16 or float32 becomes the same codes again. The
// maximum has 8 significant bits and comes back as it was in all three; half a unit in the last place of a value is less
// than half the distance between two codes (but for the least values of float16, see lower_pages.cpp). The rounding of
// the maximum moves values by less than half of that distance.
//
// A group with a value that is no number, infinite, or 2^127 and more, comes back as NaN. One whose magnitudes are all
// below 2^-100 is zero.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

// Sources for several instruction sets include this: nothing of it may be shared among them.
#define MEMSERVE_LOCAL static inline __attribute__((always_inline))

namespace memserve {

enum class Scheme : int { as_computed = 0, int8 = 1, fp8 = 2, int4 = 3 };
inline constexpr int kSchemes = 4;
inline constexpr const char* kSchemeNames[kSchemes] = {"auto", "int8", "fp8", "int4"};

inline constexpr int kUnitBytes = 4, kHeadAlign = 64;
inline constexpr int kCodedDimMax = 1024;  // elements of a head in pages of codes

template <Scheme S>
struct Codes;

template <>
struct Codes<Scheme::int8> {
  static constexpr int kDepth = 4, kGroup = kCodedDimMax;  // values in a unit; elements in a group
  static constexpr float kLargest = 127.0f;
  // To the nearest, ties to even; `scaled` is at most 127.5.
  MEMSERVE_LOCAL uint32_t code(float scaled) { return uint32_t(__builtin_irintf(scaled)) & 0xFF; }
  MEMSERVE_LOCAL float value(uint32_t code) { return float(int32_t(code << 24) >> 24); }
};

template <>
struct Codes<Scheme::fp8> {
  static constexpr int kDepth = 4, kGroup = kCodedDimMax;
  static constexpr float kLargest = 448.0f;
  MEMSERVE_LOCAL uint32_t code(float scaled) {
    const uint32_t bits = std::bit_cast<uint32_t>(scaled), sign = (bits >> 24) & 0x80, magnitude = bits & 0x7FFFFFFF;
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    const uint32_t below = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0x1p14f);  // in units of 2^-9
    const uint32_t normal = (magnitude - ((127 - 7) << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20;
    return ((magnitude < std::bit_cast<uint32_t>(0x1p-6f) ? below : normal) & 0x7F) | sign;
  }
  MEMSERVE_LOCAL float value(uint32_t code) {
    const uint32_t sign = (code & 0x80) << 24, magnitude = code & 0x7F;
    const float normal = std::bit_cast<float>((magnitude << 20) + ((127 - 7) << 23));
    const float below = float(int32_t(magnitude)) * 0x1p-9f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude < 8 ? below : normal) | sign);
  }
};

template <>
struct Codes<Scheme::int4> {
  static constexpr int kDepth = 8, kGroup = 32;
  static constexpr float kLargest = 7.0f;
  MEMSERVE_LOCAL uint32_t code(float scaled) { return uint32_t(__builtin_irintf(scaled)) & 0xF; }
  MEMSERVE_LOCAL float value(uint32_t code) { return float(int32_t(code << 28) >> 28); }
};

// Where code `place` of a unit lies in its 32 bits.
template <Scheme S>
MEMSERVE_LOCAL constexpr int unit_shift(int place) {
  return S == Scheme::int4 ? place % 4 * 8 + place / 4 * 4 : place * 8;
}

// The bits of a group's largest magnitude -> its maximum, the bits of a bfloat16. Bits of what is no number, or infinite,
// are larger than those of numbers.
MEMSERVE_LOCAL uint32_t maximum_of(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const uint32_t finite = bits < (127u - 100) << 23 ? 0 : rounded;  // below 2^-100
  return bits < (127u + 127) << 23 ? finite : 0x7FC0;               // from 2^127 on, infinite and NaN too
}

// What values are multiplied by to become codes; 0 where they become none.
template <Scheme S>
MEMSERVE_LOCAL float inverse_of(uint32_t maximum) {
  const bool counts = maximum != 0 && maximum < 0x7F80;
  return counts ? Codes<S>::kLargest / std::bit_cast<float>(counts ? maximum << 16 : 0x3F800000u) : 0.0f;
}

// What codes are multiplied by to become values.
template <Scheme S>
MEMSERVE_LOCAL float scale_of(uint32_t maximum) {
  return std::bit_cast<float>(maximum << 16) * (1.0f / Codes<S>::kLargest);
}

// Sizes and places of one head of a page of codes, in bytes.
struct CodedHead {
  int dim_k, dim_v, tokens, depth, group;

  static constexpr CodedHead make(Scheme scheme, int dim_k, int dim_v, int tokens) {
    const bool half = scheme == Scheme::int4;
    return {dim_k, dim_v, tokens, half ? Codes<Scheme::int4>::kDepth : Codes<Scheme::int8>::kDepth,
            half ? Codes<Scheme::int4>::kGroup : Codes<Scheme::int8>::kGroup};
  }

  constexpr int groups(int dim) const { return (dim + group - 1) / group; }
  constexpr size_t key_unit(int element, int token) const {
    return (size_t(element / depth) * tokens + token) * kUnitBytes;
  }
  constexpr size_t values() const { return size_t((dim_k + depth - 1) / depth) * tokens * kUnitBytes; }
  constexpr size_t value_unit(int token, int element) const {
    return values() + (size_t(token / depth) * dim_v + element) * kUnitBytes;
  }
  constexpr size_t maxima() const { return values() + size_t((tokens + depth - 1) / depth) * dim_v * kUnitBytes; }
  constexpr size_t key_maximum(int group_number, int token) const {
    return maxima() + (size_t(group_number) * tokens + token) * sizeof(uint16_t);
  }
  constexpr size_t value_maximum(int group_number, int token) const {
    return key_maximum(groups(dim_k) + group_number, token);
  }
  constexpr size_t bytes() const {
    return (value_maximum(groups(dim_v), 0) + kHeadAlign - 1) / kHeadAlign * kHeadAlign;
  }
};

}  // namespace memserve
