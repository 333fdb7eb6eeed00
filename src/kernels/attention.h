// Paged attention for CPU: the step's batch, the work list, and what each instruction set's kernel receives.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "page_layout.h"

namespace memserve {

inline constexpr int kPanelTokens = 32;                // tokens with scores computed together
inline constexpr int kChunkTokens = 4 * kPanelTokens;  // tokens per round of the online softmax
inline constexpr int kTileRows = 96;                   // (query, head) pairs per tile: their scores stay in L2

// A view of [token, head, element] storage; strides in elements, the last dimension is dense.
struct Strided {
  char* data;
  int64_t token_stride, head_stride;
};

// Which tokens a query reads, up to its own: all, the last `window`, or those of its chunk of `chunk` tokens.
struct Reach {
  int window = 0, chunk = 0;  // 0: none

  int oldest(int position) const {
    const int first = window > 0 ? std::max(0, position + 1 - window) : 0;
    return chunk > 0 ? std::max(first, position / chunk * chunk) : first;
  }
  bool operator==(const Reach&) const = default;
};

// The arguments common to one call of attend().
struct AttendArgs {
  int layer, heads;
  Strided q, k, v, out;
  float scale, softcap;
  Reach reach;
  const float* sinks;  // [heads] or nullptr
  bool write;
  // [token, head] or nullptr: log2 of each softmax's denominator, for a merge with other parts of the context. Then
  // `out` is float32.
  float* statistics = nullptr;
};

// A ragged step: row i has `q_starts[i+1] - q_starts[i]` new tokens, which are the last ones of `contexts[i]`.
struct Batch {
  PageLayout layout;
  std::vector<int32_t> q_starts, contexts;
  std::vector<int32_t> blocks;        // block ids of all rows, row by row
  std::vector<int64_t> block_starts;  // where row i's ids begin in `blocks`
  bool shares_writes = false;         // some row reads a block that another row writes in this step
  bool behind = false;                // the new tokens follow the whole context, and are not part of it

  int rows() const { return int(contexts.size()); }
  int count(int row) const { return q_starts[row + 1] - q_starts[row]; }
  // Queries behind the context see all of it, as its last token does.
  int first_position(int row) const { return behind ? contexts[row] - 1 : contexts[row] - count(row); }
  const int32_t* row_blocks(int row) const { return blocks.data() + block_starts[row]; }
};

// A piece of work: some queries of one sequence, all heads of one kv head, part of the context.
struct Tile {
  int32_t row, kv_head;
  int32_t first_query, queries;     // within the row
  int32_t first_token, end_token;   // of the context; first_token is a multiple of kPanelTokens
  int32_t partial, merge;           // slot for an unnormalised result and its Merge; -1: this is the whole context
  bool writes;                      // stores the row's new tokens of its part of the context before it attends
};

// Tiles that share their queries: each has a part of the context and one of `parts` consecutive partial slots.
struct Merge {
  Tile whole;
  int32_t first_partial, parts;
};

// The tiles of a batch for one (heads, reach, threads). Equal for all such layers, so it is kept with the batch.
struct Plan {
  int heads;
  Reach reach;
  int threads_max, threads;
  int tile_rows_max = 0, partials = 0;  // a partial slot holds partial_floats(tile_rows_max)
  std::vector<Tile> tiles;
  std::vector<Merge> merges;
  std::vector<int32_t> rows_written_first;  // several tiles share their new tokens: stored by all before any attends
};

Plan make_plan(const Batch& batch, int heads, Reach reach, int threads_max);

// Everything that a kernel needs for one tile; the scratch belongs to the calling thread.
struct TileJob {
  const Batch* batch;
  const AttendArgs* args;
  Tile tile;
  char* scratch;   // scratch_bytes()
  float* partial;  // partial_floats(), or nullptr: normalise and write to args->out
  int write_first, write_count;  // the row's queries whose K and V are stored before they are read
  const Tile* planned;           // `tile` in the plan; this thread will probably go on with planned + planned_step ..
  const Tile* planned_end;
  int planned_step;
};

inline int padded(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// An unnormalised result: [rows, head_dim_v] sums, [rows] maxima, [rows] denominators.
inline size_t partial_floats(int rows, int head_dim_v) { return size_t(rows) * (head_dim_v + 2); }

// Upper bound over all kernels: queries, scores, weights, sums, one panel of K, a chunk of V, statistics per row.
inline size_t scratch_bytes(int rows, int head_dim_k, int head_dim_v) {
  const size_t r = padded(rows, 16), dv = padded(head_dim_v, 32);
  const size_t floats = r * head_dim_k + r * kChunkTokens * 2 + r * dv + size_t(head_dim_k) * kPanelTokens +
                        size_t(kChunkTokens) * dv + 4 * r;
  return floats * sizeof(float) + 8 * 64;  // each of the 8 areas starts at a cache line
}

struct AttentionKernels {
  void (*attend_tile[3])(const TileJob& job);  // by Dtype
  // Combines the parts' results, `part_floats` apart from `partials` on, and writes to args.out.
  void (*merge_tiles[3])(const Batch& batch, const AttendArgs& args, const Merge& merge, float* partials,
                         size_t part_floats);
  // Stores queries [first, first + count) of a row into the pages.
  void (*write_tokens[3])(const Batch& batch, const AttendArgs& args, int row, int kv_head, int first, int count);
};

// The same for pages of codes, by Scheme (but as_computed) and Dtype.
struct CodedKernels {
  void (*attend_tile[kSchemes - 1][3])(const TileJob& job);
  void (*write_tokens[kSchemes - 1][3])(const Batch& batch, const AttendArgs& args, int row, int kv_head, int first,
                                        int count);
};

namespace portable {
extern const AttentionKernels attention_kernels;
extern const CodedKernels coded_kernels;
}  // namespace portable
#if defined(MEMSERVE_X86_ISAS)
namespace avx2 { extern const CodedKernels coded_kernels; }
namespace avx512 { extern const CodedKernels coded_kernels; }
namespace avx512_bf16_vnni { extern const CodedKernels coded_kernels; }
namespace avx2 { extern const AttentionKernels attention_kernels; }
namespace avx512 { extern const AttentionKernels attention_kernels; }
namespace avx512_bf16 { extern const AttentionKernels attention_kernels; }
#if defined(MEMSERVE_AMX)
namespace amx { extern const AttentionKernels attention_kernels; }
#endif
#endif

// Write the step's k, v into the pages (if args.write), then attend. Several threads; no Python state is touched.
void attend(const Batch& batch, const Plan& plan, const AttendArgs& args);

// A softmax in `parts` parts of its context: outputs [parts, rows, dim] and statistics [parts, rows] -> out [rows, dim].
void merge_parts(const float* outputs, const float* statistics, int parts, int64_t rows, int dim, float* out);

}  // namespace memserve
