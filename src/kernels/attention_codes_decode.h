// Attention of a few rows over pages of codes, as in decoding: see attention_decode.h.
//
// Two ways to multiply. Floats: codes are widened in registers. Bytes: queries become whole numbers of 15 bits and weights
// of 16 bits, each as two bytes, whose dot products with codes are exact (AVX-512 VNNI); scales come last.
#pragma once

#include "attention_codes.h"
#include "attention_decode.h"

namespace memserve::MEMSERVE_ISA {
namespace {

constexpr int kRoundPanels = kDecodeTokens / kPanelTokens;

// K of kPanelTokens tokens.
struct KeyPanel {
  const char *units, *ahead;  // `ahead` is prefetched while the panel is computed
  int stride;                 // of both, in bytes
  const uint16_t* maxima;
  int maxima_stride;
};

// V of a round's tokens, from one column on.
struct ValuePanels {
  const char *units[kRoundPanels], *ahead[kRoundPanels];
  const uint16_t* maxima[kRoundPanels];
  int count, stride;
};

// What the rows of a tile have in common with each other: where their queries and weights lie.
struct DecodeSpace {
  float* queries;  // [rows, dim_k]
  float* weights;  // [rows, kDecodeTokens]
  int dim_k;
};

template <Scheme S>
class FloatMath {
  static constexpr int kDepth = Codes<S>::kDepth, kGroup = Codes<S>::kGroup;

 public:
  explicit FloatMath(const DecodeSpace& space) : space_(space) {}

  void take_query(int row, const float* query) {
    std::memcpy(space_.queries + row * space_.dim_k, query, space_.dim_k * sizeof(float));
  }

  template <int R>
  void score(int row, const KeyPanel& keys, float* scores) const {
    const int dim = space_.dim_k;
    const float* q = space_.queries + row * dim;
    for (int column = 0; column < kPanelTokens; column += kBlockColumns) {
      VecF totals[R][2] = {};
      for (int d = 0, group = 0, at = column * kUnitBytes; d < dim; ++group) {
        VecF sums[R][2] = {};
        for (const int end = std::min(d + kGroup, dim); d < end; d += kDepth, at += keys.stride) {
          prefetch_bytes(keys.ahead + at, kBlockColumns * kUnitBytes);
          add_products<R>(load_units(keys.units + at), load_units(keys.units + at + kLanes * kUnitBytes), q + d, sums);
        }
        const uint16_t* maxima = keys.maxima + group * keys.maxima_stride + column;
        const VecF left = load_scales<S>(maxima), right = load_scales<S>(maxima + kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          totals[r][0] += sums[r][0] * left;
          totals[r][1] += sums[r][1] * right;
        }
      }
      for (int r = 0; r < R; ++r) {
        store(scores + r * kDecodeTokens + column, totals[r][0]);
        store(scores + r * kDecodeTokens + column + kLanes, totals[r][1]);
      }
    }
  }

  // `weights`: of the row times the scales of V.
  void take_weights(int row, const float* weights, int tokens) {
    std::memcpy(space_.weights + row * kDecodeTokens, weights, tokens * sizeof(float));
  }

  template <int R, int C>
  void sum(int row, const ValuePanels& values, const float* decay, float* sums, int dim) const {
    VecF held[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) held[r][c] = load(sums + r * dim + c * kLanes) * decay[r];
    const float* weights = space_.weights + row * kDecodeTokens;
    for (int panel = 0; panel < values.count; ++panel)
      for (int t = 0, at = 0; t < kPanelTokens; t += kDepth, at += values.stride, weights += kDepth) {
        prefetch_bytes(values.ahead[panel] + at, C * kLanes * kUnitBytes);
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
          const VecI units = load_units(values.units[panel] + at + c * kLanes * kUnitBytes);
#pragma GCC unroll 8
          for (int i = 0; i < kDepth; ++i) {
            const VecF value = codes_at<S>(units, i);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) held[r][c] += value * weights[r * kDecodeTokens + i];
          }
        }
      }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) store(sums + r * dim + c * kLanes, held[r][c]);
  }

 private:
  template <int R>
  void add_products(VecI left, VecI right, const float* q, VecF (&sums)[R][2]) const {
#pragma GCC unroll 8
    for (int i = 0; i < kDepth; ++i) {
      const VecF a = codes_at<S>(left, i), b = codes_at<S>(right, i);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        sums[r][0] += a * q[r * space_.dim_k + i];
        sums[r][1] += b * q[r * space_.dim_k + i];
      }
    }
  }

  DecodeSpace space_;
};

