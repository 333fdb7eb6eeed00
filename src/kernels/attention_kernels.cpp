// Paged attention of one tile, compiled once per instruction set: FlashAttention's online softmax (Dao et al. 2022,
// algorithm 1) over chunks of the paged context, all query heads of a kv head together.
//
//   rows of a tile:  (query 0, head 0) (query 0, head 1) .. (query 1, head 0) ..     row = query * group + head
//   per chunk:       scores = Q K;  weights = exp2(scores - max);  sums = sums * decay + weights V
#include <cfloat>
#include <type_traits>

#include "attention_pack.h"

namespace memserve::MEMSERVE_ISA {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kPrefetchParts = 3;
constexpr int kChunkPanels = kChunkTokens / kPanelTokens;

template <class Format, class T>
class TileKernel {
  using Element = typename Format::Element;
  using Unit = typename Format::Unit;

 public:
  explicit TileKernel(const TileJob& job)
      : batch_(*job.batch), args_(*job.args), tile_(job.tile), pages_(batch_, args_, tile_),
        group_(args_.heads / batch_.layout.num_kv_heads), rows_(tile_.queries * group_),
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

  void run(float* partial) {
    load_queries();
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
    partial ? save(partial) : finish();
  }

 private:
  template <class E>
  static E* take(char*& free, int64_t count) {
    E* here = reinterpret_cast<E*>(free);
    free += (count * sizeof(E) + 63) / 64 * 64;
    return here;
  }

  void load_queries() {
    const T* q = reinterpret_cast<const T*>(args_.q.data);
    for (int r = 0; r < rows_; ++r) {
      const int64_t token = batch_.q_starts[tile_.row] + tile_.first_query + r / group_;
      const int64_t head = int64_t(tile_.kv_head) * group_ + r % group_;
      const T* from = q + token * args_.q.token_stride + head * args_.q.head_stride;
      Element* to = q_ + int64_t(r) * dim_k_;
      if constexpr (sizeof(Element) == sizeof(T))
        std::memcpy(to, from, dim_k_ * sizeof(T));
      else
        widen(from, to, dim_k_);
    }
  }

  // scores[rows, chunk] = Q K, one panel after the other so that the packed panel stays in L1.
  void score_chunk(int first, int end) {
    for (int token = first; token < end; token += kPanelTokens) {
      prefetch(first, end, (token - first) / kPanelTokens);
      int stride;
      const Unit* panel = key_panel(token, end, &stride);
      multiply(Operands<Format>{reinterpret_cast<const Unit*>(q_), dim_k_ / Format::kUnitTokens, &panel, 1,
                                dim_k_ / Format::kUnitTokens, stride, scores_ + (token - first), kChunkTokens, nullptr},
               rows_, kPanelTokens);
    }
  }

