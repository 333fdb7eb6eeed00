// Attention of a few rows, as in decoding: straight from the pages, each line of K and V fetched once, ahead of time.
//
// With a handful of rows the work is reading memory, so nothing is packed: a vector of page elements is widened in
// registers and used for all rows. Blocks lie far apart, so hardware prefetching does not help; the kernel prefetches
// what it reads kAheadParts later, into the next tile too.
#pragma once

#include "attention_rows.h"

namespace memserve::MEMSERVE_ISA {
namespace {

constexpr int kDecodeRowsMax = 8;        // with more rows, packing a panel once is cheaper
constexpr int kDecodeTokens = 256;       // per round of the online softmax; scores stay in L1
constexpr int kAheadParts = 12;          // of about 4 KiB: enough to hide the latency, and a small part of L2
constexpr int kRowsTogether = kLanes == 16 ? 4 : 3;  // their sums stay in registers

// ---- two vectors of page elements, in the cheapest order ----

struct Two {
  VecF a, b;
};

template <int... I>
inline Two zip(Two v, std::integer_sequence<int, I...>) {
  return {__builtin_shufflevector(v.a, v.b, (I % 2 * kLanes + I / 2)...),
          __builtin_shufflevector(v.a, v.b, (I % 2 * kLanes + kLanes / 2 + I / 2)...)};
}

inline Two load_two(const float* p) { return {load(p), load(p + kLanes)}; }

inline Two load_two(const Float16* p) {
  alignas(64) float wide[2 * kLanes];
  if constexpr (kLanes < 8) {
    widen(p, wide, 2 * kLanes);
  } else {
    widen(p, wide, kLanes);
    widen(p + kLanes, wide + kLanes, kLanes);
  }
  return load_two(wide);
}

// Even elements, then odd ones: two operations for two vectors.
inline Two load_two(const BFloat16* p) {
  VecI pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  return {(VecF)(pairs << 16), (VecF)(pairs & int32_t(0xffff0000))};
}

template <class T>
inline Two in_order(Two v) {
  if constexpr (std::is_same_v<T, BFloat16>) return zip(v, std::make_integer_sequence<int, kLanes>{});
  return v;
}

inline void store_two(float* p, Two v) {
  store(p, v.a);
  store(p + kLanes, v.b);
}

// ---- what will be read ----

// The panels' K and V in the order of reading (per round K K .. V V ..), then those of the next tiles.
template <class Pages, int kParts = kAheadParts>
class ReadAhead {
  using Pointer = decltype(std::declval<const Pages&>().key(0));

 public:
  explicit ReadAhead(const TileJob& job) : job_(job), pages_(*job.batch, *job.args, 0, 0) {
    start(job.planned);
    for (int i = 0; i < kParts; ++i) next();
  }

  // The part to prefetch now; nullptr at the end.
  Pointer next() {
    if (!tile_) return nullptr;
    const int end = std::min(first_ + kDecodeTokens, tile_->end_token);
    const int panels = padded(end - first_, kPanelTokens) / kPanelTokens;
    const Pointer part = part_ < panels ? pages_.key(first_ + part_ * kPanelTokens)
                                         : pages_.value(first_ + (part_ - panels) * kPanelTokens);
    if (++part_ == 2 * panels) {
      part_ = 0;
      first_ += kDecodeTokens;
      if (first_ >= tile_->end_token)
        start(job_.planned_end - tile_ > job_.planned_step ? tile_ + job_.planned_step : nullptr);
    }
    return part;
  }

 private:
  void start(const Tile* tile) {
    tile_ = tile;
    if (!tile) return;
    pages_ = Pages(*job_.batch, *job_.args, tile->row, tile->kv_head);
    first_ = tile->first_token;
  }

