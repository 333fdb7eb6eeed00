#include <nanobind/nanobind.h>

#include <system_error>

#include "errors.h"
#include "scheduling/sequence.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
  m.doc() = "memserve native core";
  nb::set_leak_warnings(false);  // an interrupted process ends with objects alive: no news to its user
  m.def("warn_of_leaks", &nb::set_leak_warnings, nb::arg("warns"));
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const memserve::InvariantViolation& violation) {
      PyErr_SetString(nb::module_::import_("memserve.base.errors").attr("InvariantError").ptr(), violation.what());
    } catch (const std::system_error& failure) {
      const nb::object text = nb::cast(failure.what());
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(failure.code().value(), text).ptr());
    }
  });
  memserve::bind_sequences(m);
  memserve::bind_allocator(m);
  memserve::bind_radix(m);
  memserve::bind_memory(m);
  memserve::bind_identity(m);
  memserve::bind_shared_arena(m);
  memserve::bind_sealed_copy(m);
  memserve::bind_kv_codec(m);
  memserve::bind_directory(m);
  memserve::bind_shortlist(m);
  memserve::bind_cheapest(m);
  memserve::bind_curves(m);
  memserve::bind_rows(m);
  memserve::bind_stop_strings(m);
  memserve::bind_json_shape(m);
  memserve::bind_segment_log(m);
  memserve::bind_memory_tier(m);
  memserve::bind_tier_reader(m);
  memserve::bind_disk_queue(m);
}
