// The table of a memory tier that other processes of the host read without a lock: which value lies where.
//
//   file    | head, 4096 | 7 buckets, 4096 | 7 buckets, 4096 | ...
//   bucket  | tags: 8 words | 8 entries of 64 bytes |
//
// A key has two buckets of eight places. A place's tag is 0 while it is empty, else half of its key: one line tells in
// nearly all cases where in a bucket to look, and no bucket lies on two pages. There are no tombstones; when both buckets
// are full the value is not shown.
//
// Each entry has a version, odd while its owner changes it: a reader copies the words, and counts them if the version
// is even and the same before and after. The owner never acts on what it reads here, except at an adoption, where every
// word is checked: a hostile process can spoil what readers see, not what the owner knows.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "identity/siphash.h"
#include "pool/mapping.h"

namespace memserve::store {

constexpr size_t kWays = 8;

// What is said of a key, as both sides handle it.
struct Shown {
  static constexpr uint8_t kInMemory = 1, kOnDisk = 2, kVerified = 4;

  Hash128 key = {};
  uint64_t offset = 0;
  uint64_t seal = 0;
  uint32_t length = 0;
  uint32_t scope = 0;
  uint32_t units = 0;  // of the extent, 0: part of a slab
  uint16_t name_bytes = 0;
  uint8_t state = 0;
  uint8_t size_class = 0;
};
static_assert(sizeof(Shown) == 48);

struct SharedEntry {
  std::atomic<uint64_t> version;
  std::atomic<uint64_t> words[6];  // a Shown
  std::atomic<uint64_t> check;     // over the words, with the table's secret
};
static_assert(sizeof(SharedEntry) == 64 && std::atomic<uint64_t>::is_always_lock_free);

struct TableHead {
  static constexpr uint64_t kMagic = 0x31454c42415453;  // "STABLE1"
  uint64_t magic = kMagic;
  uint64_t arena_bytes = 0;
  uint64_t block_bytes = 0;
  uint64_t unit_bytes = 0;
  uint64_t buckets = 0;
  uint64_t secret[2] = {};
  uint64_t arena_id[2] = {};  // the data file has it as well
  uint64_t epoch = 0;         // counts up with each owner
  uint64_t check = 0;         // of all above but `epoch`
};

// A map of the file, writable or not. Its size was compared with the head's.
class SharedTable {
 public:
  static constexpr size_t kHeadBytes = 4096;
  static constexpr size_t kBucketBytes = 64 + kWays * sizeof(SharedEntry);
  static constexpr size_t kPage = 4096, kInPage = kPage / kBucketBytes;  // buckets of a page
  static size_t file_bytes(size_t buckets) {
    const size_t bytes = kHeadBytes + (buckets + kInPage - 1) / kInPage * kPage;
    return bytes < kHugePage ? bytes : (bytes + kHugePage - 1) / kHugePage * kHugePage;
  }
  // How many buckets show about `entries` keys.
  static size_t buckets_for(size_t entries) { return (entries + 5) / 6 + 1; }
  static uint64_t check_of(const TableHead& head);

  explicit SharedTable(uint8_t* start);

  const TableHead& head() const { return *reinterpret_cast<const TableHead*>(start_); }
  size_t buckets() const { return buckets_; }
  size_t places() const { return buckets_ * kWays; }
  size_t bucket(Hash128 key, bool second) const;
  std::atomic<uint64_t>& tag(size_t place) const { return at(place / kWays)->tags[place % kWays]; }
  SharedEntry& entry(size_t place) const { return at(place / kWays)->entries[place % kWays]; }
  static uint64_t tag_of(Hash128 key) { return (key.low ^ (key.high << 32 | key.high >> 32)) | 1; }

  // -- readers
  struct Seen {
    size_t place;
    uint64_t version;
    Shown shown;
  };
  // What is shown of a key now; nothing: it is absent, or is being changed.
  std::optional<Seen> look(Hash128 key) const;
  bool unchanged(const Seen& seen) const;
  // Of each key its state, 0: it is not shown. Many keys take less time together.
  void states(const Hash128* keys, size_t count, uint8_t* out) const;

  // -- the owner
  uint64_t check_of(const Shown& shown) const;
  void write(size_t place, const Shown& shown) const;
  void clear(size_t place) const;
  // From now on no reader takes this entry up; those that did before can be told by their pins. `close` writes again.
  void retire(size_t place) const;
  // What an earlier owner published here; nothing: half-written, damaged, or empty.
  std::optional<Shown> recover(size_t place) const;

 private:
  struct Bucket {
    std::atomic<uint64_t> tags[kWays];
    SharedEntry entries[kWays];
  };
  static_assert(sizeof(Bucket) == kBucketBytes);

  Bucket* at(size_t bucket) const {
    return reinterpret_cast<Bucket*>(start_ + kHeadBytes + bucket / kInPage * kPage + bucket % kInPage * kBucketBytes);
  }
  std::optional<Seen> look_at(size_t place, Hash128 key) const;

  uint8_t* start_;
  size_t buckets_;
  uint64_t secret_[2];
};

// The owner's book of which places are in use: private memory.
class Places {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  explicit Places(size_t buckets) : used_(buckets, 0), disk_(buckets, 0) {}

  // A place for a key; one that only says "on disk" gives way to a value in memory. kNone: both buckets are full.
  uint32_t choose(const SharedTable& table, Hash128 key, bool in_memory) const;
  // Where a key that is on disk alone is shown.
  uint32_t find_disk(const SharedTable& table, Hash128 key) const;
  void take(uint32_t place, bool disk_alone);
  void give(uint32_t place);
  bool used(uint32_t place) const { return used_[place / kWays] >> place % kWays & 1; }
  bool disk_alone(uint32_t place) const { return disk_[place / kWays] >> place % kWays & 1; }
  size_t count() const { return count_; }
  size_t size() const { return used_.size() * kWays; }
  size_t nbytes() const { return used_.capacity() + disk_.capacity(); }

 private:
  std::vector<uint8_t> used_, disk_;
  size_t count_ = 0;
};

}  // namespace memserve::store
