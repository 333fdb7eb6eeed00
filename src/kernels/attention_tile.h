// Paged attention of one tile: FlashAttention's online softmax (Dao et al. 2022, algorithm 1) over chunks of the paged
// context, all query heads of a kv head together.
//
//   rows of a tile:  (query 0, head 0) (query 0, head 1) .. (query 1, head 0) ..     row = query * group + head
//   per chunk:       scores = Q K;  weights = exp2(scores - max);  sums = sums * decay + weights V
#pragma once

#include <cfloat>
#include <type_traits>

#include "attention_rows.h"

namespace memserve::MEMSERVE_ISA {
namespace {

constexpr int kChunkPanels = kChunkTokens / kPanelTokens;

// Pages of KV as it was computed.
template <class Format, class T>
class PlainPanels {
  using Unit = typename Format::Unit;

 public:
  PlainPanels(const Batch& batch, const AttendArgs& args, int row, int kv_head)
      : layout_(batch.layout), pages_(batch, args, row, kv_head) {}

  static constexpr auto write = &write_tokens<T>;

  // K of tokens [token, token + kPanelTokens), those before `end`; in the page, or in `panel`.
  const Unit* keys(int token, int end, Unit* panel, int* stride) const {
    const int piece = pages_.piece(), block_tokens = layout_.block_tokens, dim = layout_.head_dim_k;
    if constexpr (std::is_same_v<T, Unit>) {
      if (piece == kPanelTokens) return *stride = block_tokens, pages_.key(token);
    }
    *stride = kPanelTokens;
    for (int at = 0; at < kPanelTokens && token + at < end; at += piece) {
      const Source<T> columns{pages_.key(token + at), block_tokens, dim, piece, 0, dim};
      pack(Format{}, columns, panel + at, kPanelTokens);
    }
    return panel;
  }

  // V of the same tokens: rows of `stride` units. Those outside [lowest, end) are zeros.
  const Unit* values(int token, int lowest, int end, Unit* panel, int stride) const {
    const int piece = pages_.piece(), dim = layout_.head_dim_v;
    if constexpr (std::is_same_v<T, Unit>) {
      const bool whole = lowest <= token && token + kPanelTokens <= end;
      if (whole && piece == kPanelTokens && dim == stride) return pages_.value(token);
    }
    for (int at = 0; at < kPanelTokens; at += piece) {
      // A piece behind the context has no block: its rows are all zeros and its pointer is not followed.
      const int here = token + at < end ? token + at : token;
      const Source<T> rows{pages_.value(here), dim, piece, dim, lowest - token - at, end - token - at};
      pack(Format{}, rows, panel + int64_t(at / Format::kUnitTokens) * stride, stride);
    }
    return panel;
  }

 protected:
  const PageLayout& layout_;
  const HeadPages<T> pages_;
};

// Panels: where K and V lie, and how they come into the form that is multiplied.
template <class Format, class T, class Panels>
class TileKernel {
  using Element = typename Format::Element;
  using Unit = typename Format::Unit;

 public:
  explicit TileKernel(const TileJob& job)
      : job_(job), batch_(*job.batch), args_(*job.args), tile_(job.tile),
        panels_(batch_, args_, tile_.row, tile_.kv_head), group_(args_.heads / batch_.layout.num_kv_heads),
        rows_(tile_.queries * group_),
        dim_k_(batch_.layout.head_dim_k), dim_v_(batch_.layout.head_dim_v), dim_v_padded_(padded(dim_v_, 32)),
        first_position_(batch_.first_position(tile_.row) + tile_.first_query),
        factor_(args_.softcap > 0 ? kLog2E : args_.scale * kLog2E) {
    char* free = job.scratch;
    const int padded_rows = padded(rows_, 16);
    q_ = take<Element>(free, padded_rows * dim_k_);
    scores_ = take<float>(free, padded_rows * kChunkTokens);
    weights_ = take<Element>(free, padded_rows * kChunkTokens);
    sums_ = take<float>(free, padded_rows * dim_v_padded_);
    keys_ = take<Element>(free, dim_k_ * kPanelTokens);
    values_ = take<Element>(free, kChunkTokens * dim_v_padded_);
    max_ = take<float>(free, padded_rows);
    decay_ = take<float>(free, 3 * padded_rows);
    denominator_ = decay_ + padded_rows;
    next_max_ = denominator_ + padded_rows;
  }

