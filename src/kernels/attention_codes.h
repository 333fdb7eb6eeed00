// Pages of codes (kv_codes.h): writing them, and bringing them into the form that attention_gemm.h multiplies.
#pragma once

#include <algorithm>
#include <utility>

#include "attention_rows.h"

namespace memserve::MEMSERVE_ISA {
namespace {

// ---- vectors of units ----

inline VecI load_units(const char* p) {
  VecI units;
  std::memcpy(&units, p, sizeof units);
  return units;
}

// Code `place` of each unit, as a number.
template <Scheme S>
inline VecF codes_at(VecI units, int place) {
  const int shift = unit_shift<S>(place);
  if constexpr (S == Scheme::int8) return __builtin_convertvector((units << (24 - shift)) >> 24, VecF);
  if constexpr (S == Scheme::int4) return __builtin_convertvector((units << (28 - shift)) >> 28, VecF);
  const VecI magnitudes = (units >> shift) & 0x7F, signs = ((units >> shift) & 0x80) << 24;
  const VecF normal = (VecF)((magnitudes << 20) + ((127 - 7) << 23));
  const VecF below = __builtin_convertvector(magnitudes, VecF) * 0x1p-9f;
  return (VecF)((VecI)(magnitudes < 8 ? below : normal) | signs);
}

// Scales of kLanes groups with neighbouring maxima.
template <Scheme S>
inline VecF load_scales(const uint16_t* maxima) {
  typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
  Halves halves;
  std::memcpy(&halves, maxima, sizeof halves);
  return (VecF)(__builtin_convertvector(halves, VecI) << 16) * (1.0f / Codes<S>::kLargest);
}

// ---- one head of one layer of one sequence ----

template <Scheme S>
class CodedPages {
 public:
  CodedPages(const Batch& batch, const AttendArgs& args, int row, int kv_head)
      : head_(batch.layout.coded_head()), blocks_(batch.row_blocks(row)) {
    const PageLayout& layout = batch.layout;  // its sizes take divisions: not for every panel
    first_ = layout.head(0, args.layer, kv_head);
    block_bytes_ = layout.block_bytes();
    maxima_ = head_.maxima();
    value_maxima_ = head_.value_maximum(0, 0);
    values_ = head_.values();
  }

  // The units of K with the first elements, and of V with the first element. Of V, `token` is the first of a unit.
  char* key(int token) const { return at(token) + slot(token) * kUnitBytes; }
  char* value(int token) const { return at(token) + values_ + slot(token) / Codes<S>::kDepth * value_stride(); }
  // Of group 0; those of the next group lie `block_tokens` further.
  uint16_t* key_maxima(int token) const { return reinterpret_cast<uint16_t*>(at(token) + maxima_) + slot(token); }
  uint16_t* value_maxima(int token) const {
    return reinterpret_cast<uint16_t*>(at(token) + value_maxima_) + slot(token);
  }

  int key_stride() const { return head_.tokens * kUnitBytes; }    // bytes to the next units of the same tokens
  int value_stride() const { return head_.dim_v * kUnitBytes; }
  int maxima_stride() const { return head_.tokens; }
  size_t maxima_offset() const { return maxima_; }
  // As of HeadPages.
  int piece() const { return head_.tokens % kPanelTokens == 0 ? kPanelTokens : 16; }

 private:
  int slot(int token) const { return token % head_.tokens; }
  char* at(int token) const { return first_ + size_t(blocks_[token / head_.tokens]) * block_bytes_; }

