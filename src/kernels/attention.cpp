// The parallel driver of paged attention: shared writes, barrier, then tiles with their own writes and merges.
#include "attention.h"

#include <atomic>
#include <cmath>
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
                                                     &avx512::attention_kernels, &avx512_bf16::attention_kernels,
#if defined(MEMSERVE_AMX)
                                                     &amx::attention_kernels};
#else
                                                     &avx512_bf16::attention_kernels};
#endif
#else
const AttentionKernels* const kKernels[kIsaCount] = {&portable::attention_kernels};
#endif

// Every processor so far that multiplies bfloat16 has dot products of bytes too.
const CodedKernels& coded_kernels() {
#if defined(MEMSERVE_X86_ISAS)
  switch (current_isa()) {
    case Isa::amx:
    case Isa::avx512_bf16:
      return __builtin_cpu_supports("avx512vnni") ? avx512_bf16_vnni::coded_kernels : avx512::coded_kernels;
    case Isa::avx512: return avx512::coded_kernels;
    case Isa::avx2: return avx2::coded_kernels;
    case Isa::portable: break;
  }
#endif
  return portable::coded_kernels;
}

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

constexpr int kWriteTokens = 32;  // per piece of parallel work; tokens that share a byte are in one piece

struct WriteJob {
  int row, first, count;
};

// Pieces of the rows with new tokens that are read by several tiles.
std::vector<WriteJob> write_jobs(const Batch& batch, const Plan& plan) {
  std::vector<WriteJob> jobs;
  for (const int row : plan.rows_written_first)
    for (int first = 0, count; first < batch.count(row); first += count) {
      count = std::min(kWriteTokens - (batch.first_position(row) + first) % kWriteTokens, batch.count(row) - first);
      jobs.push_back({row, first, count});
    }
  return jobs;
}

// One call of attend(): what its threads share.
class Call {
 public:
  Call(const Batch& batch, const Plan& plan, const AttendArgs& args, Workspace& workspace)
      : batch_(batch), plan_(plan), args_(args), kernels_(*kKernels[int(current_isa())]),
        dtype_(int(batch.layout.dtype)), attend_tile_(kernels_.attend_tile[dtype_]),
        write_tokens_(kernels_.write_tokens[dtype_]),
        scratch_bytes_(
            padded_bytes(scratch_bytes(plan.tile_rows_max, batch.layout.head_dim_k, batch.layout.head_dim_v))),
        slot_floats_(partial_floats(plan.tile_rows_max, batch.layout.head_dim_v)) {
    if (batch.layout.scheme != Scheme::as_computed) {
      attend_tile_ = coded_kernels().attend_tile[int(batch.layout.scheme) - 1][dtype_];
      write_tokens_ = coded_kernels().write_tokens[int(batch.layout.scheme) - 1][dtype_];
    }
    const size_t partial_bytes = padded_bytes(sizeof(float) * slot_floats_ * plan.partials);
    const size_t all_scratch = scratch_bytes_ * plan.threads, hands_bytes = sizeof(Hand) * plan.threads;
    scratch_ = workspace.reserve(all_scratch + partial_bytes + hands_bytes + sizeof(Countdown) * plan.merges.size());
    partials_ = reinterpret_cast<float*>(scratch_ + all_scratch);
    hands_ = reinterpret_cast<Hand*>(scratch_ + all_scratch + partial_bytes);
    for (int i = 0; i < plan.threads; ++i) new (hands_ + i) Hand;
    parts_left_ = reinterpret_cast<Countdown*>(scratch_ + all_scratch + partial_bytes + hands_bytes);
    for (size_t i = 0; i < plan.merges.size(); ++i) new (parts_left_ + i) Countdown(plan.merges[i].parts);
  }

  void write(const WriteJob& job, int kv_head) const {
    write_tokens_(batch_, args_, job.row, kv_head, job.first, job.count);
  }

