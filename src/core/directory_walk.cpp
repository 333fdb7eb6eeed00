#include "directory_walk.h"

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
  held_.resize(words);
  dram_.resize(words);
  blocks_.resize(words * 64);
  planes_used_ = 0;
  depth_ = 0;
}

bool PrefixWalk::step(const DirectoryEntry* block) {
  const HolderBits bits = block ? bits_of(*block) : HolderBits{};
  if (depth_ == 0) {
    std::ranges::copy(bits.held, found_.begin());
    active_ = found_;
    any_ = block != nullptr;
  } else {
    keep(bits.held);
  }
  if (!any_) return false;
  count_dram(bits.dram);
  ++depth_;
  return true;
}

HolderBits PrefixWalk::bits_of(const DirectoryEntry& block) {
  if (block.has_bits()) return block.bits();
  std::ranges::fill(held_, 0);
  std::ranges::fill(dram_, 0);
  bool in_dram = false;
  for (const HolderRecord& record : block.records()) {
    const uint64_t bit = uint64_t{1} << record.holder % 64;
    held_[record.holder / 64] |= bit;
    if (!record.only_dram()) continue;
    dram_[record.holder / 64] |= bit;
    in_dram = true;
  }
  return {held_, in_dram ? std::span<const uint64_t>(dram_) : std::span<const uint64_t>()};
}

// Those who lack this block drop out here.
void PrefixWalk::keep(std::span<const uint64_t> held) {
  any_ = false;
  for (size_t w = 0; w < active_.size(); ++w) {
    const uint64_t have = w < held.size() ? held[w] : 0;
    each_bit(active_[w] & ~have, w, [this](uint32_t holder) { blocks_[holder] = depth_; });
    active_[w] &= have;
    any_ = any_ || active_[w] != 0;
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
