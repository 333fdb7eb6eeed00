// The steps that all attention kernels share for one row: read queries, turn scores into weights, write sums.
#pragma once

#include <cfloat>

#include "attention_pack.h"

namespace memserve::MEMSERVE_ISA {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

// Row r of a tile is query r / group, head r % group, in the kernel's format.
template <class Element, class T>
void load_query(const Batch& batch, const AttendArgs& args, const Tile& tile, int r, Element* to) {
  const int group = args.heads / batch.layout.num_kv_heads;
  const int64_t token = batch.q_starts[tile.row] + tile.first_query + r / group;
  const int64_t head = int64_t(tile.kv_head) * group + r % group;
  const T* from = reinterpret_cast<const T*>(args.q.data) + token * args.q.token_stride + head * args.q.head_stride;
  if constexpr (sizeof(Element) == sizeof(T))
    std::memcpy(to, from, batch.layout.head_dim_k * sizeof(T));
  else
    widen(from, to, batch.layout.head_dim_k);
}

inline void cap_scores(const AttendArgs& args, float* scores, int tokens) {
  for (int t = 0; t < tokens; t += kLanes)
    store(scores + t, tanh(load(scores + t) * (args.scale / args.softcap)) * args.softcap);
}

inline void mask_scores(float* scores, int tokens, int visible_first, int visible_end) {
  for (int t = 0; t < tokens; t += kLanes) {
    const VecI index = lane_numbers() + t;
    const VecI hidden = (index < visible_first) | (index >= visible_end);
    store(scores + t, hidden ? splat(-__builtin_inff()) : load(scores + t));
  }
}

// Masks the scores of tokens [first, end) that a query at `position` must not see; returns the largest visible one.
inline float largest_visible(const AttendArgs& args, float* scores, int position, int first, int end) {
  const int tokens = padded(end - first, kPanelTokens);
  if (args.softcap > 0) cap_scores(args, scores, tokens);
  const int visible_end = (position + 1 < end ? position + 1 : end) - first;
  const int visible_first = args.reach.oldest(position) - first;
  if (visible_end < tokens || visible_first > 0) mask_scores(scores, tokens, visible_first, visible_end);
  VecF best = load(scores);
  for (int t = kLanes; t < tokens; t += kLanes) best = larger(best, load(scores + t));
  return largest_lane(best);
}

// weights = 2^(scores * factor - max); returns their sum. May work in place.
template <bool Fast>
float exponentiate(const float* scores, float* weights, int tokens, float factor, float max) {
  VecF sum{};
  for (int t = 0; t < tokens; t += kLanes) {
    const VecF weight = exp2<Fast>(load(scores + t) * factor - max);
    sum += weight;
    store(weights + t, weight);
  }
  return sum_of_lanes(sum);
}

#if defined(__AVX512BF16__)
template <bool Fast>
float exponentiate(const float* scores, BFloat16* weights, int tokens, float factor, float max) {
  VecF sum{};
  for (int t = 0; t < tokens; t += 2 * kLanes) {
    const VecF low = exp2<Fast>(load(scores + t) * factor - max);
    const VecF high = exp2<Fast>(load(scores + t + kLanes) * factor - max);
    sum += low + high;
    _mm512_storeu_si512(weights + t, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  return sum_of_lanes(sum);
}
#endif

// Online softmax of one row over tokens [first, end), scores to weights in place: a new maximum and denominator. Returns
// the decay of earlier sums.
inline float weigh_row(const AttendArgs& args, float* scores, int position, int first, int end, float factor, float& max,
                       float& denominator) {
  const float best = largest_visible(args, scores, position, first, end) * factor;
  // A row without a visible token keeps a finite maximum, so that no infinity is subtracted from an infinity.
  const float next = std::max(std::max(max, best), -FLT_MAX);
  const float decay = exp2<false>(splat(max - next))[0];
  max = next;
  denominator = denominator * decay + exponentiate<false>(scores, scores, padded(end - first, kPanelTokens), factor, next);
  return decay;
}

// out = sums / (denominator + 2^(sink - max)); overwrites `sums`.
template <class T>
void write_row(const Batch& batch, const AttendArgs& args, const Tile& tile, int r, float* sums, float max,
               float denominator) {
  const int group = args.heads / batch.layout.num_kv_heads, head = tile.kv_head * group + r % group;
  if (args.sinks) denominator += __builtin_exp2f(args.sinks[head] * kLog2E - max);
  const float inverse = 1.0f / denominator;
  for (int d = 0; d < batch.layout.head_dim_v; ++d) sums[d] *= inverse;
  const int64_t token = batch.q_starts[tile.row] + tile.first_query + r / group;
  const int64_t place = token * args.out.token_stride + head * args.out.head_stride;
  if (args.statistics) {
    args.statistics[token * args.heads + head] = max + __builtin_log2f(denominator);
    std::memcpy(reinterpret_cast<float*>(args.out.data) + place, sums, batch.layout.head_dim_v * sizeof(float));
    return;
  }
  narrow(sums, reinterpret_cast<T*>(args.out.data) + place, batch.layout.head_dim_v);
}

// Writes a finished tile, rows of `stride` sums: to its partial slot if it is part of a context, else to args.out.
template <class T>
void deliver(const TileJob& job, int rows, float* sums, int stride, const float* max, const float* denominator) {
  const int dim = job.batch->layout.head_dim_v;
  if (!job.partial) {
    for (int r = 0; r < rows; ++r)
      write_row<T>(*job.batch, *job.args, job.tile, r, sums + int64_t(r) * stride, max[r], denominator[r]);
    return;
  }
  for (int r = 0; r < rows; ++r)
    std::memcpy(job.partial + int64_t(r) * dim, sums + int64_t(r) * stride, dim * sizeof(float));
  std::memcpy(job.partial + int64_t(rows) * dim, max, rows * sizeof(float));
  std::memcpy(job.partial + int64_t(rows) * (dim + 1), denominator, rows * sizeof(float));
}

// Stores the new tokens of one row for one kv head: a key is a column of its block, a value a row, if it has one.
template <class T>
void write_tokens(const Batch& batch, const AttendArgs& args, int row, int kv_head, int first, int count) {
  const PageLayout& layout = batch.layout;
  const HeadPages<T> pages(batch, args, row, kv_head);
  for (int i = first; i < first + count; ++i) {
    const int position = batch.first_position(row) + i;
    const int64_t token = batch.q_starts[row] + i;
    const T* k = reinterpret_cast<const T*>(args.k.data) + token * args.k.token_stride + kv_head * args.k.head_stride;
    const T* v = reinterpret_cast<const T*>(args.v.data) + token * args.v.token_stride + kv_head * args.v.head_stride;
    T* column = pages.key(position);
    for (int d = 0; d < layout.head_dim_k; ++d) column[int64_t(d) * layout.block_tokens] = k[d];
    if (!layout.latent) std::memcpy(pages.value(position), v, layout.head_dim_v * sizeof(T));
  }
}

}  // namespace
}  // namespace memserve::MEMSERVE_ISA
