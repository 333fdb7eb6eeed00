// Paged attention over KV as it was computed, compiled once per instruction set.
#include "attention_decode.h"
#include "attention_latents.h"
#include "attention_tile.h"

namespace memserve::MEMSERVE_ISA {
namespace {

template <class Format, class T>
void attend_tile(const TileJob& job) {
  if (job.batch->layout.latent)
    TileKernel<Format, T, LatentPanels<Format, T>>(job).run();
  else if (DecodeKernel<Format, T>::fits(job))
    DecodeKernel<Format, T>(job).run();
  else
    TileKernel<Format, T, PlainPanels<Format, T>>(job).run();
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
