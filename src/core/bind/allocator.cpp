#include <string>

#include "pool/allocator.h"
#include "scheduling/sequence.h"

namespace memserve {

namespace {

size_t valid_count(int64_t count, const char* what) {
  if (count < 0) throw nb::value_error((std::string(what) + " must not be negative").c_str());
  return static_cast<size_t>(count);
}

nb::object allocate(BlockAllocator& self, int64_t count) {
  const size_t wanted = valid_count(count, "count");
  if (wanted > static_cast<size_t>(self.blocks_free())) return nb::none();
  std::vector<int32_t> ids(wanted);
  self.allocate(wanted, ids.data());
  return nb::cast(BlockIds(std::move(ids)));
}

nb::object allocate_pages(BlockAllocator& self, int64_t count) {
  const size_t wanted = valid_count(count, "count");
  if (static_cast<int64_t>(wanted) > self.pages_free()) return nb::none();
  std::vector<int32_t> pages(wanted);
  self.allocate_pages(wanted, pages.data());
  return nb::cast(BlockIds(std::move(pages)));
}

void construct(BlockAllocator* self, int64_t num_blocks, int64_t pages_per_block) {
  if (num_blocks < 0 || pages_per_block < 1 || num_blocks > INT32_MAX / pages_per_block) {
    throw nb::value_error("num_blocks >= 0, pages_per_block >= 1 and their product must fit in 31 bits");
  }
  new (self) BlockAllocator(static_cast<int32_t>(num_blocks), static_cast<int32_t>(pages_per_block));
}

}  // namespace

void bind_allocator(nb::module_& m) {
  nb::class_<BlockAllocator>(m, "BlockAllocator", "Free and held blocks and loose pages of one arena.")
      .def("__init__", &construct, nb::arg("num_blocks"), nb::arg("pages_per_block") = 1)
      .def("allocate", &allocate, nb::arg("count"))
      .def("retain", [](BlockAllocator& self, nb::handle blocks) { self.retain(IntSpan(blocks).span()); },
           nb::arg("blocks"))
      .def("release", [](BlockAllocator& self, nb::handle blocks) { return self.release(IntSpan(blocks).span()); },
           nb::arg("blocks"))
      .def("ref_count", &BlockAllocator::ref_count, nb::arg("block"))
      .def("allocate_pages", &allocate_pages, nb::arg("count"))
      .def("release_pages",
           [](BlockAllocator& self, nb::handle pages) { return self.release_pages(IntSpan(pages).span()); },
           nb::arg("pages"))
      .def_prop_ro("blocks_total", &BlockAllocator::num_blocks)
      .def_prop_ro("blocks_free", &BlockAllocator::blocks_free)
      .def_prop_ro("blocks_used", &BlockAllocator::blocks_held)
      .def_prop_ro("blocks_broken", &BlockAllocator::blocks_broken)
      .def_prop_ro("blocks_evictable", &BlockAllocator::idle_sole)
      .def_prop_ro("pages_per_block", &BlockAllocator::pages_per_block)
      .def_prop_ro("pages_free", &BlockAllocator::pages_free)
      .def_prop_ro("pages_stranded", &BlockAllocator::pages_stranded)
      .def_prop_ro("pages_loose", &BlockAllocator::pages_loose)
      .def("check_invariants", &BlockAllocator::check_invariants);

  nb::class_<HoldCounts>(m, "HoldCounts", "How many times the user of a pool holds each block.")
      .def("__init__",
           [](HoldCounts* self, int64_t num_blocks) {
             if (num_blocks < 0 || num_blocks > INT32_MAX) throw nb::value_error("num_blocks must fit in 31 bits");
             new (self) HoldCounts(static_cast<int32_t>(num_blocks));
           },
           nb::arg("num_blocks"))
      .def_prop_ro("blocks_total", &HoldCounts::num_blocks)
      .def("take", [](HoldCounts& self, nb::handle blocks) { self.take(IntSpan(blocks).span()); }, nb::arg("blocks"))
      .def("give",
           [](HoldCounts& self, nb::handle blocks) -> nb::object {
             const IntSpan ids(blocks);
             const size_t given = self.give(ids.span());
             return given == ids.span().size() ? nb::none() : nb::cast(ids.span()[given]);
           },
           nb::arg("blocks"));
}

}  // namespace memserve
