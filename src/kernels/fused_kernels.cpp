// The fused kernels of one instruction set (MEMSERVE_ISA).
#include "fused_body.h"
#include "fused_linear_body.h"

namespace memserve::MEMSERVE_ISA {
extern const fused::Kernels fused_kernels;
const fused::Kernels fused_kernels{&rms_norm, &gated, &rotary, &linear};
}  // namespace memserve::MEMSERVE_ISA