  // With few rows a tile waits for memory. Parts are read in the order K K K K V V V V K K ..; `part` is about to be,
  // and what comes kPrefetchParts later is asked for.
  void prefetch(int first, int end, int part) const {
    if (rows_ > kBlockRows) return;
    int panels = padded(end - first, kPanelTokens) / kPanelTokens;
    part += kPrefetchParts;
    if (part >= 2 * panels) {
      part -= 2 * panels;
      first = end;
      end = first + kChunkTokens < tile_.end_token ? first + kChunkTokens : tile_.end_token;
      panels = padded(end - first, kPanelTokens) / kPanelTokens;
    }
    if (part < panels)
      pages_.prefetch_keys(first + part * kPanelTokens);
    else if (part < 2 * panels)
      pages_.prefetch_values(first + (part - panels) * kPanelTokens);
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

  // Scores to weights in place of the online softmax: mask, new maxima, exp2, denominators, decay of what was summed.
  void weigh_chunk(int first, int end) {
    const int tokens = padded(end - first, kPanelTokens);
    for (int r = 0; r < rows_; ++r) {
      float* scores = scores_ + int64_t(r) * kChunkTokens;
      if (args_.softcap > 0) cap(scores, tokens);
      const int position = first_position_ + r / group_;
      const int visible_end = (position + 1 < end ? position + 1 : end) - first;
      const int visible_first = args_.window > 0 ? position + 1 - args_.window - first : 0;
      if (visible_end < tokens || visible_first > 0) mask(scores, tokens, visible_first, visible_end);
      VecF best = load(scores);
      for (int t = kLanes; t < tokens; t += kLanes) best = larger(best, load(scores + t));
      next_max_[r] = largest_lane(best) * factor_;
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
      denominator_[r] += exponentiate(scores_ + row, weights_ + row, tokens, max_[r]);
    }
  }

  void cap(float* scores, int tokens) const {
    for (int t = 0; t < tokens; t += kLanes)
      store(scores + t, tanh(load(scores + t) * (args_.scale / args_.softcap)) * args_.softcap);
  }

  static void mask(float* scores, int tokens, int visible_first, int visible_end) {
    for (int t = 0; t < tokens; t += kLanes) {
      const VecI index = lane_numbers() + t;
      const VecI hidden = (index < visible_first) | (index >= visible_end);
      store(scores + t, hidden ? splat(-__builtin_inff()) : load(scores + t));
    }
  }

  // weights = 2^(scores * factor - max); returns their sum.
  float exponentiate(const float* scores, Element* weights, int tokens, float max) const {
    VecF sum{};
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<Element, BFloat16>) {
      for (int t = 0; t < tokens; t += 2 * kLanes) {
        const VecF low = exp2<Format::kFastExp>(load(scores + t) * factor_ - max);
        const VecF high = exp2<Format::kFastExp>(load(scores + t + kLanes) * factor_ - max);
        sum += low + high;
        _mm512_storeu_si512(weights + t, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
      return sum_of_lanes(sum);
    }
#endif
    if constexpr (std::is_same_v<Element, float>)
      for (int t = 0; t < tokens; t += kLanes) {
        const VecF weight = exp2<Format::kFastExp>(load(scores + t) * factor_ - max);
        sum += weight;
        store(weights + t, weight);
      }
    return sum_of_lanes(sum);
  }

  // sums[rows, dim_v] = sums * decay + weights V
  void sum_chunk(int first, int end) {
    const Unit* panels[kChunkPanels];
    int count = 0;
    for (int token = first; token < end; token += kPanelTokens, ++count) {
      prefetch(first, end, padded(end - first, kPanelTokens) / kPanelTokens + count);
      panels[count] = value_panel(token, end, count);
    }
    const Unit* weights = reinterpret_cast<const Unit*>(weights_);
    multiply(Operands<Format>{weights, kChunkTokens / Format::kUnitTokens, panels, count,
                              kPanelTokens / Format::kUnitTokens, dim_v_padded_, sums_, dim_v_padded_, decay_},
             rows_, padded(dim_v_, kBlockColumns));
  }

  const Unit* value_panel(int token, int end, int index) {
    const int lowest = args_.window > 0 ? first_position_ + 1 - args_.window : 0;  // older tokens may be gone
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

  void save(float* partial) const {
    for (int r = 0; r < rows_; ++r)
      std::memcpy(partial + int64_t(r) * dim_v_, sums_ + int64_t(r) * dim_v_padded_, dim_v_ * sizeof(float));
    std::memcpy(partial + int64_t(rows_) * dim_v_, max_, rows_ * sizeof(float));
    std::memcpy(partial + int64_t(rows_) * (dim_v_ + 1), denominator_, rows_ * sizeof(float));
  }

  void finish() {
    for (int r = 0; r < rows_; ++r)
      write_row<T>(batch_, args_, tile_, r, sums_ + int64_t(r) * dim_v_padded_, max_[r], denominator_[r]);
  }

 public:
  // out = sums / (denominator + 2^(sink - max)); overwrites `sums`.
  template <class O>
  static void write_row(const Batch& batch, const AttendArgs& args, const Tile& tile, int r, float* sums, float max,
                        float denominator) {
    const int group = args.heads / batch.layout.num_kv_heads, head = tile.kv_head * group + r % group;
    if (args.sinks) denominator += __builtin_exp2f(args.sinks[head] * kLog2E - max);
    const float inverse = 1.0f / denominator;
    for (int d = 0; d < batch.layout.head_dim_v; ++d) sums[d] *= inverse;
    const int64_t token = batch.q_starts[tile.row] + tile.first_query + r / group;
    O* to = reinterpret_cast<O*>(args.out.data) + token * args.out.token_stride + head * args.out.head_stride;
    narrow(sums, to, batch.layout.head_dim_v);
  }

 private:
  const Batch& batch_;
  const AttendArgs& args_;
  const Tile tile_;
  const HeadPages<T> pages_;
  const int group_, rows_, dim_k_, dim_v_, dim_v_padded_, first_position_;
  const float factor_;  // scores times this are exponents of 2
  Element *q_, *weights_, *keys_, *values_;
  float *scores_, *sums_, *max_, *decay_, *denominator_, *next_max_;
};

template <class Format, class T>
void attend_tile(const TileJob& job) {
  TileKernel<Format, T>(job).run(job.partial);
}

// One result from the partial results of several parts of the context; the first part's sums are overwritten.
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
    TileKernel<Floats, T>::template write_row<T>(batch, args, merge.whole, r, sums, max, denominator);
  }
}

// The new tokens of one row for one kv head: a key becomes a column of its block, a value a row.
template <class T>
void write_tokens(const Batch& batch, const AttendArgs& args, int row, int kv_head, int first, int count) {
  const PageLayout& layout = batch.layout;
  const HeadPages<T> pages(batch, args, Tile{row, kv_head, 0, 0, 0, 0, -1, -1, false});
  for (int i = first; i < first + count; ++i) {
    const int position = batch.first_position(row) + i;
    const int64_t token = batch.q_starts[row] + i;
    const T* k = reinterpret_cast<const T*>(args.k.data) + token * args.k.token_stride + kv_head * args.k.head_stride;
    const T* v = reinterpret_cast<const T*>(args.v.data) + token * args.v.token_stride + kv_head * args.v.head_stride;
    T* column = pages.key(position);
    for (int d = 0; d < layout.head_dim_k; ++d) column[int64_t(d) * layout.block_tokens] = k[d];
    std::memcpy(pages.value(position), v, layout.head_dim_v * sizeof(T));
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