  // The thread that finishes the last part of a split context merges the parts: no barrier for that.
  void attend(const Tile& tile, int thread) const {
    float* partial = tile.merge < 0 ? nullptr : partials_ + slot_floats_ * tile.partial;
    const WriteJob own = own_write(tile);
    attend_tile_(TileJob{&batch_, &args_, tile, scratch_ + scratch_bytes_ * thread, partial, own.first, own.count, &tile,
                         plan_.tiles.data() + plan_.tiles.size(), plan_.threads});
    if (tile.merge < 0 || parts_left_[tile.merge].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const Merge& merge = plan_.merges[tile.merge];
    kernels_.merge_tiles[dtype_](batch_, args_, merge, partials_ + slot_floats_ * merge.first_partial, slot_floats_);
  }

  // Tiles are dealt out in turn: a thread knows its next tile, and one without any left takes another's.
  void attend_all(int thread) const {
    const int count = int(plan_.tiles.size()), hands = plan_.threads;
    for (int i = 0; i < hands; ++i) {
      std::atomic<int32_t>& taken = hands_[(thread + i) % hands].taken;
      for (int at; (at = (thread + i) % hands + hands * taken.fetch_add(1, std::memory_order_relaxed)) < count;)
        attend(plan_.tiles[at], thread);
    }
  }

 private:
  using Countdown = std::atomic<int32_t>;
  struct alignas(64) Hand {
    std::atomic<int32_t> taken{0};
  };

  static size_t padded_bytes(size_t bytes) { return (bytes + 63) / 64 * 64; }

  // The tile's queries see new tokens only of its own part of the context, so no other tile has to wait.
  WriteJob own_write(const Tile& tile) const {
    if (!args_.write || !tile.writes) return {tile.row, 0, 0};
    const int position = batch_.first_position(tile.row);
    const int first = std::max(0, tile.first_token - position);
    const int end = std::min(batch_.count(tile.row), tile.end_token - position);
    return {tile.row, first, std::max(0, end - first)};
  }

  const Batch& batch_;
  const Plan& plan_;
  const AttendArgs& args_;
  const AttentionKernels& kernels_;
  const int dtype_;
  void (*attend_tile_)(const TileJob&);
  void (*write_tokens_)(const Batch&, const AttendArgs&, int, int, int, int);
  const size_t scratch_bytes_, slot_floats_;
  char* scratch_;
  float* partials_;
  Hand* hands_;
  Countdown* parts_left_;
};

}  // namespace

void merge_parts(const float* outputs, const float* statistics, int parts, int64_t rows, int dim, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    float max = statistics[r];
    for (int p = 1; p < parts; ++p) max = std::max(max, statistics[p * rows + r]);
    float total = 0;
    for (int p = 0; p < parts; ++p) total += std::exp2(statistics[p * rows + r] - max);
    float* to = out + r * dim;
    for (int p = 0; p < parts; ++p) {
      const float weight = std::exp2(statistics[p * rows + r] - max) / total;
      const float* from = outputs + (p * rows + r) * dim;
      for (int d = 0; d < dim; ++d) to[d] = (p ? to[d] : 0.0f) + weight * from[d];
    }
  }
}

void attend(const Batch& batch, const Plan& plan, const AttendArgs& args) {
  thread_local Workspace workspace;
  const Call call(batch, plan, args, workspace);
  const std::vector<WriteJob> writes = args.write ? write_jobs(batch, plan) : std::vector<WriteJob>{};
  const int kv_heads = batch.layout.num_kv_heads;
  const int write_count = int(writes.size()) * kv_heads;
#pragma omp parallel num_threads(plan.threads)
  {
    if (write_count) {
#pragma omp for schedule(static)
      for (int i = 0; i < write_count; ++i) call.write(writes[i / kv_heads], i % kv_heads);
    }
    call.attend_all(thread_number());
  }
}

}  // namespace memserve
