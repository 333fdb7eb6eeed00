#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cctype>

#include "bind/keys.h"
#include "scheduling/sequence.h"
#include "store/memory_tier.h"

namespace memserve {

namespace {

using namespace store;

void make(MemoryTier* self, int64_t arena_bytes, int64_t block_bytes, const std::string& name, int64_t entries,
          nb::bytes secret) {
  if (block_bytes < 1 || arena_bytes < block_bytes) throw nb::value_error("an arena holds at least one block of a byte");
  if (arena_bytes > int64_t{1} << 43) throw nb::value_error("an arena has at most 8 TiB");
  if (block_bytes > INT64_C(1) << 31) throw nb::value_error("a block has at most 2 GiB");
  if (arena_bytes / block_bytes > INT32_MAX) throw nb::value_error("an arena has at most 2**31 - 1 blocks");
  if (entries < 0 || entries > INT64_C(1) << 28) throw nb::value_error("a table has at most 2**28 entries");
  const bool plain = std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '-' || c == '_';
  });
  if (!plain || name.size() > 64) throw nb::value_error("a store's name has at most 64 letters, digits, '-' and '_'");
  if (secret.size() != 0 && secret.size() != 16) throw nb::value_error("a secret has 16 bytes");
  const auto* secret_bytes = secret.size() ? reinterpret_cast<const uint8_t*>(secret.c_str()) : nullptr;
  new (self) MemoryTier(static_cast<uint64_t>(arena_bytes), static_cast<uint64_t>(block_bytes), name,
                        static_cast<size_t>(entries), secret_bytes);
}

void require_shared(const MemoryTier& self) {
  if (!self.files()) throw nb::value_error("a tier without a name is private: no client can read it");
}

std::optional<uint64_t> allocate(MemoryTier& self, int64_t length) {
  if (length < 0) throw nb::value_error("a length must not be negative");
  if (static_cast<uint64_t>(length) > self.arena_bytes()) return std::nullopt;
  return self.allocate(static_cast<uint64_t>(length));
}

nb::object allocate_blocks(MemoryTier& self, int64_t count) {
  if (count < 0) throw nb::value_error("count must not be negative");
  if (static_cast<uint64_t>(count) > self.extents().blocks()) return nb::none();
  std::vector<int32_t> ids(static_cast<size_t>(count));
  if (count > 0 && !self.allocate_blocks(ids.size(), ids.data())) return nb::none();
  return nb::cast(BlockIds(std::move(ids)));
}

std::vector<uint64_t> offsets_of(const MemoryTier& self, nb::handle blocks) {
  const IntSpan ids(blocks);
  std::vector<uint64_t> offsets(ids.size());
  for (size_t i = 0; i < offsets.size(); ++i) {
    if (ids.data()[i] < 0) throw nb::value_error("block ids must not be negative");
    offsets[i] = static_cast<uint64_t>(ids.data()[i]) * self.block_bytes();
  }
  return offsets;
}

bool publish(MemoryTier& self, nb::bytes key, uint64_t offset, uint64_t length, uint32_t scope, uint64_t seal,
             nb::bytes name) {
  if (length > UINT32_MAX) throw nb::value_error("a value has less than 4 GiB");
  if (name.size() > MemoryTier::kNameBytesMax) throw nb::value_error("a name has at most 1,024 bytes");
  return self.publish(key_of(key), offset, static_cast<uint32_t>(length), scope, seal,
                      std::string(name.c_str(), name.size()));
}

size_t prefix(const MemoryTier& self, nb::bytes keys) {
  const auto all = keys_of(keys);
  return self.prefix(all.data(), all.size());
}

nb::list take_evicted(MemoryTier& self) {
  nb::list keys;
  for (const Hash128 key : self.take_evicted()) keys.append(bytes_of(key));
  return keys;
}

nb::bytes all_keys(const MemoryTier& self) {
  return joined_keys(self.entries_used(), [&](auto add) { self.each(add); });
}

std::string open_client(MemoryTier& self, uint64_t number) {
  require_shared(self);
  if (self.has_client(number)) throw nb::value_error("that client's area is open already");
  return self.open_client(number);
}

void close_client(MemoryTier& self, uint64_t number) {
  if (!self.has_client(number)) throw nb::value_error("there is no client of that number");
  self.close_client(number);
}

nb::dict counters(const MemoryTier& self) {
  const TierCounters& counters = self.counters();
  nb::dict all;
  all["published"] = counters.published;
  all["removed"] = counters.removed;
  all["evicted"] = counters.evicted;
  all["hits"] = counters.hits;
  all["misses"] = counters.misses;
  all["client_hits"] = counters.client_hits;
  all["adopted"] = counters.adopted;
  all["refused"] = counters.refused;
  all["hidden"] = counters.hidden;
  all["limbo"] = self.limbo();
  all["clients"] = self.clients();
  return all;
}

nb::bytes name_bytes(const Place& self) { return nb::bytes(self.name.data(), self.name.size()); }

