// One block of the directory and its holders: 64 bytes for up to five holders, a heap array for more, bitsets for many.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "radix/index.h"
#include "identity/siphash.h"

namespace memserve {

constexpr uint32_t kHoldersMax = uint32_t{1} << 16;

// One holder's record of one block. Either real, with a reference count per tier (streams such as vLLM's store a
// block once for each copy), or speculative, with the number of its promise (`PrefixDirectory::speculate`).
struct HolderRecord {
  uint64_t value : 47 = 0;
  uint64_t speculative : 1 = 0;
  uint64_t holder : 16 = 0;

  uint32_t count(int tier) const { return tier == kHbm ? value & kHbmMask : value >> kHbmBits; }
  bool only_dram() const { return !speculative && count(kHbm) == 0; }
  // Adds `change`, +1 or -1. Throws InvariantViolation past millions of references.
  void add(int tier, int change);

 private:
  static constexpr int kHbmBits = 23;
  static constexpr uint64_t kHbmMask = (uint64_t{1} << kHbmBits) - 1;
};
static_assert(sizeof(HolderRecord) == 8);

// The holders of a block, for matching: bit h of `held`; bit h of `dram`: only in DRAM (empty: no holder).
struct HolderBits {
  std::span<const uint64_t> held, dram;
};

// Records are sorted by holder.
struct alignas(64) DirectoryEntry {
  Hash128 identity{};
  uint32_t next = 0;  // id of the next entry of the bucket, or of the next free one; 0 = none
  uint32_t size = 0;  // holders; 0 = the entry is not in use

  DirectoryEntry() = default;
  ~DirectoryEntry();
  DirectoryEntry(const DirectoryEntry&) = delete;
  DirectoryEntry& operator=(const DirectoryEntry&) = delete;

  std::span<const HolderRecord> records() const;
  const HolderRecord* find(uint32_t holder) const;

  // Adds an empty record. The holder must have none.
  void add(uint32_t holder);
  // Replaces the record of its holder, which must have one.
  void set(HolderRecord record);
  void remove(uint32_t holder);

  bool has_bits() const { return size >= kBitsFrom; }
  // Only for an entry with bitsets.
  HolderBits bits() const;
  size_t heap_bytes() const;
  // Throws InvariantViolation when records are out of order or empty, or when the bitsets differ from them.
  void check() const;

 private:
  static constexpr uint32_t kInline = 5;
  static constexpr uint32_t kBitsFrom = 32;  // matching a list this long is slower than a bitset of 1,000 holders
  struct Crowd {
    std::vector<HolderRecord> records;
    std::vector<uint64_t> held, dram;
    size_t dram_holders = 0;
    void mark(uint32_t holder, bool is_held, bool is_dram);
  };

  HolderRecord* first();
  size_t position(uint32_t holder) const;

  union {
    HolderRecord few_[kInline] = {};
    Crowd* crowd_;  // when size > kInline
  };
};
static_assert(sizeof(DirectoryEntry) == 64, "a block is a cache line");

}  // namespace memserve
