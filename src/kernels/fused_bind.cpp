// Python faces of the fused kernels. Tensors are passed as addresses: a DLPack exchange costs more than the kernel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "fused_program.h"

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
            Size k_padded, Size n, Size block, int dtype, bool wide) {
  nb::gil_scoped_release release;
  run(Linear{in(x), in(w), in(bias), out(y), rows, k, k_padded, n, block, stride_x, stride_y, wide},
      Dtype(dtype));
}

// `rows`: of LowRank::Row, as int64 [count, 4].
void low_rank(Address x, Address y, Address rows, Size count, Size k, Size n, int dtype) {
  nb::gil_scoped_release release;
  run(LowRank{in(x), out(y), static_cast<const LowRank::Row*>(in(rows)), k, n}, Dtype(dtype), count);
}

// An address, or external tensor number n as -1 - n.
Place place(Size code) { return code < 0 ? Place{nullptr, static_cast<int>(-1 - code)} : Place{out(Address(code)), -1}; }

void add_rms_norm(Program& self, Size x, Size residual, Size sum, Size y, Address weight, float eps, bool round_first,
                  Size inner, Size stride_outer, Size stride_inner, Size width, int dtype, int count) {
  self.add({RmsNorm{nullptr, nullptr, nullptr, nullptr, static_cast<const float*>(in(weight)), eps, round_first, inner,
                    stride_outer, stride_inner, width},
            {place(x), place(residual), place(sum), place(y)}, Dtype(dtype), Count(count)});
}

void add_gated(Program& self, Size gate, Size stride_gate, Size up, Size stride_up, Size y, Size width, int kind,
               int dtype, int count) {
  self.add({Gated{nullptr, nullptr, nullptr, stride_gate, stride_up, width, Gate(kind)},
            {place(gate), place(up), place(y)}, Dtype(dtype), Count(count)});
}

void add_rotary(Program& self, Size x, Size stride_token, Size stride_head, Size cosine, Size sine, Size stride_table,
                Size y, Size heads, Size dim, int dtype, int count) {
  self.add({Rotary{nullptr, nullptr, nullptr, nullptr, stride_token, stride_head, stride_table, heads, dim},
            {place(x), place(cosine), place(sine), place(y)}, Dtype(dtype), Count(count)});
}

void add_linear(Program& self, Size x, Size stride_x, Address w, Address bias, Size y, Size k, Size k_padded, Size n,
                Size block, int dtype, int count) {
  self.add({Linear{nullptr, in(w), in(bias), nullptr, 0, k, k_padded, n, block, stride_x, n, false},
            {place(x), place(y)}, Dtype(dtype), Count(count)});
}

void add_quantised_linear(Program& self, Size x, Size stride_x, Address w, Address bias, Size y, Size k, Size n,
                          int format, int bits, int dtype, int count) {
  namespace q = memserve::quantised;
  const auto* weight = static_cast<const std::uint8_t*>(in(w));
  self.add({QuantisedLinear{q::Quantise{nullptr, {}, k, stride_x, q::Format(format)},
                            q::Product{{}, weight, static_cast<const float*>(in(bias)), nullptr, 0, k, n, n,
                                       q::Format(format)}, bits > 8},
            {place(x), place(y)}, Dtype(dtype), Count(count)});
}

void add_reduce(Program& self, Size x, Size y, Size width, int dtype, int count) {
  self.add({Reduce{nullptr, nullptr, width}, {place(x), place(y)}, Dtype(dtype), Count(count)});
}

void run_program(Program& self, int begin, int end, int first_external, const std::vector<Address>& addresses) {
  for (std::size_t i = 0; i < addresses.size(); ++i) self.set_external(first_external + int(i), out(addresses[i]));
  memserve::Collective::Ending ending;
  {
    nb::gil_scoped_release release;
    ending = self.run(begin, end);
  }
  memserve::check(ending);
}

}  // namespace

void bind_fused(nb::module_& m) {
  m.def("rms_norm", &rms_norm);
  m.def("gated", &gated);
  m.def("rotary", &rotary);
  m.def("linear", &linear);
  m.def("low_rank", &low_rank);
  m.attr("LOW_RANK_MAX") = LowRank::kRankMax;
  nb::class_<Program>(m, "Program", "Fused operations over fixed buffers, run in pieces.")
      .def(nb::init<>())
      .def("rms_norm", &add_rms_norm)
      .def("gated", &add_gated)
      .def("rotary", &add_rotary)
      .def("linear", &add_linear)
      .def("quantised_linear", &add_quantised_linear)
      .def("reduce", &add_reduce)
      .def("join", &Program::join, nb::keep_alive<1, 2>())
      .def("start", &Program::start)
      .def("run", &run_program)
      .def("__len__", &Program::size);
}
