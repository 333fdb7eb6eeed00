// Follows all holders of a prompt's blocks at once: a bitset of those that have every block so far.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "directory/entry.h"

namespace memserve {

// `blocks` from the prompt's start without a gap, `dram_blocks` of them only in DRAM.
struct PrefixHeld {
  int32_t holder, blocks, dram_blocks;
};

// Reused from walk to walk, so that a walk allocates nothing.
class PrefixWalk {
 public:
  // `words`: 64-bit words of a bitset of all holders.
  void start(size_t words);
  // Takes the next block; null: no instance has it. Returns whether any holder has all blocks so far.
  bool step(const DirectoryEntry* block);
  // Every holder of the first block, by id.
  std::span<const PrefixHeld> finish();

 private:
  bool keep(std::span<const uint64_t> held, std::span<const uint64_t> dram);
  void drop_others(std::span<const uint64_t> held);
  void count_dram(std::span<const uint64_t> dram);
  int32_t dram_blocks(uint32_t holder) const;

  // Counts how often each holder's bit was set: bit h of planes[p] is bit p of holder h's count. Adding a bitset to all
  // 64 counters of a word takes about two operations.
  using Planes = std::array<uint64_t, 31>;

  int32_t depth_ = 0;
  size_t planes_used_ = 0;
  std::vector<uint64_t> found_, active_;
  std::vector<uint64_t> held_, dram_;  // room for the bits of a block that only has a list
  std::vector<Planes> dram_counts_;    // by word
  std::vector<int32_t> blocks_;        // by holder, once it has dropped out
  std::vector<PrefixHeld> result_;
};

}  // namespace memserve
