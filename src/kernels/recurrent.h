// What layers with a recurrent state compute between their linears: a short convolution, the gated delta rule, and
// Mamba-2's scan, of a ragged step over states that lie anywhere.
//
// Tokens of one sequence are a piece; pieces come in the order in which they must be computed. A piece reads the state
// before it at `from` (null: there is none, zeros) and writes the one behind it to `to`, which may be the same memory:
// so a snapshot inside a row is where one piece ends and the next one begins. A state is read from memory once for a
// piece, whatever its length, and written once: a token costs its arithmetic.
#pragma once
#include <cstddef>
#include <cstdint>

#include "page_layout.h"

namespace memserve::recurrent {

// A row of an int64 table. `from` and `to` are of a whole state; an operation finds its part `offset` bytes behind.
struct Piece {
  std::int64_t begin, end;  // tokens of the step
  std::int64_t from, to;
  std::int64_t is_bounded;  // time steps are bounded (Scan)
};

struct Pieces {
  const Piece* rows;
  std::ptrdiff_t count, offset;
};

// y[t, c] = act(bias[c] + sum_j weight[j, c] * x[t - taps + 1 + j, c]), rounded before the activation. The state is the
// last `kept` inputs, [channels, kept], of the dtype of x: as many as there are taps, or one less. y is dense.
struct Convolution {
  static constexpr std::ptrdiff_t kTapsMax = 4;
  const void* x;
  void* y;
  const float *weight, *bias;  // [taps, channels]; bias may be null
  std::ptrdiff_t channels, taps, kept, stride_x;
  bool silu;
  Pieces pieces;
};

// Of each value head, with a state S [key_dim, value_dim], float32, and d = exp(decay):
//   S = d S + k (beta (v - (d S)^T k))^T,   y = S^T q
// q and k are divided by their length first if `normalises` (eps 1e-6 under the root), and q by sqrt(key_dim). Each key
// head serves value_heads / key_heads value heads. Heads are dense, tokens have strides; y is dense.
struct DeltaRule {
  const void *q, *k, *v, *beta;
  const float* decay;
  void* y;
  std::ptrdiff_t key_heads, value_heads, key_dim, value_dim;
  std::ptrdiff_t stride_q, stride_k, stride_v, stride_beta, stride_decay;
  bool normalises;
  Pieces pieces;
};

// Mamba-2's scan. Of each head, with a state S [head_dim, state_size], float32, and d = softplus(dt + dt_bias), which
// is rounded as it is there, and bounded where the piece says so:
//   S = exp(d a) S + d x b^T,   y = S c + skip x
// b and c are shared by heads / groups heads. y is dense, and float32.
struct Scan {
  const void *x, *dt, *b, *c;
  const float *a, *skip, *dt_bias;  // [heads]; the last two may be null
  float* y;
  std::ptrdiff_t heads, groups, head_dim, state_size;
  std::ptrdiff_t stride_x, stride_dt, stride_b, stride_c;
  bool softplus;
  float least, most;
  Pieces pieces;
};

struct Kernels {  // ranges: of the units below
  void (*convolve)(const Convolution&, Dtype, std::ptrdiff_t begin, std::ptrdiff_t end);
  void (*delta_rule)(const DeltaRule&, Dtype, std::ptrdiff_t begin, std::ptrdiff_t end);
  void (*scan)(const Scan&, Dtype, std::ptrdiff_t begin, std::ptrdiff_t end);
};

// Units that threads share: all pieces of one are computed by one thread, in order.
constexpr std::ptrdiff_t kChannels = 64;  // of a convolution
constexpr std::ptrdiff_t kColumns = 64;   // of a delta rule's head: a block of its state stays in the nearest cache
constexpr std::ptrdiff_t kRows = 64;      // of a scan's head: all of most

void run(const Convolution& op, Dtype dtype);
void run(const DeltaRule& op, Dtype dtype);
void run(const Scan& op, Dtype dtype);

}  // namespace memserve::recurrent

namespace memserve {
namespace portable { extern const recurrent::Kernels recurrent_kernels; }
#if defined(MEMSERVE_X86_ISAS)
namespace avx2 { extern const recurrent::Kernels recurrent_kernels; }
namespace avx512 { extern const recurrent::Kernels recurrent_kernels; }
#endif
}  // namespace memserve
