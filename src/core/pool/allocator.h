// Blocks and pages of one arena: which are free, and the reference counts of the others.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "pool/bitmap.h"

namespace memserve {

// Accounting over `num_blocks` blocks of `pages_per_block` pages; page p belongs to block p / pages_per_block.
//
// A block is in exactly one state:
//   free    no reference, no page allocated
//   held    `refs > 0`: allocated as an aligned block
//   broken  some of its pages are allocated as loose pages; free again when the last of them is released
//
// A held block may be marked *idle* by the prefix index: the index can give it up now. `idle_sole()` counts idle
// blocks with no reference but the index's own, that is, the blocks that eviction can turn into free ones.
class BlockAllocator {
 public:
  BlockAllocator(int32_t num_blocks, int32_t pages_per_block);

  int32_t num_blocks() const { return num_blocks_; }
  int32_t pages_per_block() const { return pages_per_block_; }
  int32_t blocks_free() const { return blocks_free_; }
  int32_t blocks_broken() const { return blocks_broken_; }
  int32_t blocks_held() const { return num_blocks_ - blocks_free_ - blocks_broken_; }
  int64_t pages_loose() const { return pages_loose_; }
  // Pages that `allocate_pages` can give: those of free blocks and the unused ones of broken blocks.
  int64_t pages_free() const {
    return int64_t{blocks_free_ + blocks_broken_} * pages_per_block_ - pages_loose_;
  }
  // Free pages in broken blocks, which no request for a whole block can use.
  int64_t pages_stranded() const { return int64_t{blocks_broken_} * pages_per_block_ - pages_loose_; }
  int32_t idle_sole() const { return idle_sole_; }
  bool is_idle(int32_t block) const { return refs_[block] & kIdle; }

  // Allocates `count` blocks with one reference each, lowest ids first. False: no room, nothing changed.
  bool allocate(size_t count, int32_t* out);
  // Adds one reference to each. A bad or free block: InvariantViolation, nothing changed.
  void retain(std::span<const int32_t> blocks);
  // Drops one reference on each; returns how many became free. A bad or free block: InvariantViolation, nothing
  // changed.
  size_t release(std::span<const int32_t> blocks);
  uint32_t ref_count(int32_t block) const;

  bool allocate_pages(size_t count, int32_t* out);
  size_t release_pages(std::span<const int32_t> pages);

  // For the index: the blocks are held, and one of the references is the index's.
  void mark_idle(std::span<const int32_t> blocks);
  void unmark_idle(std::span<const int32_t> blocks);

  // Throws an InvariantViolation that names the block unless it exists and is held.
  void require_held(int32_t block, const char* verb) const {
    if (static_cast<uint32_t>(block) < static_cast<uint32_t>(num_blocks_) && (refs_[block] & ~kIdle)) return;
    fail_not_held(block, verb);
  }

  void check_invariants() const;

 private:
  static constexpr uint32_t kIdle = 0x8000'0000u;  // top bit of a block's word in `refs_`

  [[noreturn]] void fail_not_held(int32_t block, const char* verb) const;
  void add_ref(int32_t block);
  void drop_ref(int32_t block);
  uint64_t* page_bits(int32_t block) { return &page_used_[static_cast<size_t>(block) * words_per_block_]; }
  const uint64_t* page_bits(int32_t block) const {
    return &page_used_[static_cast<size_t>(block) * words_per_block_];
  }
  int32_t take_page_of(int32_t block);
  void require_page_out(int32_t page) const;

  int32_t num_blocks_;
  int32_t pages_per_block_;
  size_t words_per_block_;
  int32_t blocks_free_;
  int32_t blocks_broken_ = 0;
  int64_t pages_loose_ = 0;
  int32_t idle_sole_ = 0;
  Bitmap free_;
  Bitmap open_;                       // broken blocks that still have an unused page
  std::vector<uint32_t> refs_;        // kIdle | reference count
  std::vector<int32_t> loose_;        // allocated pages per block; empty until the first loose page
  std::vector<uint64_t> page_used_;   // `words_per_block_` words per block; empty until the first loose page
};

// How many times the user of a pool holds each block. The allocator cannot tell: its counts include the references of
// the index, so a block that is freed twice but still cached would pass.
class HoldCounts {
 public:
  explicit HoldCounts(int32_t num_blocks) : counts_(num_blocks, 0) {}

  int32_t num_blocks() const { return static_cast<int32_t>(counts_.size()); }
  // Adds one hold for each time that a block is named. A block outside the pool: InvariantViolation, nothing changed.
  void take(std::span<const int32_t> blocks);
  // Drops one hold for each time that a block is named. Returns how many were dropped: all; or nothing changed, and
  // blocks[result] is the first that does not exist or is not held so many times.
  size_t give(std::span<const int32_t> blocks);

 private:
  std::vector<uint32_t> counts_;
};

}  // namespace memserve
