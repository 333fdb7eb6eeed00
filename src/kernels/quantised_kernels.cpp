// The kernels for quantised weights of one instruction set (MEMSERVE_ISA).
#include "quantised_numbers.h"

namespace {

// Calls body with the format as a type.
template <q::Format kFormat>
struct Named {
  static constexpr q::Format value = kFormat;
};
template <int kIndex = 0, class Body>
static void with_format(q::Format format, Body body) {
  if constexpr (kIndex < q::kFormats) {
    if (format == q::Format(kIndex)) return body(Named<q::Format(kIndex)>{});
    with_format<kIndex + 1>(format, body);
  }
}

static void multiply(const q::Product& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  with_format(op.format, [&](auto format) {
    constexpr q::Format kFormat = decltype(format)::value;
    if constexpr (q::is_float(q::layout_of(kFormat))) return;  // see float8_kernels.cpp
    else if (op.x.is_fine()) multiply_strips<kFormat, true>(op, dtype, begin, end);
    else multiply_strips<kFormat, false>(op, dtype, begin, end);
  });
}

static void fill(const q::Panel& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  with_format(op.format, [&](auto format) {
    constexpr q::Format kFormat = decltype(format)::value;
    if (dtype == Dtype::float32) fill_strips<kFormat, float>(op, begin, end);
    else fill_strips<kFormat, Bf16>(op, begin, end);
  });
}

static void gather(const q::Gather& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  with_format(op.format, [&](auto format) {
    constexpr q::Format kFormat = decltype(format)::value;
    if (dtype == Dtype::float32) gather_rows<kFormat, float>(op, begin, end);
    else if (dtype == Dtype::bfloat16) gather_rows<kFormat, Bf16>(op, begin, end);
    else gather_rows<kFormat, Fp16>(op, begin, end);
  });
}

}  // namespace

namespace memserve::MEMSERVE_ISA {
extern const quantised::Kernels quantised_kernels;
const quantised::Kernels quantised_kernels{&quantise, &multiply, &fill, &gather};
}  // namespace memserve::MEMSERVE_ISA
