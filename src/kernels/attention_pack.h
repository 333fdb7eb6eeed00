// Pages to panels: bring 32 tokens of K or V into the form that attention_gemm.h multiplies.
#pragma once

#include "attention.h"
#include "attention_gemm.h"

namespace memserve::MEMSERVE_ISA {
namespace {

// A matrix in a page: `rows` rows of `width` elements. Rows outside [first_valid, end_valid) count as zeros and are
// never read: the unused part of a block may hold anything (even NaN), which must not be multiplied by a weight of
// zero.
template <class T>
struct Source {
  const T* data;
  int stride, rows, width, first_valid, end_valid;
};

template <class T>
void pack(Floats, const Source<T>& s, float* to, int to_stride) {
  for (int r = 0; r < s.rows; ++r) {
    float* row = to + int64_t(r) * to_stride;
    if (r < s.first_valid || r >= s.end_valid)
      std::memset(row, 0, s.width * sizeof(float));
    else
      widen(s.data + int64_t(r) * s.stride, row, s.width);
  }
}

#if defined(__AVX512BF16__)
// Two rows into one row of pairs.
inline void interleave(const BFloat16* even, const BFloat16* odd, __mmask32 columns, uint32_t* to) {
  alignas(64) static constexpr uint16_t kPairs[64] = {
      0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
      11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
      22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  const __m512i a = even ? _mm512_maskz_loadu_epi16(columns, even) : _mm512_setzero_si512();
  const __m512i b = odd ? _mm512_maskz_loadu_epi16(columns, odd) : _mm512_setzero_si512();
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, _mm512_load_si512(kPairs), b));
  if (columns >> 16) _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, _mm512_load_si512(kPairs + 32), b));
}

inline void pack(Pairs, const Source<BFloat16>& s, uint32_t* to, int to_stride) {
  for (int r = 0; r < s.rows; r += 2) {
    const BFloat16* even = s.data + int64_t(r) * s.stride;
    const BFloat16* odd = even + s.stride;
    if (r < s.first_valid || r >= s.end_valid) even = nullptr;
    if (r + 1 < s.first_valid || r + 1 >= s.end_valid) odd = nullptr;
    uint32_t* row = to + int64_t(r / 2) * to_stride;
    int column = 0;
    for (; column + 32 <= s.width; column += 32)
      interleave(even ? even + column : nullptr, odd ? odd + column : nullptr, ~0u, row + column);
    if (column < s.width)
      interleave(even ? even + column : nullptr, odd ? odd + column : nullptr, (1u << (s.width - column)) - 1,
                 row + column);
  }
}
#endif

// One head of one layer of one sequence, seen as a run of tokens.
template <class T>
class HeadPages {
 public:
  HeadPages(const Batch& batch, const AttendArgs& args, int row, int kv_head)
      : layout_(&batch.layout), blocks_(batch.row_blocks(row)), layer_(args.layer), kv_head_(kv_head) {}

  T* key(int token) const { return at(token) + layout_->key_offset(token % layout_->block_tokens); }
  T* value(int token) const { return at(token) + layout_->value_offset(token % layout_->block_tokens); }

  // Tokens [token, token + piece()) lie in one block for every multiple of piece().
  int piece() const { return layout_->block_tokens % kPanelTokens == 0 ? kPanelTokens : 16; }

 private:
  T* at(int token) const {
    return reinterpret_cast<T*>(layout_->head(blocks_[token / layout_->block_tokens], layer_, kv_head_));
  }

  const PageLayout* layout_;
  const int32_t* blocks_;
  int layer_, kv_head_;
};

}  // namespace
}  // namespace memserve::MEMSERVE_ISA
