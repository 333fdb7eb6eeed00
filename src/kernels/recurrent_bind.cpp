// Python faces of the recurrent kernels. Tensors are passed as addresses, as in fused_bind.cpp.
#include <nanobind/nanobind.h>

#include "recurrent.h"

namespace nb = nanobind;
using namespace memserve::recurrent;
using memserve::Dtype;

namespace {

using Address = std::uintptr_t;
using Size = std::ptrdiff_t;

const void* in(Address a) { return reinterpret_cast<const void*>(a); }
const float* floats(Address a) { return reinterpret_cast<const float*>(a); }
void* out(Address a) { return reinterpret_cast<void*>(a); }

// `pieces`: of Piece, int64 [count, 5].
Pieces pieces_at(Address pieces, Size count, Size offset) {
  return {static_cast<const Piece*>(in(pieces)), count, offset};
}

void convolve(Address x, Size stride_x, Address weight, Address bias, Address y, Size channels, Size taps, Size kept,
              bool silu, Address pieces, Size count, Size offset, int dtype) {
  if (taps < 2 || taps > Convolution::kTapsMax || (kept != taps && kept != taps - 1))
    throw nb::value_error("no convolution over so many tokens");
  nb::gil_scoped_release release;
  run(Convolution{in(x), out(y), floats(weight), floats(bias), channels, taps, kept, stride_x, silu,
                  pieces_at(pieces, count, offset)},
      Dtype(dtype));
}

void delta_rule(Address q, Size stride_q, Address k, Size stride_k, Address v, Size stride_v, Address decay,
                Size stride_decay, Address beta, Size stride_beta, Address y, Size key_heads, Size value_heads,
                Size key_dim, Size value_dim, bool normalises, Address pieces, Size count, Size offset, int dtype) {
  nb::gil_scoped_release release;
  run(DeltaRule{in(q), in(k), in(v), in(beta), floats(decay), out(y), key_heads, value_heads, key_dim, value_dim,
                stride_q, stride_k, stride_v, stride_beta, stride_decay, normalises, pieces_at(pieces, count, offset)},
      Dtype(dtype));
}

void scan(Address x, Size stride_x, Address dt, Size stride_dt, Address b, Size stride_b, Address c, Size stride_c,
          Address a, Address skip, Address dt_bias, Address y, Size heads, Size groups, Size head_dim, Size state_size,
          bool softplus, float least, float most, Address pieces, Size count, Size offset, int dtype) {
  nb::gil_scoped_release release;
  run(Scan{in(x), in(dt), in(b), in(c), floats(a), floats(skip), floats(dt_bias), static_cast<float*>(out(y)), heads,
           groups, head_dim, state_size, stride_x, stride_dt, stride_b, stride_c, softplus, least, most,
           pieces_at(pieces, count, offset)},
      Dtype(dtype));
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  m.def("convolve", &convolve);
  m.def("delta_rule", &delta_rule);
  m.def("scan", &scan);
  m.attr("TAPS_MAX") = Convolution::kTapsMax;
}
