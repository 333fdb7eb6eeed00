#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>

#include "directory/directory.h"
#include "scheduling/sequence.h"

namespace memserve {

namespace {

using MatchColumns = nb::ndarray<nb::numpy, int64_t, nb::shape<2, -1>, nb::c_contig>;
using MatchArray = nb::ndarray<nb::numpy, int32_t, nb::shape<-1, 3>, nb::c_contig>;

uint32_t valid_holder(int64_t holder) {
  if (holder < 0 || holder >= kHoldersMax) throw nb::value_error("a holder is a number below 65,536");
  return static_cast<uint32_t>(holder);
}

int valid_tier(int64_t tier) {
  if (tier != kHbm && tier != kDram) throw nb::value_error("tier must be HBM or DRAM");
  return static_cast<int>(tier);
}

Identities identities(nb::bytes blocks) {
  if (blocks.size() % kIdentityBytes != 0) throw nb::value_error("identities are 16 bytes each");
  return {reinterpret_cast<const uint8_t*>(blocks.c_str()), blocks.size() / kIdentityBytes};
}

const uint8_t* sixteen(nb::bytes value) {
  if (value.size() != kIdentityBytes) throw nb::value_error("key and namespace must be 16 bytes");
  return reinterpret_cast<const uint8_t*>(value.c_str());
}

std::span<const PrefixHeld> match_prompt(PrefixDirectory& self, nb::bytes key, nb::bytes name, nb::handle tokens,
                                         int64_t block_tokens) {
  if (block_tokens < 1) throw nb::value_error("block_tokens must be positive");
  const IntSpan span(tokens);
  return self.match(Prompt{sixteen(key), load_identity(sixteen(name)), span.span(), static_cast<size_t>(block_tokens)});
}

// Python ints for the rows, cached: making one costs as much as the rest of a row, and most are used again.
class Ints {
 public:
  // A new reference.
  PyObject* operator[](int32_t value) {
    const auto at = static_cast<size_t>(value);
    if (at >= kKept) return PyLong_FromLong(value);
    while (made_.size() <= at) made_.push_back(nb::int_(made_.size()));
    return nb::object(made_[at]).release().ptr();
  }

 private:
  static constexpr size_t kKept = 4096;
  std::vector<nb::object> made_;
};

// A list of tuples, untracked by the garbage collector: tuples of ints need no look, and finding that out costs time.
nb::object as_list(std::span<const PrefixHeld> found) {
  static Ints& ints = *new Ints;  // never destroyed: the interpreter may be gone by then
  nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(found.size())));
  for (size_t i = 0; i < found.size(); ++i) {
    PyObject* const row = PyTuple_New(3);
    if (!row) throw nb::python_error();
    PyTuple_SetItem(row, 0, ints[found[i].holder]);
    PyTuple_SetItem(row, 1, ints[found[i].blocks]);
    PyTuple_SetItem(row, 2, ints[found[i].dram_blocks]);
    PyObject_GC_UnTrack(row);
    PyList_SetItem(list.ptr(), static_cast<Py_ssize_t>(i), row);
  }
  return list;
}

MatchArray as_array(std::span<const PrefixHeld> found) {
  static_assert(sizeof(PrefixHeld) == 3 * sizeof(int32_t));
  auto rows = std::make_unique<PrefixHeld[]>(found.size());
  std::ranges::copy(found, rows.get());
  PrefixHeld* const data = rows.release();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<PrefixHeld*>(array); });
  return MatchArray(data, {found.size(), 3}, owner);
}

// Columns by holder's number: blocks, and how many of them lie in DRAM; then the number of holders with any.
nb::tuple as_columns(std::span<const PrefixHeld> found, size_t numbers) {
  auto columns = std::make_unique<int64_t[]>(2 * numbers);  // zeros
  for (const PrefixHeld& held : found) {
    const auto at = static_cast<size_t>(held.holder);
    if (at >= numbers) throw nb::value_error("a holder's number is beyond the columns");
    columns[at] = held.blocks;
    columns[numbers + at] = held.dram_blocks;
  }
  int64_t* const data = columns.release();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<int64_t*>(array); });
  return nb::make_tuple(MatchColumns(data, {2, numbers}, owner), found.size());
}

nb::list dump(const PrefixDirectory& self, int64_t holder) {
  nb::list out;
  for (const DumpedBlock& block : self.dump(valid_holder(holder))) {
    out.append(nb::make_tuple(nb::bytes(block.identity.data(), block.identity.size()), block.hbm, block.dram));
  }
  return out;
}

