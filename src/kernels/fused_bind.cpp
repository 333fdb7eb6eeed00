// Python faces of the fused kernels. Tensors come as addresses: a DLPack exchange costs more than the kernel.
#include <nanobind/nanobind.h>

#include "fused.h"

namespace nb = nanobind;
using namespace memserve::fused;
using memserve::Dtype;

namespace {

using Address = std::uintptr_t;
using Size = std::ptrdiff_t;

const void* in(Address a) { return reinterpret_cast<const void*>(a); }
void* out(Address a) { return reinterpret_cast<void*>(a); }

void rms_norm(Address x, Address residual, Address sum, Address y, Address weight, float eps, bool round_first,
              Size outer, Size inner, Size stride_outer, Size stride_inner, Size width, int dtype) {
  nb::gil_scoped_release release;
  run(RmsNorm{in(x), in(residual), out(sum), out(y), static_cast<const float*>(in(weight)), eps, round_first, inner,
              stride_outer, stride_inner, width},
      Dtype(dtype), outer * inner);
}

void gated(Address gate, Size stride_gate, Address up, Size stride_up, Address y, Size rows, Size width, int kind,
           int dtype) {
  nb::gil_scoped_release release;
  run(Gated{in(gate), in(up), out(y), stride_gate, stride_up, width, Gate(kind)}, Dtype(dtype), rows);
}

void rotary(Address x, Size stride_token, Size stride_head, Address cosine, Address sine, Size stride_table, Address y,
            Size tokens, Size heads, Size dim, int dtype) {
  nb::gil_scoped_release release;
  run(Rotary{in(x), in(cosine), in(sine), out(y), stride_token, stride_head, stride_table, heads, dim}, Dtype(dtype),
      tokens);
}

void linear(Address x, Size stride_x, Address w, Address bias, Address y, Size stride_y, Size rows, Size k,
            Size k_padded, Size n, int dtype) {
  nb::gil_scoped_release release;
  run(Linear{in(x), in(w), in(bias), out(y), rows, k, k_padded, n, stride_x, stride_y}, Dtype(dtype));
}

}  // namespace

void bind_fused(nb::module_& m) {
  m.def("rms_norm", &rms_norm);
  m.def("gated", &gated);
  m.def("rotary", &rotary);
  m.def("linear", &linear);
}
