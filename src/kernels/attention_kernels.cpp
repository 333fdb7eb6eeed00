// Paged attention of one tile, compiled once per instruction set: FlashAttention's online softmax (Dao et al. 2022,
// algorithm 1) over chunks of the paged context, all query heads of a kv head together.
//
//   rows of a tile:  (query 0, head 0) (query 0, head 1) .. (query 1, head 0) ..     row = query * group + head
//   per chunk:       scores = Q K;  weights = exp2(scores - max);  sums = sums * decay + weights V
#include <cfloat>
#include <type_traits>

#include "attention_decode.h"

namespace memserve::MEMSERVE_ISA {
namespace {

constexpr int kChunkPanels = kChunkTokens / kPanelTokens;

template <class Format, class T>
class TileKernel {
  using Element = typename Format::Element;
  using Unit = typename Format::Unit;

 public:
  explicit TileKernel(const TileJob& job)
      : job_(job), batch_(*job.batch), args_(*job.args), tile_(job.tile),
        pages_(batch_, args_, tile_.row, tile_.kv_head), group_(args_.heads / batch_.layout.num_kv_heads),
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
    if (job_.write_count) write_tokens<T>(batch_, args_, tile_.row, tile_.kv_head, job_.write_first, job_.write_count);
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
      const Unit* panel = key_panel(token, end, &stride);
      multiply(Operands<Format>{reinterpret_cast<const Unit*>(q_), dim_k_ / Format::kUnitTokens, &panel, 1,
                                dim_k_ / Format::kUnitTokens, stride, scores_ + (token - first), kChunkTokens, nullptr},
               rows_, kPanelTokens);
    }
  }

  const Unit* key_panel(int token, int end, int* stride) {
    const int piece = pages_.piece(), block_tokens = batch_.layout.block_tokens;
    if constexpr (std::is_same_v<T, Unit>) {
      if (piece == kPanelTokens) return *stride = block_tokens, pages_.key(token);
    }
    Unit* panel = reinterpret_cast<Unit*>(keys_);
    *stride = kPanelTokens;
    for (int at = 0; at < kPanelTokens && token + at < end; at += piece) {
      const Source<T> columns{pages_.key(token + at), block_tokens, dim_k_, piece, 0, dim_k_};
      pack(Format{}, columns, panel + at, kPanelTokens);
    }
    return panel;
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
    for (int token = first; token < end; token += kPanelTokens, ++count) {
      panels[count] = value_panel(token, end, count);
    }
    const Unit* weights = reinterpret_cast<const Unit*>(weights_);
    multiply(Operands<Format>{weights, kChunkTokens / Format::kUnitTokens, panels, count,
                              kPanelTokens / Format::kUnitTokens, dim_v_padded_, sums_, dim_v_padded_, decay_},
             rows_, padded(dim_v_, kBlockColumns));
  }

  const Unit* value_panel(int token, int end, int index) {
    const int lowest = args_.window > 0 ? first_position_ + 1 - args_.window : 0;  // blocks of older tokens may be gone
    const int piece = pages_.piece();
    if constexpr (std::is_same_v<T, Unit>) {
      const bool whole = lowest <= token && token + kPanelTokens <= end;
      if (whole && piece == kPanelTokens && dim_v_ == dim_v_padded_) return pages_.value(token);
    }
    const int unit_rows = kPanelTokens / Format::kUnitTokens;
    Unit* panel = reinterpret_cast<Unit*>(values_) + int64_t(index) * unit_rows * dim_v_padded_;
    for (int at = 0; at < kPanelTokens; at += piece) {
      // A piece behind the context has no block: its rows are all zeros and its pointer is not followed.
      const int here = token + at < end ? token + at : token;
      const Source<T> rows{pages_.value(here), dim_v_, piece, dim_v_, lowest - token - at, end - token - at};
      pack(Format{}, rows, panel + int64_t(at / Format::kUnitTokens) * dim_v_padded_, dim_v_padded_);
    }
    return panel;
  }

  const TileJob& job_;
  const Batch& batch_;
  const AttendArgs& args_;
  const Tile tile_;
  const HeadPages<T> pages_;
  const int group_, rows_, dim_k_, dim_v_, dim_v_padded_, first_position_;
  const float factor_;  // scores times this factor are exponents of 2
  Element *q_, *weights_, *keys_, *values_;
  float *scores_, *sums_, *max_, *decay_, *denominator_, *next_max_;
};

template <class Format, class T>
void attend_tile(const TileJob& job) {
  if (DecodeKernel<Format, T>::fits(job))
    DecodeKernel<Format, T>(job).run();
  else
    TileKernel<Format, T>(job).run();
}

// Merges the partial results of the parts of a context; overwrites the first part's sums.
template <class T>
void merge_tiles(const Batch& batch, const AttendArgs& args, const Merge& merge, float* partials,
                 size_t part_floats) {
  const int dim_v = batch.layout.head_dim_v;
  const int rows = merge.whole.queries * (args.heads / batch.layout.num_kv_heads);
  for (int r = 0; r < rows; ++r) {
    float* sums = partials + size_t(r) * dim_v;
    const float* stats = partials + size_t(rows) * dim_v + r;
    float max = stats[0];
    for (int p = 1; p < merge.parts; ++p) max = stats[p * part_floats] > max ? stats[p * part_floats] : max;
    float denominator = 0;
    for (int p = 0; p < merge.parts; ++p) {
      const float weight = __builtin_exp2f(stats[p * part_floats] - max);
      const float* part = sums + p * part_floats;
      denominator += weight * stats[p * part_floats + rows];
      for (int d = 0; d < dim_v; ++d) sums[d] = (p ? sums[d] : 0.0f) + weight * part[d];
    }
    write_row<T>(batch, args, merge.whole, r, sums, max, denominator);
  }
}

}  // namespace

#if defined(__AVX512BF16__)
using BFloat16Format = Pairs;
#else
using BFloat16Format = Floats;
#endif

extern const AttentionKernels attention_kernels = {
    {&attend_tile<Floats, float>, &attend_tile<BFloat16Format, BFloat16>, &attend_tile<Floats, Float16>},
    {&merge_tiles<float>, &merge_tiles<BFloat16>, &merge_tiles<Float16>},
    {&write_tokens<float>, &write_tokens<BFloat16>, &write_tokens<Float16>},
};

}  // namespace memserve::MEMSERVE_ISA
