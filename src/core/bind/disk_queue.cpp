#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "scheduling/sequence.h"
#include "store/disk_queue.h"
#include "store/format.h"

namespace memserve {

namespace {

using namespace store;

void make(DiskQueue* self, const std::string& path, uint64_t nbytes, unsigned depth, bool direct,
          const std::string& engine, const std::vector<std::pair<uintptr_t, size_t>>& memory) {
  if (depth < 1 || depth > 4096) throw nb::value_error("depth must be from 1 to 4096");
  if (engine != "" && engine != "io_uring" && engine != "threads") throw nb::value_error("no such engine");
  std::vector<DiskMemory> pieces;
  for (const auto& [address, bytes] : memory) pieces.push_back({reinterpret_cast<uint8_t*>(address), bytes});
  new (self) DiskQueue(path, nbytes, depth, direct, engine, pieces);
}

void submit(DiskQueue& self, DiskOp::Kind kind, uint64_t tag, uint64_t offset, uintptr_t address, size_t count) {
  if (self.direct() && (offset % kPage || address % kPage || count % kPage)) {
    throw nb::value_error("direct IO needs whole pages of 4 KiB: offset, address and count");
  }
  if (count == 0 || count > size_t{1} << 31) throw nb::value_error("an operation must have from one byte to 2 GiB");
  self.submit({tag, kind, offset, reinterpret_cast<uint8_t*>(address), count});
}

nb::list take(DiskQueue& self) {
  nb::list all;
  for (const DiskDone& done : self.take()) all.append(nb::make_tuple(done.tag, done.error));
  return all;
}

}  // namespace

void bind_disk_queue(nb::module_& m) {
  nb::class_<DiskQueue>(m, "DiskQueue")
      .def("__init__", &make, nb::arg("path"), nb::arg("nbytes") = 0, nb::arg("depth") = 32, nb::arg("direct") = true,
           nb::arg("engine") = "", nb::arg("memory") = std::vector<std::pair<uintptr_t, size_t>>{})
      .def("read", [](DiskQueue& self, uint64_t tag, uint64_t offset, uintptr_t address, size_t count) {
        submit(self, DiskOp::Kind::read, tag, offset, address, count);
      }, nb::arg("tag"), nb::arg("offset"), nb::arg("address"), nb::arg("count"))
      .def("write", [](DiskQueue& self, uint64_t tag, uint64_t offset, uintptr_t address, size_t count) {
        submit(self, DiskOp::Kind::write, tag, offset, address, count);
      }, nb::arg("tag"), nb::arg("offset"), nb::arg("address"), nb::arg("count"))
      .def("write_bytes", [](DiskQueue& self, uint64_t tag, uint64_t offset, nb::bytes data) {
        if (data.size() == 0 || data.size() % kPage || offset % kPage) throw nb::value_error("whole pages of 4 KiB");
        self.submit_copy(tag, offset, static_cast<const uint8_t*>(data.data()), data.size());
      }, nb::arg("tag"), nb::arg("offset"), nb::arg("data"))
      .def("sync", [](DiskQueue& self, uint64_t tag) { self.submit({tag, DiskOp::Kind::sync, 0, nullptr, 0}); },
           nb::arg("tag"))
      .def("take", &take)
      .def("fileno", &DiskQueue::fd)
      .def_prop_ro("file", &DiskQueue::file)
      .def_prop_ro("direct", &DiskQueue::direct)
      .def_prop_ro("engine", &DiskQueue::engine)
      .def_prop_ro("waiting", &DiskQueue::waiting)
      .def_prop_ro("under_way", &DiskQueue::under_way);
}

}  // namespace memserve
