#include "pool/allocator.h"

#include "errors.h"

namespace memserve {

BlockAllocator::BlockAllocator(int32_t num_blocks, int32_t pages_per_block)
    : num_blocks_(num_blocks),
      pages_per_block_(pages_per_block),
      words_per_block_((static_cast<size_t>(pages_per_block) + 63) / 64),
      blocks_free_(num_blocks),
      free_(num_blocks, true),
      open_(num_blocks, false),
      refs_(num_blocks, 0) {}

bool BlockAllocator::allocate(size_t count, int32_t* out) {
  if (count > static_cast<size_t>(blocks_free_)) return false;
  free_.take_lowest(count, out);
  for (size_t i = 0; i < count; ++i) refs_[out[i]] = 1;
  blocks_free_ -= static_cast<int32_t>(count);
  return true;
}

void BlockAllocator::fail_not_held(int32_t block, const char* verb) const {
  const std::string name = std::string("cannot ") + verb + " block " + std::to_string(block) + ": ";
  if (block < 0 || block >= num_blocks_) {
    throw InvariantViolation(name + "the arena has blocks 0 to " + std::to_string(num_blocks_ - 1));
  }
  throw InvariantViolation(name + "it is not held (double free, or never allocated)");
}

// Idle blocks are counted while the index holds the only reference.
void BlockAllocator::add_ref(int32_t block) {
  if (refs_[block]++ == (kIdle | 1)) --idle_sole_;
}

void BlockAllocator::drop_ref(int32_t block) {
  if (--refs_[block] == (kIdle | 1)) ++idle_sole_;
}

void BlockAllocator::retain(std::span<const int32_t> blocks) {
  for (const int32_t block : blocks) require_held(block, "retain");
  for (const int32_t block : blocks) add_ref(block);
}

size_t BlockAllocator::release(std::span<const int32_t> blocks) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int32_t block = blocks[i];
    if (static_cast<uint32_t>(block) >= static_cast<uint32_t>(num_blocks_) || (refs_[block] & ~kIdle) == 0) {
      for (size_t k = 0; k < i; ++k) add_ref(blocks[k]);
      fail_not_held(block, "release");
    }
    drop_ref(block);
  }
  size_t freed = 0;
  for (const int32_t block : blocks) {
    if (refs_[block] == 0 && !free_.contains(block)) {
      free_.insert(block);
      ++freed;
    }
  }
  blocks_free_ += static_cast<int32_t>(freed);
  return freed;
}

uint32_t BlockAllocator::ref_count(int32_t block) const {
  if (block < 0 || block >= num_blocks_) fail_not_held(block, "look at");
  return refs_[block] & ~kIdle;
}

bool BlockAllocator::allocate_pages(size_t count, int32_t* out) {
  if (static_cast<int64_t>(count) > pages_free()) return false;
  if (page_used_.empty() && count > 0) {
    page_used_.assign(static_cast<size_t>(num_blocks_) * words_per_block_, 0);
    loose_.assign(num_blocks_, 0);
  }
  int64_t open_pages = pages_stranded();
  for (size_t i = 0; i < count; ++i) {
    if (open_pages == 0) {  // no broken block has an unused page: break a free one
      int32_t block;
      free_.take_lowest(1, &block);
      --blocks_free_;
      ++blocks_broken_;
      open_.insert(block);
      open_pages = pages_per_block_;
    }
    out[i] = take_page_of(static_cast<int32_t>(open_.lowest()));
    --open_pages;
  }
  return true;
}

int32_t BlockAllocator::take_page_of(int32_t block) {
  uint64_t* bits = page_bits(block);
  size_t word = 0;
  while (~bits[word] == 0) ++word;
  const int bit = std::countr_one(bits[word]);
  bits[word] |= uint64_t{1} << bit;
  ++pages_loose_;
  if (++loose_[block] == pages_per_block_) open_.erase(block);
  return block * pages_per_block_ + static_cast<int32_t>(word) * 64 + bit;
}

