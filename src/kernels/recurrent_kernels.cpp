// The recurrent kernels of one instruction set (MEMSERVE_ISA).
#include "recurrent_body.h"

namespace memserve::MEMSERVE_ISA {
extern const recurrent::Kernels recurrent_kernels;
const recurrent::Kernels recurrent_kernels{&convolve, &delta_rule, &scan};
}  // namespace memserve::MEMSERVE_ISA
