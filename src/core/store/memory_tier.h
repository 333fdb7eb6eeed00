// Values in one arena by key: which extent holds which, what may be evicted, and what other processes see of it.
// Bookkeeping: no byte of a value is touched, but for names, which lie behind their values.
//
//   allocate -> extent, 1 reference --publish--> found by its key: the table has a reference of its own
//   find: 1 reference more --release--> ... only the table's is left: it may be evicted
//
// All published values stand in a queue, the one that was used last at its end: a hit goes there, a look that counts for
// nothing leaves the order as it is. Eviction is second chance: the oldest that was not hit since it came, or came
// back, goes, unless it has references. What a client of this host pins stays; a value that is removed while a client
// pins it waits in limbo until the pin is gone.
//
// All accounting is private memory. The shared table (shared_table.h) is written, and read at an adoption alone.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "store/client_area.h"
#include "store/extents.h"
#include "store/id_table.h"
#include "store/shared_table.h"
#include "store/tier_files.h"

namespace memserve::store {

struct TierCounters {
  uint64_t published = 0, removed = 0, evicted = 0, hits = 0, misses = 0, client_hits = 0, adopted = 0, refused = 0;
  uint64_t hidden = 0;  // published, and not shown: both buckets were full
};

// Where a value lies.
struct Place {
  uint64_t offset;
  uint32_t length;
  uint32_t scope;
  uint64_t seal;
  bool verified;
  std::string name;
};

class MemoryTier {
 public:
  static constexpr size_t kNameBytesMax = 1024;

  // `name` "": private. `entries` 0: from the sizes. `secret`: by which tables hash, drawn where nullptr. Throws
  // std::system_error as TierFiles does.
  MemoryTier(uint64_t arena_bytes, uint64_t block_bytes, const std::string& name, size_t entries, const uint8_t* secret);

  std::optional<uint64_t> allocate(uint64_t bytes);
  bool allocate_blocks(size_t count, int32_t* out);
  // A place that holds no extent, or one reference too many given back: InvariantViolation, nothing changed.
  void retain(uint64_t offset) { retain_all({&offset, 1}); }
  void release(uint64_t offset) { release_all({&offset, 1}); }
  void retain_all(std::span<const uint64_t> offsets);
  void release_all(std::span<const uint64_t> offsets);
  uint32_t ref_count(uint64_t offset) const;

  // False: the key is here already.
  bool publish(Hash128 key, uint64_t offset, uint32_t length, uint32_t scope, uint64_t seal, const std::string& name);
  std::optional<Place> find(Hash128 key, bool counts);
  void verify(Hash128 key);
  bool has(Hash128 key) const { return find_key(key) != kNone; }
  size_t prefix(const Hash128* keys, size_t count) const;
  // Values that lead to one another, the first one to all: used just now, the last one longest ago. `hit`: not for the
  // first time. No hit is counted.
  void touch(std::span<const Hash128> keys, bool hit);
  bool remove(Hash128 key);
  void purge();
  void mark_on_disk(Hash128 key, bool here);
  std::vector<Hash128> take_evicted() { return std::exchange(evicted_, {}); }

  bool has_client(uint64_t number) const { return clients_.has(number); }
  const std::string& open_client(uint64_t number);
  void close_client(uint64_t number);
  void unlink();

  template <class Visit>
  void each(Visit visit) const {
    for (const Record& record : records_) {
      if (record.published) visit(record.key);
    }
  }

  SharedArena* arena() { return files_ ? &files_->arena() : nullptr; }
  const TierFiles* files() const { return files_.get(); }
  const Extents& extents() const { return extents_; }
  const TierCounters& counters() const { return counters_; }
  uint64_t arena_bytes() const { return arena_bytes_; }
  uint64_t block_bytes() const { return block_bytes_; }
  size_t entries() const { return entries_; }
  size_t entries_used() const { return by_key_.size(); }
  size_t places_used() const { return places_.count(); }
  uint64_t bytes_evictable() const { return evictable_bytes_; }
  size_t blocks_evictable() const { return evictable_blocks_; }
  size_t limbo() const { return limbo_.size(); }
  size_t clients() const { return clients_.count(); }
  size_t nbytes() const;
  void check_invariants() const;

 private:
  static constexpr uint32_t kNone = IdTable::kNone;

