// The parallel driver of paged attention: write, barrier, tiles, barrier, merges.
#include "attention.h"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "isa.h"

namespace memserve {
namespace {

#if defined(MEMSERVE_X86_ISAS)
const AttentionKernels* const kKernels[kIsaCount] = {&portable::attention_kernels, &avx2::attention_kernels,
                                                     &avx512::attention_kernels, &avx512_bf16::attention_kernels};
#else
const AttentionKernels* const kKernels[kIsaCount] = {&portable::attention_kernels};
#endif

int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Memory that a calling thread keeps from step to step; grown before the parallel region, where throwing is allowed.
class Workspace {
 public:
  ~Workspace() { std::free(data_); }

  char* reserve(size_t bytes) {
    if (bytes <= bytes_) return data_;
    std::free(data_);
    bytes_ = 0;
    data_ = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (!data_) throw std::bad_alloc();
    std::memset(data_, 0, bytes);
    bytes_ = bytes;
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

constexpr int kWriteTokens = 32;  // per piece of parallel work

struct WriteJob {
  int row, first, count;
};

std::vector<WriteJob> write_jobs(const Batch& batch) {
  std::vector<WriteJob> jobs;
  for (int row = 0; row < batch.rows(); ++row)
    for (int first = 0; first < batch.count(row); first += kWriteTokens)
      jobs.push_back({row, first, std::min(kWriteTokens, batch.count(row) - first)});
  return jobs;
}

}  // namespace

void attend(const Batch& batch, const Plan& plan, const AttendArgs& args) {
  thread_local Workspace workspace;
  const PageLayout& layout = batch.layout;
  const AttentionKernels& kernels = *kKernels[int(current_isa())];
  const int dtype = int(layout.dtype), kv_heads = layout.num_kv_heads;
  const size_t scratch = (scratch_bytes(plan.tile_rows_max, layout.head_dim_k, layout.head_dim_v) + 63) / 64 * 64;
  const size_t slot_floats = partial_floats(plan.tile_rows_max, layout.head_dim_v);
  char* memory = workspace.reserve(scratch * plan.threads + sizeof(float) * slot_floats * plan.partials);
  float* partials = reinterpret_cast<float*>(memory + scratch * plan.threads);
  const std::vector<WriteJob> writes = args.write ? write_jobs(batch) : std::vector<WriteJob>{};
  const int write_count = int(writes.size()) * kv_heads, tile_count = int(plan.tiles.size());
  const int merge_count = int(plan.merges.size());

#pragma omp parallel num_threads(plan.threads)
  {
#pragma omp for schedule(static)
    for (int i = 0; i < write_count; ++i) {
      const WriteJob& job = writes[i / kv_heads];
      kernels.write_tokens[dtype](batch, args, job.row, i % kv_heads, job.first, job.count);
    }
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < tile_count; ++i) {
      const Tile& tile = plan.tiles[i];
      float* partial = tile.partial < 0 ? nullptr : partials + slot_floats * tile.partial;
      kernels.attend_tile[dtype](TileJob{&batch, &args, tile, memory + scratch * thread_number(), partial});
    }
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < merge_count; ++i)
      kernels.merge_tiles[dtype](batch, args, plan.merges[i], partials + slot_floats * plan.merges[i].first_partial,
                                 slot_floats);
  }
}

}  // namespace memserve
