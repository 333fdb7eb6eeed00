#include "directory/walk.h"

#include <algorithm>
#include <bit>

namespace memserve {

namespace {

template <class Visit>
void each_bit(uint64_t word, size_t at, Visit visit) {
  for (; word != 0; word &= word - 1) visit(static_cast<uint32_t>(at * 64 + std::countr_zero(word)));
}

}  // namespace

void PrefixWalk::start(size_t words) {
  if (planes_used_ > 0) std::ranges::fill(dram_counts_, Planes{});
  dram_counts_.resize(words);
  found_.assign(words, 0);
  active_.assign(words, 0);
  held_.resize(words);  // all zero between steps
  dram_.resize(words);
  blocks_.resize(words * 64);
  planes_used_ = 0;
  depth_ = 0;
}

bool PrefixWalk::step(const DirectoryEntry* block) {
  if (!block) return keep({}, {});
  if (block->has_bits()) return keep(block->bits().held, block->bits().dram);
  bool in_dram = false;
  for (const HolderRecord& record : block->records()) {
    const uint64_t bit = uint64_t{1} << record.holder % 64;
    held_[record.holder / 64] |= bit;
    if (!record.only_dram()) continue;
    dram_[record.holder / 64] |= bit;
    in_dram = true;
  }
  const bool any = keep(held_, in_dram ? std::span<const uint64_t>(dram_) : std::span<const uint64_t>());
  for (const HolderRecord& record : block->records()) held_[record.holder / 64] = dram_[record.holder / 64] = 0;
  return any;
}

// Drops the holders that lack this block; mostly there are none.
bool PrefixWalk::keep(std::span<const uint64_t> held, std::span<const uint64_t> dram) {
  if (depth_ == 0) {
    std::ranges::copy(held, found_.begin());
    active_ = found_;
  }
  uint64_t any = 0, leaving = 0;
  for (size_t w = 0; w < held.size(); ++w) {
    any |= active_[w] & held[w];
    leaving |= active_[w] & ~held[w];
  }
  for (size_t w = held.size(); w < active_.size(); ++w) leaving |= active_[w];
  if (leaving != 0) drop_others(held);
  if (any == 0) return false;
  count_dram(dram);
  ++depth_;
  return true;
}

void PrefixWalk::drop_others(std::span<const uint64_t> held) {
  for (size_t w = 0; w < active_.size(); ++w) {
    const uint64_t have = w < held.size() ? held[w] : 0;
    each_bit(active_[w] & ~have, w, [this](uint32_t holder) { blocks_[holder] = depth_; });
    active_[w] &= have;
  }
}

void PrefixWalk::count_dram(std::span<const uint64_t> dram) {
  for (size_t w = 0; w < dram.size(); ++w) {
    uint64_t carry = active_[w] & dram[w];
    for (size_t p = 0; carry != 0; ++p) {
      uint64_t& plane = dram_counts_[w][p];
      const uint64_t sum = plane ^ carry;
      carry &= plane;
      plane = sum;
      planes_used_ = std::max(planes_used_, p + 1);
    }
  }
}

int32_t PrefixWalk::dram_blocks(uint32_t holder) const {
  int32_t count = 0;
  for (size_t p = 0; p < planes_used_; ++p) {
    count |= static_cast<int32_t>(dram_counts_[holder / 64][p] >> holder % 64 & 1) << p;
  }
  return count;
}

std::span<const PrefixHeld> PrefixWalk::finish() {
  result_.clear();
  for (size_t w = 0; w < active_.size(); ++w) {
    each_bit(active_[w], w, [this](uint32_t holder) { blocks_[holder] = depth_; });
    each_bit(found_[w], w, [this](uint32_t holder) {
      result_.push_back({static_cast<int32_t>(holder), blocks_[holder], dram_blocks(holder)});
    });
  }
  return result_;
}

}  // namespace memserve