#if defined(__AVX512VNNI__)
// For int8 and int4: the quads of a unit are four codes, without a sign where they are the first operand of a product.
template <Scheme S>
class ByteMath {
  static constexpr bool kHalf = S == Scheme::int4;
  static constexpr int kDepth = Codes<S>::kDepth, kGroup = Codes<S>::kGroup, kQuads = kDepth / 4;
  static constexpr int kOffset = kHalf ? 8 : 128;                // what is added to a code, so that none is negative
  static constexpr float kQueryMax = 127 * 128, kWeightMax = 65535;

 public:
  explicit ByteMath(const DecodeSpace& space) : space_(space) {
    high_ = reinterpret_cast<int8_t*>(space.queries);
    low_ = high_ + kDecodeRowsMax * space.dim_k;
    weights_high_ = reinterpret_cast<uint8_t*>(space.weights);
    weights_low_ = weights_high_ + kDecodeRowsMax * kDecodeTokens;
  }

  void take_query(int row, const float* query) {
    const int dim = space_.dim_k;
    uint32_t most = 0;
    for (int d = 0; d < dim; ++d) most = std::max(most, std::bit_cast<uint32_t>(query[d]) & 0x7FFFFFFF);
    const float largest = std::bit_cast<float>(most);  // no number where one of the query is none
    query_scales_[row] = largest / kQueryMax;
    const float inverse = largest > 0 && largest < __builtin_inff() ? kQueryMax / largest : 0;
    int8_t *to_high = high_ + row * dim, *to_low = low_ + row * dim;
    for (int first = 0, group = 0; first < dim; first += kGroup, ++group) {
      int32_t sum_high = 0, sum_low = 0;
      for (int d = first; d < std::min(first + kGroup, dim); ++d) {
        const int whole = __builtin_irintf(query[d] * inverse), high = (whole + 64) >> 7, low = whole - high * 128;
        to_high[d] = int8_t(high);
        to_low[d] = int8_t(low);
        sum_high += high;
        sum_low += low;
      }
      offsets_[row][group][0] = -kOffset * sum_high;
      offsets_[row][group][1] = -kOffset * sum_low;
    }
  }

