#include <nanobind/nanobind.h>

#include "errors.h"
#include "sequence.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
  m.doc() = "memserve native core";
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const memserve::InvariantViolation& violation) {
      PyErr_SetString(nb::module_::import_("memserve.errors").attr("InvariantError").ptr(), violation.what());
    }
  });
  memserve::bind_sequences(m);
  memserve::bind_allocator(m);
  memserve::bind_radix(m);
  memserve::bind_memory(m);
  memserve::bind_identity(m);
}