nb::list holders(const PrefixDirectory& self) {
  nb::list out;
  for (const uint32_t holder : self.holders()) out.append(holder);
  return out;
}

nb::bytes locate(const PrefixDirectory& self, nb::bytes blocks, const std::vector<int64_t>& numbers) {
  std::vector<uint32_t> holders;
  for (const int64_t number : numbers) holders.push_back(valid_holder(number));
  const std::vector<uint8_t> places = self.locate(identities(blocks), holders);
  return nb::bytes(places.data(), places.size());
}

void bind_changes(nb::class_<PrefixDirectory>& c) {
  c.def("store",
        [](PrefixDirectory& self, int64_t holder, int64_t tier, nb::bytes blocks) {
          self.store(valid_holder(holder), valid_tier(tier), identities(blocks));
        },
        nb::arg("holder"), nb::arg("tier"), nb::arg("identities"));
  c.def("move",
        [](PrefixDirectory& self, int64_t holder, int64_t tier, nb::bytes blocks) {
          return self.move(valid_holder(holder), valid_tier(tier), identities(blocks));
        },
        nb::arg("holder"), nb::arg("tier"), nb::arg("identities"));
  c.def("evict",
        [](PrefixDirectory& self, int64_t holder, nb::bytes blocks, std::optional<int64_t> tier) {
          const std::optional<int> from = tier ? std::optional(valid_tier(*tier)) : std::nullopt;
          return self.evict(valid_holder(holder), identities(blocks), from);
        },
        nb::arg("holder"), nb::arg("identities"), nb::arg("tier") = nb::none());
  c.def("clear", [](PrefixDirectory& self, int64_t holder) { self.clear(valid_holder(holder)); }, nb::arg("holder"));
  c.def("speculate",
        [](PrefixDirectory& self, int64_t holder, nb::bytes blocks, int64_t expires_ns) {
          self.speculate(valid_holder(holder), identities(blocks), expires_ns);
        },
        nb::arg("holder"), nb::arg("identities"), nb::arg("expires_ns"));
  c.def("expire", &PrefixDirectory::expire, nb::arg("now_ns"));
}

void bind_questions(nb::class_<PrefixDirectory>& c) {
  c.def("match", [](PrefixDirectory& self, nb::bytes blocks) { return as_list(self.match(identities(blocks))); },
        nb::arg("identities"));
  c.def("match_array", [](PrefixDirectory& self, nb::bytes blocks) { return as_array(self.match(identities(blocks))); },
        nb::arg("identities"));
  c.def("match_columns",
        [](PrefixDirectory& self, nb::bytes blocks, size_t numbers) {
          return as_columns(self.match(identities(blocks)), numbers);
        },
        nb::arg("identities"), nb::arg("numbers"));
  c.def("match_tokens",
        [](PrefixDirectory& self, nb::bytes key, nb::bytes name, nb::handle tokens, int64_t block_tokens) {
          return as_list(match_prompt(self, key, name, tokens, block_tokens));
        },
        nb::arg("key"), nb::arg("namespace"), nb::arg("tokens"), nb::arg("block_tokens"));
  c.def("match_tokens_array",
        [](PrefixDirectory& self, nb::bytes key, nb::bytes name, nb::handle tokens, int64_t block_tokens) {
          return as_array(match_prompt(self, key, name, tokens, block_tokens));
        },
        nb::arg("key"), nb::arg("namespace"), nb::arg("tokens"), nb::arg("block_tokens"));
  c.def("locate", &locate, nb::arg("identities"), nb::arg("holders"));
  c.def("holders", &holders);
  c.def("blocks", [](const PrefixDirectory& self, int64_t holder) { return self.blocks(valid_holder(holder)); },
        nb::arg("holder"));
  c.def("speculative_blocks",
        [](const PrefixDirectory& self, int64_t holder) { return self.speculative_blocks(valid_holder(holder)); },
        nb::arg("holder"));
  c.def("dump", &dump, nb::arg("holder"));
  c.def_prop_ro("entries", &PrefixDirectory::entries);
  c.def_prop_ro("nbytes", &PrefixDirectory::nbytes);
  c.def_prop_ro("next_expiry_ns", &PrefixDirectory::next_expiry_ns);
  c.def("check_invariants", &PrefixDirectory::check_invariants);
}

}  // namespace

void bind_directory(nb::module_& m) {
  nb::class_<PrefixDirectory> directory(m, "PrefixDirectory", "Which instance holds which block, on which tier.");
  directory.def(nb::init<>());
  bind_changes(directory);
  bind_questions(directory);
}

}  // namespace memserve