  template <int R>
  void score(int row, const KeyPanel& keys, float* scores) const {
    const int dim = space_.dim_k;
    VecF totals[R][2] = {};
    for (int d = 0, group = 0, at = 0; d < dim; ++group) {
      __m512i high[R][2], low[R][2];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        high[r][0] = high[r][1] = _mm512_set1_epi32(offsets_[row + r][group][0]);
        low[r][0] = low[r][1] = _mm512_set1_epi32(offsets_[row + r][group][1]);
      }
      for (const int end = std::min(d + kGroup, dim); d < end; d += kDepth, at += keys.stride) {
        prefetch_bytes(keys.ahead + at, kPanelTokens * kUnitBytes);
        const __m512i left = _mm512_loadu_si512(keys.units + at), right = _mm512_loadu_si512(keys.units + at + 64);
#pragma GCC unroll 2
        for (int quad = 0; quad < kQuads; ++quad) {
          const __m512i a = unsigned_quad(left, quad), b = unsigned_quad(right, quad);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const __m512i q_high = broadcast(high_ + (row + r) * dim + d + 4 * quad);
            const __m512i q_low = broadcast(low_ + (row + r) * dim + d + 4 * quad);
            high[r][0] = add_quads(high[r][0], a, q_high);
            high[r][1] = add_quads(high[r][1], b, q_high);
            low[r][0] = add_quads(low[r][0], a, q_low);
            low[r][1] = add_quads(low[r][1], b, q_low);
          }
        }
      }
      const uint16_t* maxima = keys.maxima + group * keys.maxima_stride;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const VecF scales = load_scales<S>(maxima + half * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[r][half], 7), low[r][half]);
          totals[r][half] += _mm512_cvtepi32_ps(whole) * scales;
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      store(scores + r * kDecodeTokens, totals[r][0] * query_scales_[row + r]);
      store(scores + r * kDecodeTokens + kLanes, totals[r][1] * query_scales_[row + r]);
    }
  }

  void take_weights(int row, const float* weights, int tokens) {
    VecF most = {}, sum = {};
    for (int t = 0; t < tokens; t += kLanes) {
      most = larger(most, load(weights + t));
      sum += load(weights + t);
    }
    const float largest = largest_lane(most), total = sum_of_lanes(sum);
    const float inverse = largest > 0 ? kWeightMax / largest : 0;
    weight_scales_[row] = largest / kWeightMax + (total - total);
    VecI wholes = {};
    for (int t = 0; t < tokens; t += kLanes) {
      const __m512i whole = _mm512_cvtps_epi32(load(weights + t) * inverse);
      wholes += (VecI)whole;
      const int64_t at = int64_t(row) * kDecodeTokens + t;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(weights_high_ + at),
                       _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(weights_low_ + at), _mm512_cvtepi32_epi8(whole));
    }
    weight_offsets_[row] = kHalf ? kOffset * _mm512_reduce_add_epi32((__m512i)wholes) : 0;
  }

  template <int R, int C>
  void sum(int row, const ValuePanels& values, const float* decay, float* sums, int dim) const {
    __m512i high[R][C], low[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) high[r][c] = low[r][c] = _mm512_setzero_si512();
    const uint8_t *w_high = weights_high_ + row * kDecodeTokens, *w_low = weights_low_ + row * kDecodeTokens;
    for (int panel = 0; panel < values.count; ++panel)
      for (int t = 0, at = 0; t < kPanelTokens; t += kDepth, at += values.stride, w_high += kDepth, w_low += kDepth) {
        prefetch_bytes(values.ahead[panel] + at, C * kLanes * kUnitBytes);
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
          const __m512i units = _mm512_loadu_si512(values.units[panel] + at + c * 64);
#pragma GCC unroll 2
          for (int quad = 0; quad < kQuads; ++quad) {
            const __m512i codes = kHalf ? unsigned_quad(units, quad) : units;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
              const int place = r * kDecodeTokens + 4 * quad;
              high[r][c] = add_quads(high[r][c], broadcast(w_high + place), codes);
              low[r][c] = add_quads(low[r][c], broadcast(w_low + place), codes);
            }
          }
        }
      }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[r][c], 8), low[r][c]);
        const VecF exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(whole, _mm512_set1_epi32(weight_offsets_[row + r])));
        float* to = sums + r * dim + c * kLanes;
        store(to, load(to) * decay[r] + exact * weight_scales_[row + r]);
      }
  }

 private:
  template <class Byte>
  static __m512i broadcast(const Byte* quad) {
    int32_t bits;
    std::memcpy(&bits, quad, sizeof bits);
    return _mm512_set1_epi32(bits);
  }

  // As _mm512_dpbusd_epi32, around which gcc 12 copies every sum twice.
  static __m512i add_quads(__m512i sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
    return sum;
  }

  // Four codes of each unit, plus kOffset.
  static __m512i unsigned_quad(__m512i units, int quad) {
    if constexpr (!kHalf) return _mm512_xor_si512(units, _mm512_set1_epi32(int(0x80808080)));
    const __m512i codes = _mm512_xor_si512(units, _mm512_set1_epi32(int(0x88888888)));
    return _mm512_and_si512(quad ? _mm512_srli_epi32(codes, 4) : codes, _mm512_set1_epi32(0x0F0F0F0F));
  }

  static constexpr int kGroupsMax = kCodedDimMax / (kHalf ? kGroup : kCodedDimMax);

  DecodeSpace space_;
  int8_t *high_, *low_;  // queries = high * 128 + low
  uint8_t *weights_high_, *weights_low_;
  float query_scales_[kDecodeRowsMax], weight_scales_[kDecodeRowsMax];
  int32_t offsets_[kDecodeRowsMax][kGroupsMax][2], weight_offsets_[kDecodeRowsMax];
};
#endif

template <Scheme S, class T, class Math>
class CodedDecodeKernel {
  static constexpr int kGroup = Codes<S>::kGroup;

 public:
  static bool fits(const TileJob& job) {
    const PageLayout& layout = job.batch->layout;
    return job.tile.queries * (job.args->heads / layout.num_kv_heads) <= kDecodeRowsMax &&
           layout.block_tokens % kPanelTokens == 0 && layout.head_dim_v % kLanes == 0;
  }

  explicit CodedDecodeKernel(const TileJob& job)
      : job_(job), batch_(*job.batch), args_(*job.args), tile_(job.tile),
        pages_(batch_, args_, tile_.row, tile_.kv_head), ahead_(job),
        group_(args_.heads / batch_.layout.num_kv_heads), rows_(tile_.queries * group_),
        dim_v_(batch_.layout.head_dim_v), first_position_(batch_.first_position(tile_.row) + tile_.first_query),
        factor_(args_.softcap > 0 ? kLog2E : args_.scale * kLog2E), scores_(reinterpret_cast<float*>(job.scratch)),
        sums_(scores_ + kDecodeRowsMax * kDecodeTokens), math_(space()) {}

