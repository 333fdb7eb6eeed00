// Python face of a collective of workers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "collective.h"

namespace nb = nanobind;
using memserve::Dtype;
using memserve::Collective;

namespace memserve {

void check(Collective::Ending ending) {
  if (ending == Collective::Ending::aborted) throw std::runtime_error("another worker of this instance has ended");
  if (ending == Collective::Ending::late) throw std::runtime_error("another worker of this instance does not answer");
}

}  // namespace memserve

namespace {

template <class Work>
void run(Work&& work) {
  Collective::Ending ending;
  {
    nb::gil_scoped_release release;
    ending = work();
  }
  memserve::check(ending);
}

Collective* make(uintptr_t region, int rank, int size, size_t slot_bytes, double timeout_s) {
  if (size < 1 || size > Collective::kRanksMax || rank < 0 || rank >= size)
    throw nb::value_error("a collective has 1 to 64 ranks, and this one must be among them");
  if (slot_bytes == 0 || slot_bytes % 64 != 0 || region % 64 != 0 || region == 0)
    throw nb::value_error("region and slot_bytes must be multiples of 64");
  return new Collective(reinterpret_cast<void*>(region), rank, size, slot_bytes, int64_t(timeout_s * 1e9));
}

}  // namespace

void bind_collective(nb::module_& m) {
  nb::class_<Collective>(m, "Collective", "The workers of one instance: what they exchange goes through shared memory.")
      .def(nb::new_(&make), nb::arg("region"), nb::arg("rank"), nb::arg("size"), nb::arg("slot_bytes"),
           nb::arg("timeout_s"))
      .def_static("region_bytes", &Collective::region_bytes, nb::arg("size"), nb::arg("slot_bytes"))
      .def_prop_ro("rank", &Collective::rank)
      .def_prop_ro("size", &Collective::size)
      .def_prop_ro("waited_ns", &Collective::waited_ns)
      .def_prop_ro("aborted", &Collective::aborted)
      .def("all_reduce",
           [](Collective& self, uintptr_t x, uintptr_t out, size_t count, int dtype) {
             run([&] {
               return self.all_reduce(reinterpret_cast<void*>(x), reinterpret_cast<void*>(out), count, Dtype(dtype));
             });
           })
      .def("gather",
           [](Collective& self, uintptr_t x, size_t rows, const std::vector<size_t>& widths, uintptr_t out) {
             if (widths.size() != size_t(self.size())) throw nb::value_error("one width for each rank");
             run([&] { return self.gather(reinterpret_cast<void*>(x), rows, widths, reinterpret_cast<void*>(out)); });
           })
      .def("broadcast",
           [](Collective& self, uintptr_t data, size_t bytes, int root) {
             if (root < 0 || root >= self.size()) throw nb::value_error("root must be a rank of the collective");
             run([&] { return self.broadcast(reinterpret_cast<void*>(data), bytes, root); });
           })
      .def("meet", [](Collective& self) { run([&] { return self.meet(); }); })
      .def("announce", [](Collective& self) { run([&] { return self.announce(); }); })
      .def("await_rank",
           [](Collective& self, int rank) {
             if (rank < 0 || rank >= self.size()) throw nb::value_error("rank must be one of the collective");
             run([&] { return self.await(rank); });
           })
      .def("abort", &Collective::abort);
}