  struct Record {
    Hash128 key = {};
    Extent extent;
    uint64_t seal = 0;
    uint32_t length = 0;
    uint32_t scope = 0;
    uint32_t refs = 0;
    uint32_t place = Places::kNone;
    uint32_t before = kNone, behind = kNone;  // in the queue
    uint64_t stamp = 0;                       // when it came there
    uint16_t name_bytes = 0;
    bool used : 1 = false;
    bool published : 1 = false;
    bool had_key : 1 = false;
    bool verified : 1 = false;
    bool on_disk : 1 = false;
    bool hit : 1 = false;
    bool idle : 1 = false;  // published, and only the table refers to it
    bool seen : 1 = false;  // clients may have found it, so they may still read it
    bool limbo : 1 = false;
    bool victim : 1 = false;
  };

  // What has to fit.
  struct Need {
    Extent shape;
    size_t blocks = 0;  // not 0: so many blocks instead
  };

  // Units [first, end).
  struct Stretch {
    size_t first = 0, end = 0;
    bool empty() const { return first == end; }
  };

  // memory_tier.cpp
  uint64_t hash_of(Hash128 key) const { return mix(key.low ^ secret_[0], key.high ^ secret_[1]); }
  uint64_t hash_of(uint64_t offset) const { return mix(offset ^ secret_[0], secret_[1]); }
  uint32_t find_key(Hash128 key) const;
  uint32_t find_offset(uint64_t offset) const;
  uint32_t held(uint64_t offset, const char* verb) const;
  uint32_t add(const Extent& extent);
  void forget(uint32_t id);
  void unpublish(uint32_t id);
  void drop_table_references(std::vector<uint32_t>& ids);
  void free_all(const std::vector<uint32_t>& ids);
  void enqueue(uint32_t id);
  void dequeue(uint32_t id);
  void requeue(uint32_t id) {
    dequeue(id);
    enqueue(id);
  }
  void set_idle(uint32_t id, bool idle);
  bool is_block(const Extent& extent) const {
    return extent.units == extents_.units_per_block() && extent.offset % block_bytes_ == 0;
  }
  std::string name_of(const Record& record) const;
  uint64_t client_bytes_max() const { return arena_bytes_ / 4; }

  // tier_shown.cpp
  Shown shown_of(const Record& record) const;
  void show(uint32_t id);
  void hide(uint32_t id);
  void adopt();
  bool adopt_one(uint32_t place);

  // tier_evict.cpp
  bool fits(const Need& need);
  bool make_room(const Need& need);
  bool plan(const Need& need, std::vector<std::vector<uint32_t>>& windows);
  void plan_pass(const Need& need, bool picky, size_t& missing, std::vector<std::vector<uint32_t>>& windows,
                 std::unordered_set<size_t>& won);
  bool window(uint32_t id, const Need& need, std::vector<uint32_t>& victims) const;
  size_t blocks_won(const std::vector<uint32_t>& victims, std::unordered_set<size_t>& won) const;
  Stretch loose_at(size_t unit, std::vector<uint32_t>* victims) const;
  bool window_at(size_t first, size_t end, std::vector<uint32_t>& victims) const;
  void evict(const std::vector<std::vector<uint32_t>>& windows);
  void evict_one();
  void read_clients();
  bool pinned(const Record& record) const { return pins_.count(record.extent.offset) != 0; }
  void drain_limbo();

  uint64_t arena_bytes_, block_bytes_;
  uint64_t secret_[2];
  Extents extents_;
  size_t entries_;
  std::unique_ptr<TierFiles> files_;  // null: private
  Places places_;
  ClientAreas clients_;
  std::vector<Record> records_;
  std::vector<uint32_t> free_records_;
  IdTable by_key_, by_offset_;
  std::unordered_map<uint32_t, std::string> names_;  // of private tiers
  uint32_t first_ = kNone, last_ = kNone;            // of the queue
  size_t queued_ = 0;
  uint64_t stamp_ = 0;
  uint64_t evictable_bytes_ = 0;
  size_t evictable_blocks_ = 0;
  std::vector<uint32_t> limbo_;
  std::unordered_set<uint64_t> pins_;  // extents, as of the last read_clients
  std::vector<Hash128> evicted_;
  TierCounters counters_;
};

}  // namespace memserve::store