  void run() {
    float query[kCodedDimMax];
    for (int r = 0; r < rows_; ++r) {
      load_query<float, T>(batch_, args_, tile_, r, query);
      math_.take_query(r, query);
      max_[r] = -__builtin_inff();
      denominator_[r] = 0;
    }
    std::memset(sums_, 0, sizeof(float) * rows_ * dim_v_);
    for (int token = tile_.first_token; token < tile_.end_token; token += kDecodeTokens) {
      const int end = std::min(token + kDecodeTokens, tile_.end_token);
      score_round(token, end);
      for (int r = 0; r < rows_; ++r)
        decay_[r] = weigh_row(args_, scores_ + r * kDecodeTokens, first_position_ + r / group_, token, end, factor_,
                              max_[r], denominator_[r]);
      sum_round(token, end);
    }
    deliver<T>(job_, rows_, sums_, dim_v_, max_, denominator_);
  }

 private:
  DecodeSpace space() const {
    float* queries = sums_ + kDecodeRowsMax * dim_v_;
    const int dim_k = batch_.layout.head_dim_k;
    return {queries, queries + kDecodeRowsMax * dim_k, dim_k};
  }

  // See DecodeKernel.
  void write_before(int token) {
    if (written_ || token + 2 * kPanelTokens <= batch_.first_position(tile_.row) + job_.write_first) return;
    written_ = true;
    write_codes<S, T>(batch_, args_, tile_.row, tile_.kv_head, job_.write_first, job_.write_count);
  }

  void score_round(int first, int end) {
    for (int token = first; token < end; token += kPanelTokens) {
      write_before(token);
      const char *keys = pages_.key(token), *ahead = ahead_.next();
      if (ahead) prefetch_bytes(ahead + pages_.maxima_offset(), 2 * kPanelTokens * int(sizeof(uint16_t)));
      const KeyPanel panel{keys, ahead ? ahead : keys, pages_.key_stride(), pages_.key_maxima(token),
                           pages_.maxima_stride()};
      in_groups(rows_, [&]<int R>(int row) {
        math_.template score<R>(row, panel, scores_ + row * kDecodeTokens + (token - first));
      });
    }
  }

  void sum_round(int first, int end) {
    ValuePanels values{{}, {}, {}, 0, pages_.value_stride()};
    for (int token = first; token < end; token += kPanelTokens, ++values.count) {
      const char *here = pages_.value(token), *ahead = ahead_.next();
      values.units[values.count] = here;
      values.ahead[values.count] = ahead ? ahead : here;
      values.maxima[values.count] = pages_.value_maxima(token);
    }
    for (int column = 0; column < dim_v_; column += kGroup) {
      weigh_values(values, column / kGroup);
      sum_columns(values, column, std::min(column + kGroup, dim_v_));
    }
  }

  // Weights times the scales of V. A weight of zero stays zero: what no query sees may be no number.
  void weigh_values(const ValuePanels& values, int group) {
    alignas(64) float weights[kDecodeTokens];
    for (int r = 0; r < rows_; ++r) {
      const float* from = scores_ + r * kDecodeTokens;
      float* to = weights;
      for (int panel = 0; panel < values.count; ++panel) {
        const uint16_t* maxima = values.maxima[panel] + group * pages_.maxima_stride();
        for (int t = 0; t < kPanelTokens; t += kLanes, from += kLanes, to += kLanes) {
          const VecF weight = load(from);
          store(to, weight == 0.0f ? VecF{} : weight * load_scales<S>(maxima + t));
        }
      }
      math_.take_weights(r, weights, values.count * kPanelTokens);
    }
  }

  void sum_columns(const ValuePanels& values, int column, int end) {
    while (column < end) {
      const bool two = column + 2 * kLanes <= end;
      ValuePanels here = values;
      for (int panel = 0; panel < values.count; ++panel) {
        here.units[panel] += column * kUnitBytes;
        here.ahead[panel] += column * kUnitBytes;
      }
      in_groups(rows_, [&]<int R>(int row) {
        float* sums = sums_ + row * dim_v_ + column;
        if (two) math_.template sum<R, 2>(row, here, decay_ + row, sums, dim_v_);
        else math_.template sum<R, 1>(row, here, decay_ + row, sums, dim_v_);
      });
      column += two ? 2 * kLanes : kLanes;
    }
  }

  const TileJob& job_;
  const Batch& batch_;
  const AttendArgs& args_;
  const Tile& tile_;
  const CodedPages<S> pages_;
  ReadAhead<CodedPages<S>, 2 * kAheadParts> ahead_;  // parts are half as long, or less
  const int group_, rows_, dim_v_, first_position_;
  const float factor_;  // scores times this factor are exponents of 2
  float *scores_, *sums_;
  Math math_;
  float max_[kDecodeRowsMax], denominator_[kDecodeRowsMax], decay_[kDecodeRowsMax];
  bool written_ = job_.write_count == 0;
};

}  // namespace
}  // namespace memserve::MEMSERVE_ISA
