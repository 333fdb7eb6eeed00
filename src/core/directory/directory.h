// The global directory: which instance holds which block, on which tier. Blocks are named by identity (identity.h).
//
//   identity --hash--> bucket --> entry: | identity | holder, references in HBM and DRAM | holder, ... |
//   holder -----------------------> the entries that it is in (for `clear` and `dump`)
//   promise (one `speculate` call) -> its entries and when it expires
//
// An identity names its whole prefix, so no tree is needed: a prompt's blocks are looked up one by one, and a holder
// counts up to the first block that it lacks. Buckets grow one at a time and entries never move.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "directory/entry.h"
#include "directory/walk.h"
#include "directory/id_set.h"
#include "identity/identity.h"
#include "radix/slab.h"

namespace memserve {

// A run of identities as Python passes them: 16 bytes each.
struct Identities {
  const uint8_t* bytes;
  size_t count;
  Hash128 operator[](size_t i) const { return load_identity(bytes + i * kIdentityBytes); }
};

// A prompt whose identities are computed during the walk, as far as any instance holds its blocks.
struct Prompt {
  const uint8_t* key;  // 16 bytes
  Hash128 name;        // the namespace
  std::span<const int32_t> tokens;
  size_t block_tokens;
};

struct DumpedBlock {
  std::array<uint8_t, kIdentityBytes> identity{};
  uint32_t hbm = 0, dram = 0;  // references; none on either: speculative
};

class PrefixDirectory {
 public:
  PrefixDirectory();
  PrefixDirectory(const PrefixDirectory&) = delete;
  PrefixDirectory& operator=(const PrefixDirectory&) = delete;

  // Adds one reference on each block. Speculative records become real.
  void store(uint32_t holder, int tier, const Identities& blocks);
  // Moves one reference on each block to `tier` from the other tier. A holder without a reference there gets one, as if
  // it stored the block, unless it has one on `tier` already. Returns the number of blocks without a reference to move.
  size_t move(uint32_t holder, int tier, const Identities& blocks);
  // Drops one reference on each, on `tier` or on either (DRAM before HBM). Returns how many blocks had none.
  size_t evict(uint32_t holder, const Identities& blocks, std::optional<int> tier);
  // Removes all records of the holder, promises included. The time is linear in its blocks.
  void clear(uint32_t holder);

  // The holder will have these blocks soon; until `expires_ns` they count as if they lay in its HBM. Real records stay
  // as they are; of two promises the later one counts.
  void speculate(uint32_t holder, const Identities& blocks, int64_t expires_ns);
  // Drops promises with expires_ns <= now_ns that were not kept; returns the number of their blocks.
  size_t expire(int64_t now_ns);
  std::optional<int64_t> next_expiry_ns() const;

  // Every holder of the first block, by id, with the length of its prefix. Valid until the next call.
  std::span<const PrefixHeld> match(const Identities& blocks);
  std::span<const PrefixHeld> match(const Prompt& prompt);

  // Where each block lies: a row of `holders` for each block, 0: not there; 1: on the upper tier, HBM; 2: on the lower
  // tier alone. What is only promised counts as not there.
  std::vector<uint8_t> locate(const Identities& blocks, std::span<const uint32_t> holders) const;

  std::vector<uint32_t> holders() const;
  size_t blocks(uint32_t holder) const;              // real ones
  size_t speculative_blocks(uint32_t holder) const;
  std::vector<DumpedBlock> dump(uint32_t holder) const;  // by identity
  size_t entries() const { return entries_in_use_; }
  size_t nbytes() const;
  void check_invariants() const;

 private:
  struct Holder {
    IdSet entries;
    size_t speculative = 0;
  };
  struct Promise {
    int64_t expires_ns;
    uint32_t holder;
    size_t open = 0;  // records that depend on it; a promise without any is dropped
    std::vector<uint32_t> entries;
  };
  using Promises = std::map<uint64_t, Promise>;

  // directory.cpp: the table of entries
  size_t bucket_of(Hash128 identity) const;
  void add_bucket();
  uint32_t lookup(Hash128 identity) const;  // 0 = none
  uint32_t find_or_add(Hash128 identity);
  void free_entry(uint32_t id);
  void prefetch(const Identities& blocks, size_t i) const;
  DirectoryEntry& entry(uint32_t id) { return entries_[id - 1]; }
  const DirectoryEntry& entry(uint32_t id) const { return entries_[id - 1]; }

  // holders.cpp: records, always together with their holder's set
  Holder& holder_at(uint32_t holder);
  HolderRecord record_of(uint32_t id, uint32_t holder);
  void put(uint32_t id, HolderRecord record);
  void drop(uint32_t id, uint32_t holder);
  void make_real(HolderRecord& record);
  void close_one(uint64_t promise);

  // match.cpp
  template <class Next>
  std::span<const PrefixHeld> walk(size_t blocks, Next next);

  void check_entries(std::vector<size_t>& held) const;
  void check_promises() const;

  Slab<DirectoryEntry> entries_;  // entries_[id - 1]; never moves
  Slab<uint32_t> buckets_;        // id of the first entry; 0 = none
  uint32_t free_ = 0;             // id of the first free entry
  size_t entries_in_use_ = 0;
  size_t heap_bytes_ = 0;  // of entries
  std::vector<Holder> holders_;
  Promises promises_;
  std::set<std::pair<int64_t, uint64_t>> due_;  // (expires_ns, promise)
  uint64_t promises_made_ = 0;
  PrefixWalk walk_;
};

}  // namespace memserve
