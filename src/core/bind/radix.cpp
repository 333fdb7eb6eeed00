#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "radix/index.h"
#include "scheduling/sequence.h"

namespace memserve {

namespace {

NamespaceId namespace_of(nb::bytes name) {
  if (name.size() != 16) throw nb::value_error("a namespace id is 16 bytes (see namespace_id)");
  NamespaceId id;
  std::memcpy(&id, name.c_str(), sizeof id);
  return id;
}

BlockIds ids(std::vector<int32_t>&& blocks) { return BlockIds(std::move(blocks)); }

// A cached path as Python sees it.
struct Match {
  size_t tokens = 0;
  uint32_t pin = 0;
  BlockIds hbm, dram;
};

size_t match(const RadixIndex& self, nb::bytes name, nb::handle tokens) {
  return self.walk(namespace_of(name), IntSpan(tokens).span()).depth * self.block_tokens();
}

Match describe(const RadixIndex& self, const Position& end, uint32_t pin) {
  std::vector<int32_t> hbm, dram;
  self.path_blocks(end, hbm, dram);
  return {end.depth * self.block_tokens(), pin, ids(std::move(hbm)), ids(std::move(dram))};
}

Match match_blocks(const RadixIndex& self, nb::bytes name, nb::handle tokens) {
  return describe(self, self.walk(namespace_of(name), IntSpan(tokens).span()), 0);
}

std::vector<int32_t> continuation(const RadixIndex& self, nb::bytes name, nb::handle tokens, size_t count) {
  const auto found = self.continuation(namespace_of(name), IntSpan(tokens).span(), count);
  return {found.begin(), found.end()};
}

Match acquire(RadixIndex& self, nb::bytes name, nb::handle tokens) {
  Position end;
  const uint32_t pin = self.pin(namespace_of(name), IntSpan(tokens).span(), end);
  Match found = describe(self, end, pin);
  self.retain_hbm(found.hbm.span());
  return found;
}

Insertion insert(RadixIndex& self, nb::bytes name, nb::handle tokens, nb::handle blocks, int64_t hbm_blocks,
                 bool pin, nb::bytes owner) {
  const IntSpan token_span(tokens), block_span(blocks);
  if (block_span.size() < token_span.size() / self.block_tokens()) {
    throw nb::value_error("give one block id for each whole block of tokens");
  }
  const size_t in_hbm = hbm_blocks < 0 ? block_span.size() : static_cast<size_t>(hbm_blocks);
  const NamespaceId owner_id = owner.size() ? namespace_of(owner) : NamespaceId{};
  return self.insert(namespace_of(name), token_span.span(), block_span.span(), in_hbm, pin, owner_id);
}

int valid_tier(int tier) {
  if (tier != kHbm && tier != kDram) throw nb::value_error("tier must be 0 (HBM) or 1 (DRAM)");
  return tier;
}

Eviction evict(RadixIndex& self, int tier, int64_t count) {
  if (count < 0) throw nb::value_error("count must not be negative");
  valid_tier(tier);
  Eviction out;
  if (tier == kHbm) {
    self.evict_hbm(static_cast<size_t>(count), out);
  } else {
    out.freed = self.evict_dram(static_cast<size_t>(count), out);
  }
  return out;
}

Eviction erase(RadixIndex& self, nb::bytes name, nb::handle tokens) {
  Eviction out;
  self.erase(namespace_of(name), IntSpan(tokens).span(), out);
  return out;
}

void construct(RadixIndex* self, int64_t block_tokens, BlockAllocator* hbm, BlockAllocator* dram, uint64_t seed) {
  if (block_tokens < 1 || block_tokens > 65536) throw nb::value_error("block_tokens must be between 1 and 65536");
  if (hbm && hbm == dram) throw nb::value_error("the two tiers need separate allocators");
  new (self) RadixIndex(static_cast<uint32_t>(block_tokens), hbm, dram, seed);
}

BlockIds pick(const Eviction& self, Eviction::Kind kind, bool target) {
  std::vector<int32_t> picked;
  for (const auto& change : self.changes) {
    if (change.kind == kind) picked.push_back(target ? change.to : change.from);
  }
  return BlockIds(std::move(picked));
}

std::vector<std::tuple<int, int32_t, int32_t>> list_changes(const Eviction& self) {
  std::vector<std::tuple<int, int32_t, int32_t>> out;
  for (const auto& change : self.changes) out.emplace_back(change.kind, change.from, change.to);
  return out;
}

void bind_results(nb::module_& m) {
  nb::class_<Match>(m, "Match", "A cached path: ``tokens`` and its blocks, HBM first, then DRAM.")
      .def_ro("tokens", &Match::tokens)
      .def_ro("pin", &Match::pin)
      .def_ro("hbm", &Match::hbm)
      .def_ro("dram", &Match::dram);
  nb::class_<Insertion>(m, "Insertion")
      .def_ro("added", &Insertion::added)
      .def_ro("pin", &Insertion::pin)
      .def_prop_ro("adopted_dram", [](const Insertion& self) { return BlockIds(self.adopted_dram); });
  nb::class_<Promotion>(m, "Promotion")
      .def_ro("pin", &Promotion::pin)
      .def_prop_ro("left_dram", [](const Promotion& self) { return BlockIds(self.left_dram); });
  nb::class_<Eviction>(m, "Eviction", "What left the index or moved inside it; its references are dropped.")
      .def_ro("freed", &Eviction::freed)
      .def_prop_ro("changes", &list_changes,
                   "``(kind, from, to)`` in order; kind 0 = dropped from HBM, 1 = dropped from DRAM, 2 = moved down.")
      .def_prop_ro("moved_from", [](const Eviction& self) { return pick(self, Eviction::kMoved, false); })
      .def_prop_ro("moved_to", [](const Eviction& self) { return pick(self, Eviction::kMoved, true); })
      .def_prop_ro("dropped_hbm", [](const Eviction& self) { return pick(self, Eviction::kDroppedHbm, false); })
      .def_prop_ro("dropped_dram", [](const Eviction& self) { return pick(self, Eviction::kDroppedDram, false); })
      .def_ro("ended_holds", &Eviction::ended_holds);
}

}  // namespace

void bind_radix(nb::module_& m) {
  bind_results(m);
  nb::class_<RadixIndex> cls(m, "RadixIndex", "Radix tree over whole blocks of tokens, one root a namespace.");
  cls.def("__init__", &construct, nb::arg("block_tokens"), nb::arg("hbm") = nb::none(),
          nb::arg("dram") = nb::none(), nb::arg("hash_seed") = 0, nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("match", &match, nb::arg("namespace"), nb::arg("tokens"))
      .def("match_blocks", &match_blocks, nb::arg("namespace"), nb::arg("tokens"))
      .def("continuation", &continuation, nb::arg("namespace"), nb::arg("tokens"), nb::arg("count"))
      .def("acquire", &acquire, nb::arg("namespace"), nb::arg("tokens"))
      .def("unpin", &RadixIndex::unpin, nb::arg("pin"))
      .def("hold",
           [](RadixIndex& self, nb::bytes name, nb::handle tokens) {
             return self.hold(namespace_of(name), IntSpan(tokens).span());
           },
           nb::arg("namespace"), nb::arg("tokens"))
      .def("unhold", [](RadixIndex& self, uint32_t hold, int tier) { self.unhold(hold, valid_tier(tier)); },
           nb::arg("hold"), nb::arg("tier"))
      .def("is_held",
           [](const RadixIndex& self, uint32_t hold, int tier) { return self.is_held(hold, valid_tier(tier)); },
           nb::arg("hold"), nb::arg("tier"))
      .def("make_oldest",
           [](RadixIndex& self, nb::bytes name, nb::handle tokens) {
             return self.make_oldest(namespace_of(name), IntSpan(tokens).span());
           },
           nb::arg("namespace"), nb::arg("tokens"))
      .def("demote",
           [](RadixIndex& self, nb::bytes name, nb::handle tokens) {
             Eviction out;
             self.demote(namespace_of(name), IntSpan(tokens).span(), out);
             return out;
           },
           nb::arg("namespace"), nb::arg("tokens"))
      .def("set_demotes_held_only", &RadixIndex::set_demotes_held_only)
      .def("insert", &insert, nb::arg("namespace"), nb::arg("tokens"), nb::arg("blocks"),
           nb::arg("hbm_blocks") = -1, nb::arg("pin") = false, nb::arg("owner") = nb::bytes(""))
      .def("promote",
           [](RadixIndex& self, uint32_t pin, nb::handle blocks) { return self.promote(pin, IntSpan(blocks).span()); },
           nb::arg("pin"), nb::arg("hbm_blocks"))
      .def("evictable", [](const RadixIndex& self, int tier) { return self.evictable(valid_tier(tier)); },
           nb::arg("tier"))
      .def("evictable_blocks",
           [](const RadixIndex& self, int tier, size_t at_most) {
             return self.evictable_blocks(valid_tier(tier), at_most);
           },
           nb::arg("tier"), nb::arg("at_most"))
      .def("evict", &evict, nb::arg("tier"), nb::arg("count"))
      .def("delete", &erase, nb::arg("namespace"), nb::arg("tokens"))
      .def("clear", [](RadixIndex& self) { Eviction out; self.clear(out); return out; })
      .def("burden",
           [](const RadixIndex& self, nb::bytes owner, int tier, size_t beside) {
             return self.burden_of(namespace_of(owner), valid_tier(tier), beside);
           },
           nb::arg("owner"), nb::arg("tier"), nb::arg("beside") = 0)
      .def("blocks", [](const RadixIndex& self, int tier) { return self.blocks_in(valid_tier(tier)); },
           nb::arg("tier"))
      .def("blocks_pinned", [](const RadixIndex& self, int tier) { return self.blocks_locked(valid_tier(tier)); },
           nb::arg("tier"))
      .def_prop_ro("block_tokens", &RadixIndex::block_tokens)
      .def_prop_ro("nodes", &RadixIndex::nodes)
      .def_prop_ro("nbytes", &RadixIndex::bytes)
      .def("check_invariants", &RadixIndex::check_invariants);
}

}  // namespace memserve
