// memserve._kernels: compute on CPU. Each source file of kernels binds its own functions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "isa.h"

namespace nb = nanobind;

void bind_attention(nb::module_& m);
void bind_fused(nb::module_& m);
void bind_collective(nb::module_& m);
void bind_quantised(nb::module_& m);
void bind_recurrent(nb::module_& m);
void bind_sampling(nb::module_& m);

namespace {

using memserve::Isa;

std::vector<std::string> supported_isas() {
  return {memserve::kIsaNames, memserve::kIsaNames + int(memserve::best_isa()) + 1};
}

void force_isa(const std::optional<std::string>& name) {
  if (!name) return memserve::isa_in_use().store(memserve::best_isa());
  for (int i = 0; i <= int(memserve::best_isa()); ++i)
    if (*name == memserve::kIsaNames[i]) return memserve::isa_in_use().store(Isa(i));
  throw nb::value_error(("isa '" + *name + "' is unknown or not supported by this processor").c_str());
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.doc() = "Paged attention and fused kernels for CPU; the instruction set is chosen when the module is loaded.";
  nb::set_leak_warnings(false);  // see _core
  m.def("isa", [] { return std::string(memserve::kIsaNames[int(memserve::current_isa())]); });
  m.def("supported_isas", &supported_isas);
  m.def("force_isa", &force_isa, nb::arg("name").none());
  bind_attention(m);
  bind_fused(m);
  bind_collective(m);
  bind_quantised(m);
  bind_recurrent(m);
  bind_sampling(m);
}
