#include "scheduling/sequence.h"
#include "pool/shared_arena.h"

namespace memserve {

namespace {

template <class A>
int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const A* arena = nb::inst_ptr<A>(self);
  constexpr bool read_only = std::is_same_v<A, PeerArena>;
  auto* data = const_cast<uint8_t*>(static_cast<const uint8_t*>(arena->data()));
  return PyBuffer_FillInfo(view, self, data, static_cast<Py_ssize_t>(arena->nbytes()), read_only, flags);
}

template <class A>
PyType_Slot slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer<A>)},
    {0, nullptr},
};

size_t arena_bytes(int64_t nbytes) {
  if (nbytes < 1 || nbytes > INT64_MAX - (int64_t{1} << 30)) throw nb::value_error("an arena needs at least one byte");
  return static_cast<size_t>(nbytes);
}

SharedArena* attach(int fd, int64_t nbytes) {
  constexpr uint64_t unnamed[2] = {0, 0};
  return new SharedArena(fd, arena_bytes(nbytes), unnamed, false);
}

size_t collapse(SharedArena& self, int64_t offset, int64_t count) {
  if (offset < 0 || count < 0 || static_cast<uint64_t>(offset) + static_cast<uint64_t>(count) > self.nbytes()) {
    throw nb::value_error("offset and count must lie inside the arena");
  }
  const nb::gil_scoped_release unlocked;
  return self.collapse(static_cast<size_t>(offset), static_cast<size_t>(count));
}

template <class A>
nb::class_<A> arena_class(nb::module_& m, const char* name, const char* doc) {
  return nb::class_<A>(m, name, nb::type_slots(slots<A>), doc)
      .def_prop_ro("address", [](const A& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_prop_ro("nbytes", &A::nbytes);
}

}  // namespace

void bind_shared_arena(nb::module_& m) {
  arena_class<SharedArena>(m, "SharedArena", "Zeroed memory that other processes of this host can read.")
      .def("__init__",
           [](SharedArena* self, int64_t nbytes, bool sealed) { new (self) SharedArena(arena_bytes(nbytes), sealed); },
           nb::arg("nbytes"), nb::arg("sealed") = true)
      .def_static("attach", &attach, nb::arg("fd"), nb::arg("nbytes"))
      .def("seal", &SharedArena::seal)
      .def_prop_ro("fd", &SharedArena::fd)
      .def("collapse", &collapse, nb::arg("offset"), nb::arg("count"))
      .def_prop_rw("generation", &SharedArena::generation, &SharedArena::set_generation);
  arena_class<PeerArena>(m, "PeerArena", "A read-only map of another process's SharedArena.")
      .def("__init__",
           [](PeerArena* self, int pid, int fd, int64_t nbytes) { new (self) PeerArena(pid, fd, arena_bytes(nbytes)); },
           nb::arg("pid"), nb::arg("fd"), nb::arg("nbytes"))
      .def("forget", &PeerArena::forget, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("generation", &PeerArena::generation);
}

}  // namespace memserve
