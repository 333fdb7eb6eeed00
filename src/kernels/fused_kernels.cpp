// The fused kernels of one instruction set (MEMSERVE_ISA).
#include "fused_body.h"
#include "fused_linear_body.h"
#include "fused_low_rank_body.h"

namespace memserve::MEMSERVE_ISA {
extern const fused::Kernels fused_kernels;
const fused::Kernels fused_kernels{&rms_norm, &gated, &rotary, &linear, &low_rank};
}  // namespace memserve::MEMSERVE_ISA