void bind_lookups(nb::class_<MemoryTier>& tier) {
  tier.def("find", [](MemoryTier& self, nb::bytes key, bool counts) { return self.find(key_of(key), counts); },
           nb::arg("key"), nb::kw_only(), nb::arg("counts") = true)
      .def("verified", [](MemoryTier& self, nb::bytes key) { self.verify(key_of(key)); }, nb::arg("key"))
      .def("__contains__", [](const MemoryTier& self, nb::bytes key) { return self.has(key_of(key)); })
      .def("__len__", &MemoryTier::entries_used)
      .def("prefix", &prefix, nb::arg("keys"))
      .def("touch", [](MemoryTier& self, nb::bytes keys, bool hit) { self.touch(keys_of(keys), hit); },
           nb::arg("keys"), nb::arg("hit"))
      .def("keys", &all_keys)
      .def("remove", [](MemoryTier& self, nb::bytes key) { return self.remove(key_of(key)); }, nb::arg("key"))
      .def("purge", &MemoryTier::purge)
      .def("mark_on_disk", [](MemoryTier& self, nb::bytes key, bool here) { self.mark_on_disk(key_of(key), here); },
           nb::arg("key"), nb::arg("here"))
      .def("take_evicted", &take_evicted)
      .def("open_client", &open_client, nb::arg("number"))
      .def("close_client", &close_client, nb::arg("number"))
      .def("unlink", &MemoryTier::unlink)
      .def("counters", &counters)
      .def("check_invariants", &MemoryTier::check_invariants);
}

void bind_sizes(nb::class_<MemoryTier>& tier) {
  tier.def_prop_ro("arena", [](MemoryTier& self) { return self.arena(); }, nb::rv_policy::reference_internal)
      .def_prop_ro("data_path", [](const MemoryTier& self) { return self.files() ? self.files()->data_path() : ""; })
      .def_prop_ro("index_path", [](const MemoryTier& self) { return self.files() ? self.files()->index_path() : ""; })
      .def_prop_ro("adopted", [](const MemoryTier& self) { return self.files() && self.files()->adopted(); })
      .def_prop_ro("block_bytes", &MemoryTier::block_bytes)
      .def_prop_ro("unit_bytes", [](const MemoryTier& self) { return self.extents().unit_bytes(); })
      .def_prop_ro("blocks_total", [](const MemoryTier& self) { return self.extents().blocks(); })
      .def_prop_ro("blocks_free", [](const MemoryTier& self) { return self.extents().blocks_free(); })
      .def_prop_ro("blocks_evictable", &MemoryTier::blocks_evictable)
      .def_prop_ro("bytes_free", [](const MemoryTier& self) {
        return self.extents().units_free() * uint64_t{self.extents().unit_bytes()};
      })
      .def_prop_ro("bytes_used", [](const MemoryTier& self) {
        return (self.extents().units() - self.extents().units_free()) * uint64_t{self.extents().unit_bytes()};
      })
      .def_prop_ro("bytes_evictable", &MemoryTier::bytes_evictable)
      .def_prop_ro("entries", &MemoryTier::entries)
      .def_prop_ro("entries_used", &MemoryTier::entries_used)
      .def_prop_ro("places_used", &MemoryTier::places_used)
      .def_prop_ro("nbytes", &MemoryTier::nbytes);
}

}  // namespace

void bind_memory_tier(nb::module_& m) {
  nb::class_<Place>(m, "Place")
      .def_ro("offset", &Place::offset)
      .def_ro("length", &Place::length)
      .def_ro("scope", &Place::scope)
      .def_ro("seal", &Place::seal)
      .def_ro("verified", &Place::verified)
      .def_prop_ro("name", &name_bytes);
  nb::class_<MemoryTier> tier(m, "MemoryTier", "Values in one arena, by key.");
  tier.def("__init__", &make, nb::arg("arena_bytes"), nb::arg("block_bytes"), nb::kw_only(), nb::arg("name") = "",
           nb::arg("entries") = 0, nb::arg("secret") = nb::bytes("", 0))
      .def("allocate", &allocate, nb::arg("length"))
      .def("allocate_blocks", &allocate_blocks, nb::arg("count"))
      .def("retain", &MemoryTier::retain, nb::arg("offset"))
      .def("release", &MemoryTier::release, nb::arg("offset"))
      .def("retain_blocks", [](MemoryTier& self, nb::handle blocks) { self.retain_all(offsets_of(self, blocks)); },
           nb::arg("blocks"))
      .def("release_blocks", [](MemoryTier& self, nb::handle blocks) { self.release_all(offsets_of(self, blocks)); },
           nb::arg("blocks"))
      .def("ref_count", &MemoryTier::ref_count, nb::arg("offset"))
      .def("publish", &publish, nb::arg("key"), nb::arg("offset"), nb::arg("length"), nb::kw_only(),
           nb::arg("scope") = 0, nb::arg("seal") = 0, nb::arg("name") = nb::bytes("", 0));
  bind_lookups(tier);
  bind_sizes(tier);
}

}  // namespace memserve