  CodedHead head_;
  const int32_t* blocks_;
  char* first_;  // the head of block 0
  size_t block_bytes_, values_, maxima_, value_maxima_;
};

// ---- writing ----

// Of one group; returns its maximum.
template <Scheme S>
uint32_t encode(const float* values, int count, uint8_t* codes) {
  uint32_t most = 0;
  for (int i = 0; i < count; ++i) most = std::max(most, std::bit_cast<uint32_t>(values[i]) & 0x7FFFFFFF);
  const uint32_t maximum = maximum_of(most);
  const float inverse = inverse_of<S>(maximum);
  if (inverse == 0) {
    std::memset(codes, 0, count);
    return maximum;
  }
  for (int i = 0; i < count; ++i) codes[i] = uint8_t(Codes<S>::code(values[i] * inverse));
  return maximum;
}

// The values of one token: its codes, and a maximum every `stride` entries.
template <Scheme S, class T>
void encode_token(const T* from, int dim, uint8_t* codes, uint16_t* maxima, int stride) {
  float values[kCodedDimMax];
  widen(from, values, dim);
  for (int first = 0; first < dim; first += Codes<S>::kGroup, maxima += stride)
    *maxima = uint16_t(encode<S>(values + first, std::min(Codes<S>::kGroup, dim - first), codes + first));
}

template <Scheme S>
void put_key(const uint8_t* codes, int dim, char* units, int stride) {
  for (int d = 0; d < dim; d += Codes<S>::kDepth, units += stride) {
    uint32_t unit = 0;
    for (int i = 0; i < Codes<S>::kDepth; ++i) unit |= uint32_t(codes[d + i]) << unit_shift<S>(i);
    std::memcpy(units, &unit, kUnitBytes);
  }
}

template <Scheme S>
void put_value(const uint8_t* codes, int dim, char* units, int place) {
  const int shift = unit_shift<S>(place) % 8;
  auto* bytes = reinterpret_cast<uint8_t*>(units) + unit_shift<S>(place) / 8;
  for (int d = 0; d < dim; ++d) {
    uint8_t& byte = bytes[size_t(d) * kUnitBytes];
    if constexpr (S == Scheme::int4) byte = uint8_t((byte & (0xF0 >> shift)) | (codes[d] << shift));
    else byte = codes[d];
  }
}

// Stores the new tokens of one row for one kv head, as codes.
template <Scheme S, class T>
void write_codes(const Batch& batch, const AttendArgs& args, int row, int kv_head, int first, int count) {
  const PageLayout& layout = batch.layout;
  const CodedPages<S> pages(batch, args, row, kv_head);
  uint8_t codes[kCodedDimMax];
  for (int i = first; i < first + count; ++i) {
    const int position = batch.first_position(row) + i, place = position % Codes<S>::kDepth;
    const int64_t token = batch.q_starts[row] + i;
    const T* k = reinterpret_cast<const T*>(args.k.data) + token * args.k.token_stride + kv_head * args.k.head_stride;
    const T* v = reinterpret_cast<const T*>(args.v.data) + token * args.v.token_stride + kv_head * args.v.head_stride;
    encode_token<S>(k, layout.head_dim_k, codes, pages.key_maxima(position), pages.maxima_stride());
    put_key<S>(codes, layout.head_dim_k, pages.key(position), pages.key_stride());
    encode_token<S>(v, layout.head_dim_v, codes, pages.value_maxima(position), pages.maxima_stride());
    put_value<S>(codes, layout.head_dim_v, pages.value(position - place), place);
  }
}

// ---- panels ----

// The values of one vector of units, scale(place) times their codes: a row of the panel for each place.
template <Scheme S, class Scale>
inline void unpack(Floats, VecI units, const Scale& scale, float* to, int to_stride) {
  for (int i = 0; i < Codes<S>::kDepth; ++i) store(to + int64_t(i) * to_stride, codes_at<S>(units, i) * scale(i));
}

#if defined(__AVX512BF16__)
// As pairs of bfloat16: half as many rows.
template <Scheme S, class Scale>
inline void unpack(Pairs, VecI units, const Scale& scale, uint32_t* to, int to_stride) {
  alignas(64) static constexpr uint16_t kPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  for (int i = 0; i < Codes<S>::kDepth; i += 2) {
    const VecF even = codes_at<S>(units, i) * scale(i), odd = codes_at<S>(units, i + 1) * scale(i + 1);
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    _mm512_storeu_si512(to + int64_t(i / 2) * to_stride,
                        _mm512_permutexvar_epi16(_mm512_load_si512(kPairs), halves));
  }
}
#endif

// Pages of codes as panels of values.
template <Scheme S, class Format, class T>
class CodedPanels {
  using Unit = typename Format::Unit;
  static constexpr int kDepth = Codes<S>::kDepth, kGroup = Codes<S>::kGroup;

 public:
  CodedPanels(const Batch& batch, const AttendArgs& args, int row, int kv_head)
      : layout_(batch.layout), pages_(batch, args, row, kv_head) {}

  static constexpr auto write = &write_codes<S, T>;

  // See PlainPanels.
  const Unit* keys(int token, int end, Unit* panel, int* stride) const {
    const int piece = pages_.piece(), dim = layout_.head_dim_k;
    *stride = kPanelTokens;
    for (int at = 0; at < kPanelTokens && token + at < end; at += piece) {
      const char* units = pages_.key(token + at);
      for (int column = 0; column < piece; column += kLanes)
        for (int d = 0; d < dim; d += kDepth) {
          const VecF scales =
              load_scales<S>(pages_.key_maxima(token + at) + d / kGroup * pages_.maxima_stride() + column);
          unpack<S>(Format{}, load_units(units + d / kDepth * pages_.key_stride() + column * kUnitBytes),
                    [&](int) { return scales; }, panel + d / Format::kUnitTokens * kPanelTokens + at + column,
                    kPanelTokens);
        }
    }
    return panel;
  }

  const Unit* values(int token, int lowest, int end, Unit* panel, int stride) const {
    const int piece = pages_.piece();
    for (int at = 0; at < kPanelTokens; at += piece) {
      // A piece behind the context has no block: codes of another one are multiplied by zero.
      const int here = token + at < end ? token + at : token;
      for (int first = 0; first < layout_.head_dim_v; first += kGroup) {
        float scales[kPanelTokens];
        const uint16_t* maxima = pages_.value_maxima(here) + first / kGroup * pages_.maxima_stride();
        for (int t = 0; t < piece; ++t) {
          const bool counts = token + at + t >= lowest && token + at + t < end;
          scales[t] = counts ? scale_of<S>(maxima[t]) : 0.0f;
        }
        unpack_group(pages_.value(here), scales, piece, first, panel + at / Format::kUnitTokens * stride, stride);
      }
    }
    return panel;
  }

 private:
  // Columns behind the last are numbers without meaning: of the next units, or of maxima.
  void unpack_group(const char* units, const float* scales, int tokens, int first, Unit* panel, int stride) const {
    const int end = std::min(first + kGroup, layout_.head_dim_v);
    for (int t = 0; t < tokens; t += kDepth)
      for (int column = first; column < end; column += kLanes)
        unpack<S>(Format{}, load_units(units + t / kDepth * pages_.value_stride() + column * kUnitBytes),
                  [&](int i) { return splat(scales[t + i]); }, panel + t / Format::kUnitTokens * stride + column, stride);
  }

  const PageLayout& layout_;
  const CodedPages<S> pages_;
};

}  // namespace
}  // namespace memserve::MEMSERVE_ISA
