// Fused operations around attention, and the linear for few rows.
//
// Every function has one body (fused_body.h, fused_linear_body.h), written with the compiler's vector extension and
// compiled once per instruction set (isa.h). The bodies work on a range of rows or columns and start no threads:
// fused.cpp distributes the ranges.
#pragma once
#include <cstddef>
#include <cstdint>

#include "page_layout.h"

namespace memserve::fused {

// The activation is rounded to the dtype before the product, but for `silu_wide`; `product` has none.
enum class Gate : int { silu = 0, gelu_tanh = 1, sigmoid = 2, product = 3, silu_wide = 4 };

// y = norm(x [+ residual]) * weight over the last dimension. Rows lie in two levels (tokens, heads), each with its own
// stride in elements; outputs are dense. `sum` receives x + residual, rounded to the dtype, before it is normalised.
struct RmsNorm {
  const void* x;
  const void* residual;  // null: no addition, `sum` unused
  void* sum;
  void* y;
  const float* weight;
  float eps;
  bool round_first;  // round the normalised value to the dtype before the weight (Llama), or after it (Gemma)
  std::ptrdiff_t inner, stride_outer, stride_inner, width;
};

// y[r] = act(gate[r]) * up[r]; strides between rows in elements, y is dense.
struct Gated {
  const void *gate, *up;
  void* y;
  std::ptrdiff_t stride_gate, stride_up, width;
  Gate kind;
};

// Rotary embedding by halves: y = x * cos + (-x[half:], x[:half]) * sin. y is dense [tokens, heads, dim].
struct Rotary {
  const void *x, *cosine, *sine;
  void* y;
  std::ptrdiff_t stride_token, stride_head, stride_table, heads, dim;
};

// y[r, n] = sum_k x[r, k] * w[n, k] + bias[n], w packed by oneDNN as [n / block][k / 2][block][2] (bf16) or
// [n / block][k][block] (f32), padded with zeros to whole blocks (32 or 64 columns, `k_padded` inputs). y has the dtype
// of x, or is f32 if `wide`: for logits, whose order bf16 would blur.
struct Linear {
  const void *x, *w, *bias;  // bias may be null, has the dtype of x
  void* y;
  std::ptrdiff_t rows, k, k_padded, n, block, stride_x, stride_y;
  bool wide;
};

// y[row] += b (a x[row]) for some rows, each with matrices of its own: a [rank, k], b stored as [rank, n]. x and y are
// dense. Sums are float32, rounded once. One product for each row, in one order: what shares a step changes no row.
struct LowRank {
  struct Row {
    std::int64_t row;
    const void *a, *b;  // null: nothing is added to the row
    std::int64_t rank;
  };
  static constexpr std::ptrdiff_t kRankMax = 512;
  const void* x;
  void* y;
  const Row* rows;
  std::ptrdiff_t k, n;
};

struct Kernels {
  void (*rms_norm)(const RmsNorm&, Dtype, std::ptrdiff_t begin, std::ptrdiff_t end);  // rows
  void (*gated)(const Gated&, Dtype, std::ptrdiff_t begin, std::ptrdiff_t end);       // rows
  void (*rotary)(const Rotary&, Dtype, std::ptrdiff_t begin, std::ptrdiff_t end);     // tokens
  void (*linear)(const Linear&, Dtype, std::ptrdiff_t begin, std::ptrdiff_t end);     // columns, multiples of 32
  void (*low_rank)(const LowRank&, Dtype, std::ptrdiff_t begin, std::ptrdiff_t end);  // of op.rows
};

// The kernels of the instruction set in use (isa.h).
const Kernels& kernels_in_use();

// Several threads share the rows or columns; no Python state is touched.
void run(const RmsNorm& op, Dtype dtype, std::ptrdiff_t rows);
void run(const Gated& op, Dtype dtype, std::ptrdiff_t rows);
void run(const Rotary& op, Dtype dtype, std::ptrdiff_t tokens);
void run(const Linear& op, Dtype dtype);
void run(const LowRank& op, Dtype dtype, std::ptrdiff_t rows);

}  // namespace memserve::fused

namespace memserve {
namespace portable { extern const fused::Kernels fused_kernels; }
#if defined(MEMSERVE_X86_ISAS)
namespace avx2 { extern const fused::Kernels fused_kernels; }
namespace avx512 { extern const fused::Kernels fused_kernels; }
namespace avx512_bf16 { extern const fused::Kernels fused_kernels; }
namespace amx { extern const fused::Kernels fused_kernels; }
#endif
}  // namespace memserve
