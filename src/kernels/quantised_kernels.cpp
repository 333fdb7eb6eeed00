// The products with quantised weights of one instruction set (MEMSERVE_ISA).
#include "quantised_body.h"

namespace {

static void multiply(const q::Product& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  with_format(op.format, [&](auto format) {
    constexpr q::Format kFormat = decltype(format)::value;
    if constexpr (q::is_float(q::layout_of(kFormat))) return;  // see float8_kernels.cpp
    else if (op.x.is_fine()) multiply_strips<kFormat, true>(op, dtype, begin, end);
    else multiply_strips<kFormat, false>(op, dtype, begin, end);
  });
}

}  // namespace

namespace memserve::MEMSERVE_ISA {
extern const quantised::ProductKernels product_kernels;
const quantised::ProductKernels product_kernels{&multiply};
}  // namespace memserve::MEMSERVE_ISA
