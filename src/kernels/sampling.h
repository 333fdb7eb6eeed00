// Drawing tokens from logits: one row, one uniform number, one token. memserve/model/sampling.py has the rule,
// and the twin in torch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace memserve::sampling {

// Rows of float32 logits, and how each of them is drawn. All arrays have one entry per draw.
struct Draw {
  const float* logits;
  std::ptrdiff_t stride, vocab;  // elements
  const std::int64_t* rows;      // which row of the logits each draw reads
  const float* temperature;      // > 0
  const std::int64_t* top_k;     // 0 = off
  const float* top_p;            // 1 = off
  const float* min_p;            // 0 = off
  const double* uniform;         // in [0, 1)
  std::int64_t* tokens;          // result
};

struct Kernels {
  void (*draw)(const Draw&, std::ptrdiff_t begin, std::ptrdiff_t end);  // draws
  // log(sum(exp(x)))
  void (*normalise)(const float* x, std::ptrdiff_t vocab, float* out);
  // The `count` largest values of x and their indices, largest first; -inf if there are fewer.
  void (*best)(const float* x, std::ptrdiff_t vocab, std::ptrdiff_t count, float* values, std::int64_t* tokens);
};

}  // namespace memserve::sampling

namespace memserve {
namespace portable { extern const sampling::Kernels sampling_kernels; }
#if defined(MEMSERVE_X86_ISAS)
namespace avx2 { extern const sampling::Kernels sampling_kernels; }
namespace avx512 { extern const sampling::Kernels sampling_kernels; }
namespace avx512_bf16 { extern const sampling::Kernels sampling_kernels; }
#endif
}  // namespace memserve