void BlockAllocator::require_page_out(int32_t page) const {
  const int64_t pages = int64_t{num_blocks_} * pages_per_block_;
  const bool exists = page >= 0 && page < pages;
  const int32_t block = exists ? page / pages_per_block_ : 0;
  const int32_t offset = exists ? page % pages_per_block_ : 0;
  if (exists && !page_used_.empty() && (page_bits(block)[offset / 64] >> (offset % 64) & 1)) return;
  const std::string name = "cannot release page " + std::to_string(page);
  if (!exists) throw InvariantViolation(name + ": the arena has pages 0 to " + std::to_string(pages - 1));
  throw InvariantViolation(name + " of block " + std::to_string(block) + ": it is not out as a loose page");
}

size_t BlockAllocator::release_pages(std::span<const int32_t> pages) {
  for (size_t i = 0; i < pages.size(); ++i) {
    try {
      require_page_out(pages[i]);
    } catch (const InvariantViolation&) {
      for (size_t k = 0; k < i; ++k) {  // put back what this call cleared
        const int32_t offset = pages[k] % pages_per_block_;
        page_bits(pages[k] / pages_per_block_)[offset / 64] |= uint64_t{1} << (offset % 64);
      }
      throw;
    }
    const int32_t offset = pages[i] % pages_per_block_;
    page_bits(pages[i] / pages_per_block_)[offset / 64] &= ~(uint64_t{1} << (offset % 64));
  }
  size_t whole = 0;
  for (const int32_t page : pages) {
    const int32_t block = page / pages_per_block_;
    --pages_loose_;
    if (--loose_[block] > 0) {
      open_.insert(block);
      continue;
    }
    open_.erase(block);
    free_.insert(block);
    --blocks_broken_;
    ++blocks_free_;
    ++whole;
  }
  return whole;
}

void BlockAllocator::mark_idle(std::span<const int32_t> blocks) {
  for (const int32_t block : blocks) {
    if ((refs_[block] |= kIdle) == (kIdle | 1)) ++idle_sole_;
  }
}

void BlockAllocator::unmark_idle(std::span<const int32_t> blocks) {
  for (const int32_t block : blocks) {
    if (refs_[block] == (kIdle | 1)) --idle_sole_;
    refs_[block] &= ~kIdle;
  }
}

void BlockAllocator::check_invariants() const {
  int32_t free = 0, broken = 0, idle_sole = 0;
  int64_t loose = 0;
  for (int32_t block = 0; block < num_blocks_; ++block) {
    const int32_t out = loose_.empty() ? 0 : loose_[block];
    int32_t bits = 0;
    for (size_t w = 0; w < words_per_block_ && !page_used_.empty(); ++w) bits += std::popcount(page_bits(block)[w]);
    check(bits == out, "the page bits of a block do not add up to its loose pages");
    const bool held = (refs_[block] & ~kIdle) > 0;
    check(held + (out > 0) + free_.contains(block) == 1, "a block is not in exactly one of free, held, broken");
    check(open_.contains(block) == (out > 0 && out < pages_per_block_), "a broken block is filed wrongly");
    check(held || !(refs_[block] & kIdle), "a block is idle but not held");
    free += free_.contains(block);
    broken += out > 0;
    idle_sole += refs_[block] == (kIdle | 1);
    loose += out;
  }
  check(free == blocks_free_, "blocks_free does not match the bitmap");
  check(broken == blocks_broken_, "blocks_broken does not match the blocks");
  check(loose == pages_loose_, "pages_loose does not match the blocks");
  check(idle_sole == idle_sole_, "idle_sole does not match the blocks");
}

void HoldCounts::take(std::span<const int32_t> blocks) {
  for (const int32_t block : blocks) {
    if (static_cast<size_t>(static_cast<uint32_t>(block)) >= counts_.size()) {
      throw InvariantViolation("cannot hold block " + std::to_string(block) + ": there are " +
                               std::to_string(counts_.size()));
    }
  }
  for (const int32_t block : blocks) ++counts_[block];
}

size_t HoldCounts::give(std::span<const int32_t> blocks) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const size_t block = static_cast<uint32_t>(blocks[i]);
    if (block >= counts_.size() || counts_[block] == 0) {
      for (size_t k = 0; k < i; ++k) ++counts_[blocks[k]];
      return i;
    }
    --counts_[block];
  }
  return blocks.size();
}

}  // namespace memserve