  const TileJob& job_;
  Pages pages_;
  const Tile* tile_;
  int first_, part_ = 0;
};

// Into L2, which has more lines in flight than L1: L1's two dozen would limit a core to a third of its bandwidth.
inline void prefetch_bytes(const char* from, int bytes) {
  for (int byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 1);
}

// ---- scores of one panel: R rows, all its tokens ----

// `ahead` is prefetched line by line while the panel is computed.
template <int R, class T>
void score_panel(Floats, const float* q, int dim, const T* keys, int stride, const T* ahead, float* scores) {
  constexpr int kVectors = kPanelTokens / kBlockColumns;
  Two sums[R][kVectors] = {};
  for (int d = 0; d < dim; ++d, keys += stride, ahead += kPanelTokens) {
    prefetch_bytes(reinterpret_cast<const char*>(ahead), kPanelTokens * sizeof(T));
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      const Two key = load_two(keys + c * kBlockColumns);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        sums[r][c].a += key.a * q[r * dim + d];
        sums[r][c].b += key.b * q[r * dim + d];
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kVectors; ++c)
      store_two(scores + r * kDecodeTokens + c * kBlockColumns, in_order<T>(sums[r][c]));
}

#if defined(__AVX512BF16__)
template <int... I>
inline Two quads_in_order(VecF low, VecF high, std::integer_sequence<int, I...>) {
  return {__builtin_shufflevector(low, high, (I / 4 % 2 * 16 + I / 8 * 4 + I % 4)...),
          __builtin_shufflevector(low, high, (I / 4 % 2 * 16 + I / 8 * 4 + 8 + I % 4)...)};
}

// Two rows of K interleave in registers to pairs; the tokens' order is restored at the end.
template <int R>
void score_panel(Pairs, const BFloat16* q, int dim, const BFloat16* keys, int stride, const BFloat16* ahead,
                 float* scores) {
  VecF low[R] = {}, high[R] = {};
  for (int d = 0; d < dim; d += 2, keys += 2 * stride, ahead += 2 * kPanelTokens) {
    prefetch_bytes(reinterpret_cast<const char*>(ahead), 2 * kPanelTokens * sizeof(BFloat16));
    const __m512i even = _mm512_loadu_si512(keys), odd = _mm512_loadu_si512(keys + stride);
    const __m512i pairs_low = _mm512_unpacklo_epi16(even, odd), pairs_high = _mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      uint32_t pair;
      std::memcpy(&pair, q + r * dim + d, sizeof pair);
      low[r] = Pairs::multiply_add(low[r], pair, pairs_low);
      high[r] = Pairs::multiply_add(high[r], pair, pairs_high);
    }
  }
  for (int r = 0; r < R; ++r)
    store_two(scores + r * kDecodeTokens, quads_in_order(low[r], high[r], std::make_integer_sequence<int, 16>{}));
}
#endif

// ---- weighted sums of one panel: R rows, C pairs of vectors of columns ----

// sums = sums * decay + weights V over `count` tokens; sums lie in the order of load_two.
template <int R, int C, class T>
void sum_panel(const float* weights, const T* values, int dim, int count, const T* ahead, const float* decay,
               float* sums) {
  Two held[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const float* at = sums + r * dim + c * kBlockColumns;
      held[r][c] = {load(at) * decay[r], load(at + kLanes) * decay[r]};
    }
  for (int t = 0; t < count; ++t, values += dim, ahead += dim) {
    prefetch_bytes(reinterpret_cast<const char*>(ahead), C * kBlockColumns * sizeof(T));
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Two value = load_two(values + c * kBlockColumns);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        held[r][c].a += value.a * weights[r * kDecodeTokens + t];
        held[r][c].b += value.b * weights[r * kDecodeTokens + t];
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store_two(sums + r * dim + c * kBlockColumns, held[r][c]);
}

// Calls `work.operator()<R>(row)` for R of the `rows` at a time.
template <class Work>
void in_groups(int rows, const Work& work) {
  for (int row = 0; row < rows; row += kRowsTogether) {
    const int some = std::min(kRowsTogether, rows - row);
    if (some == 1) work.template operator()<1>(row);
    if (some == 2) work.template operator()<2>(row);
    if (some == 3) work.template operator()<3>(row);
    if (some == 4) work.template operator()<4>(row);
  }
}

template <class Format, class T>
class DecodeKernel {
  using Element = std::conditional_t<std::is_same_v<Format, Floats>, float, T>;

 public:
  static bool fits(const TileJob& job) {
    const PageLayout& layout = job.batch->layout;
    return job.tile.queries * (job.args->heads / layout.num_kv_heads) <= kDecodeRowsMax &&
           layout.block_tokens % kPanelTokens == 0 && layout.head_dim_v % kBlockColumns == 0 && !layout.latent;
  }

  explicit DecodeKernel(const TileJob& job)
      : job_(job), batch_(*job.batch), args_(*job.args), tile_(job.tile),
        pages_(batch_, args_, tile_.row, tile_.kv_head), ahead_(job),
        group_(args_.heads / batch_.layout.num_kv_heads), rows_(tile_.queries * group_),
        dim_k_(batch_.layout.head_dim_k), dim_v_(batch_.layout.head_dim_v),
        first_position_(batch_.first_position(tile_.row) + tile_.first_query),
        factor_(args_.softcap > 0 ? kLog2E : args_.scale * kLog2E) {
    scores_ = reinterpret_cast<float*>(job.scratch);
    sums_ = scores_ + kDecodeRowsMax * kDecodeTokens;
    q_ = reinterpret_cast<Element*>(sums_ + kDecodeRowsMax * dim_v_);
  }

  void run() {
    for (int r = 0; r < rows_; ++r) {
      load_query<Element, T>(batch_, args_, tile_, r, q_ + r * dim_k_);
      max_[r] = -__builtin_inff();
      denominator_[r] = 0;
    }
    std::memset(sums_, 0, sizeof(float) * rows_ * dim_v_);
    for (int token = tile_.first_token; token < tile_.end_token; token += kDecodeTokens) {
      const int end = std::min(token + kDecodeTokens, tile_.end_token);
      score_round(token, end);
      weigh_round(token, end);
      sum_round(token, end);
    }
    for (int i = 0; i < rows_ * dim_v_; i += kBlockColumns)
      store_two(sums_ + i, in_order<T>({load(sums_ + i), load(sums_ + i + kLanes)}));
    deliver<T>(job_, rows_, sums_, dim_v_, max_, denominator_);
  }

 private:
  // New tokens are stored a panel before they are read: by then their lines have arrived and the stores are done.
  void write_before(int token) {
    if (written_ || token + 2 * kPanelTokens <= batch_.first_position(tile_.row) + job_.write_first) return;
    written_ = true;
    write_tokens<T>(batch_, args_, tile_.row, tile_.kv_head, job_.write_first, job_.write_count);
  }

  void score_round(int first, int end) {
    for (int token = first; token < end; token += kPanelTokens) {
      write_before(token);
      const T* keys = pages_.key(token);
      const T* ahead = ahead_.next();
      in_groups(rows_, [&]<int R>(int row) {
        score_panel<R>(Format{}, q_ + row * dim_k_, dim_k_, keys, batch_.layout.block_tokens, ahead ? ahead : keys,
                       scores_ + row * kDecodeTokens + (token - first));
      });
    }
  }

  void weigh_round(int first, int end) {
    for (int r = 0; r < rows_; ++r)
      decay_[r] = weigh_row(args_, scores_ + r * kDecodeTokens, first_position_ + r / group_, first, end, factor_,
                            max_[r], denominator_[r]);
  }

  void sum_round(int first, int end) {
    const int lowest = args_.reach.oldest(first_position_);  // older may be gone
    const float ones[kDecodeRowsMax] = {1, 1, 1, 1, 1, 1, 1, 1};
    for (int token = first; token < end; token += kPanelTokens) {
      const int skipped = std::clamp(lowest - token, 0, kPanelTokens);
      const int count = std::min(end - token, kPanelTokens) - skipped;
      const T* values = pages_.value(token) + int64_t(skipped) * dim_v_;
      const T* ahead = ahead_.next();
      const float* weights = scores_ + (token - first) + skipped;
      sum_columns(weights, values, std::max(count, 0), ahead ? ahead : values, token == first ? decay_ : ones);
    }
  }

  void sum_columns(const float* weights, const T* values, int count, const T* ahead, const float* decay) {
    int column = 0;
    const auto columns = [&]<int C>() {
      in_groups(rows_, [&]<int R>(int row) {
        sum_panel<R, C>(weights + row * kDecodeTokens, values + column, dim_v_, count, ahead + column, decay + row,
                        sums_ + row * dim_v_ + column);
      });
      column += C * kBlockColumns;
    };
    if constexpr (kLanes == 16)
      while (column + 2 * kBlockColumns <= dim_v_) columns.template operator()<2>();
    while (column < dim_v_) columns.template operator()<1>();
  }

  const TileJob& job_;
  const Batch& batch_;
  const AttendArgs& args_;
  const Tile& tile_;
  const HeadPages<T> pages_;
  ReadAhead<HeadPages<T>> ahead_;
  const int group_, rows_, dim_k_, dim_v_, first_position_;
  const float factor_;  // scores times this factor are exponents of 2
  float *scores_, *sums_;
  Element* q_;
  float max_[kDecodeRowsMax], denominator_[kDecodeRowsMax], decay_[kDecodeRowsMax];
  bool written_ = job_.write_count == 0;
};

}  // namespace
}  // namespace memserve::MEMSERVE_ISA
