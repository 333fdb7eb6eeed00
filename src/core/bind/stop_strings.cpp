#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <memory>

#include "scheduling/sequence.h"
#include "text/stop_strings.h"

namespace memserve {

namespace {

std::vector<std::string> strings(nb::sequence stops) {
  std::vector<std::string> read;
  for (const nb::handle stop : stops) {
    // Valid UTF-8 has no lone surrogates: such a stop string never matches, and must not fail.
    const nb::object bytes = stop.attr("encode")("utf-8", "surrogatepass");
    const auto data = nb::cast<nb::bytes>(bytes);
    if (data.size() == 0) throw nb::value_error("a stop string must not be empty");
    read.emplace_back(data.c_str(), data.size());
  }
  return read;
}

}  // namespace

void bind_stop_strings(nb::module_& m) {
  nb::class_<StopStrings>(m, "StopStrings")
      .def("__init__",
           [](StopStrings* self, nb::sequence stops) { new (self) StopStrings(strings(stops)); }, nb::arg("stops"))
      .def("__len__", &StopStrings::size);
  nb::class_<StopFinder>(m, "StopFinder")
      .def(nb::init<const StopStrings&>(), nb::arg("stops"), nb::keep_alive<1, 2>())
      .def("push", &StopFinder::push, nb::arg("text"))
      .def("finish", &StopFinder::finish)
      .def_prop_ro("found", &StopFinder::found)
      .def_prop_ro("steps", &StopFinder::steps);
}

}  // namespace memserve