  void run() {
    [[maybe_unused]] const TileShapes shapes;
    if (job_.write_count) Panels::write(batch_, args_, tile_.row, tile_.kv_head, job_.write_first, job_.write_count);
    for (int r = 0; r < rows_; ++r) load_query<Element, T>(batch_, args_, tile_, r, q_ + int64_t(r) * dim_k_);
    for (int r = 0; r < padded(rows_, 16); ++r) {
      max_[r] = -__builtin_inff();
      denominator_[r] = 0;
    }
    std::memset(sums_, 0, sizeof(float) * rows_ * dim_v_padded_);
    for (int token = tile_.first_token; token < tile_.end_token; token += kChunkTokens) {
      const int end = token + kChunkTokens < tile_.end_token ? token + kChunkTokens : tile_.end_token;
      score_chunk(token, end);
      weigh_chunk(token, end);
      sum_chunk(token, end);
    }
    deliver<T>(job_, rows_, sums_, dim_v_padded_, max_, denominator_);
  }

 private:
  template <class E>
  static E* take(char*& free, int64_t count) {
    E* here = reinterpret_cast<E*>(free);
    free += (count * sizeof(E) + 63) / 64 * 64;
    return here;
  }

  // scores[rows, chunk] = Q K, one panel after the other so that the packed panel stays in L1.
  void score_chunk(int first, int end) {
    for (int token = first; token < end; token += kPanelTokens) {
      int stride;
      const Unit* panel = panels_.keys(token, end, reinterpret_cast<Unit*>(keys_), &stride);
      multiply(Operands<Format>{reinterpret_cast<const Unit*>(q_), dim_k_ / Format::kUnitTokens, &panel, 1,
                                dim_k_ / Format::kUnitTokens, stride, scores_ + (token - first), kChunkTokens, nullptr},
               rows_, kPanelTokens);
    }
  }

  // Online softmax, scores to weights in place: mask, new maxima, exp2, denominators, decay of earlier sums.
  void weigh_chunk(int first, int end) {
    const int tokens = padded(end - first, kPanelTokens);
    for (int r = 0; r < rows_; ++r) {
      float* scores = scores_ + int64_t(r) * kChunkTokens;
      next_max_[r] = largest_visible(args_, scores, first_position_ + r / group_, first, end) * factor_;
    }
    for (int r = 0; r < rows_; r += kLanes) {
      const VecF old = load(max_ + r), lowest = splat(-__FLT_MAX__);
      // A row without a visible token keeps a finite maximum, so that no infinity is subtracted from an infinity.
      const VecF next = larger(larger(old, load(next_max_ + r)), lowest);
      store(max_ + r, next);
      store(decay_ + r, exp2<false>(old - next));
      store(denominator_ + r, load(denominator_ + r) * load(decay_ + r));
    }
    for (int r = 0; r < rows_; ++r) {
      const int64_t row = int64_t(r) * kChunkTokens;
      denominator_[r] += exponentiate<Format::kFastExp>(scores_ + row, weights_ + row, tokens, factor_, max_[r]);
    }
  }

  // sums[rows, dim_v] = sums * decay + weights V
  void sum_chunk(int first, int end) {
    const Unit* panels[kChunkPanels];
    int count = 0;
    const int lowest = args_.reach.oldest(first_position_);  // blocks of older tokens may be gone
    for (int token = first; token < end; token += kPanelTokens, ++count) {
      const int units = count * (kPanelTokens / Format::kUnitTokens) * dim_v_padded_;
      panels[count] = panels_.values(token, lowest, end, reinterpret_cast<Unit*>(values_) + units, dim_v_padded_);
    }
    const Unit* weights = reinterpret_cast<const Unit*>(weights_);
    multiply(Operands<Format>{weights, kChunkTokens / Format::kUnitTokens, panels, count,
                              kPanelTokens / Format::kUnitTokens, dim_v_padded_, sums_, dim_v_padded_, decay_},
             rows_, padded(dim_v_, kBlockColumns));
  }

  const TileJob& job_;
  const Batch& batch_;
  const AttendArgs& args_;
  const Tile tile_;
  const Panels panels_;
  const int group_, rows_, dim_k_, dim_v_, dim_v_padded_, first_position_;
  const float factor_;  // scores times this factor are exponents of 2
  Element *q_, *weights_, *keys_, *values_;
  float *scores_, *sums_, *max_, *decay_, *denominator_, *next_max_;
};

}  // namespace
}  // namespace memserve::MEMSERVE_ISA
