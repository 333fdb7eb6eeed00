#include "directory/entry.h"

#include <algorithm>

#include "errors.h"

namespace memserve {

void HolderRecord::add(int tier, int change) {
  const uint64_t most = tier == kHbm ? kHbmMask : (uint64_t{1} << (47 - kHbmBits)) - 1;
  const uint64_t now = count(tier);
  memserve::check(change > 0 ? now < most : now > 0, "a block's reference count runs over");
  const uint64_t step = tier == kHbm ? 1 : uint64_t{1} << kHbmBits;
  value = change > 0 ? value + step : value - step;
}

DirectoryEntry::~DirectoryEntry() {
  if (size > kInline) delete crowd_;
}

HolderRecord* DirectoryEntry::first() { return size > kInline ? crowd_->records.data() : few_; }

std::span<const HolderRecord> DirectoryEntry::records() const {
  return {const_cast<DirectoryEntry*>(this)->first(), size};
}

const HolderRecord* DirectoryEntry::find(uint32_t holder) const {
  const auto all = records();
  const size_t at = position(holder);
  return at < size && all[at].holder == holder ? &all[at] : nullptr;
}

void DirectoryEntry::add(uint32_t holder) {
  HolderRecord fresh;
  fresh.holder = holder;
  const size_t at = position(holder);
  if (size < kInline) {
    std::copy_backward(few_ + at, few_ + size, few_ + size + 1);
    few_[at] = fresh;
  } else {
    if (size == kInline) {
      auto crowd = std::make_unique<Crowd>();
      crowd->records.assign(few_, few_ + kInline);
      crowd_ = crowd.release();
    }
    crowd_->records.insert(crowd_->records.begin() + static_cast<ptrdiff_t>(at), fresh);
  }
  ++size;
  if (size == kBitsFrom) {
    for (const HolderRecord& record : crowd_->records) crowd_->mark(record.holder, true, record.only_dram());
  } else if (has_bits()) {
    crowd_->mark(holder, true, fresh.only_dram());
  }
}

void DirectoryEntry::set(HolderRecord record) {
  first()[position(record.holder)] = record;
  if (has_bits()) crowd_->mark(record.holder, true, record.only_dram());
}

void DirectoryEntry::remove(uint32_t holder) {
  const size_t at = position(holder);
  HolderRecord* const all = first();
  std::copy(all + at + 1, all + size, all + at);
  const bool had_bits = has_bits();
  --size;
  if (has_bits()) {
    crowd_->mark(holder, false, false);
  } else if (had_bits) {
    crowd_->held = crowd_->dram = {};
    crowd_->dram_holders = 0;
  }
  if (size >= kInline) crowd_->records.pop_back();
  if (size == kInline) {
    const std::unique_ptr<Crowd> crowd(crowd_);
    std::ranges::copy(crowd->records, few_);
  }
}

size_t DirectoryEntry::position(uint32_t holder) const {
  const auto all = records();
  const auto at = std::ranges::lower_bound(all, holder, {}, [](const HolderRecord& record) { return record.holder; });
  return static_cast<size_t>(at - all.begin());
}

HolderBits DirectoryEntry::bits() const {
  if (crowd_->dram_holders == 0) return {crowd_->held, {}};
  return {crowd_->held, crowd_->dram};
}

void DirectoryEntry::Crowd::mark(uint32_t holder, bool is_held, bool is_dram) {
  const size_t word = holder / 64;
  const uint64_t bit = uint64_t{1} << holder % 64;
  if (word >= held.size()) {
    held.resize(word + 1);
    dram.resize(word + 1);
  }
  held[word] = is_held ? held[word] | bit : held[word] & ~bit;
  dram_holders += is_dram;
  dram_holders -= (dram[word] & bit) != 0;
  dram[word] = is_dram ? dram[word] | bit : dram[word] & ~bit;
}

size_t DirectoryEntry::heap_bytes() const {
  if (size <= kInline) return 0;
  return sizeof(Crowd) + crowd_->records.capacity() * sizeof(HolderRecord) +
         (crowd_->held.capacity() + crowd_->dram.capacity()) * sizeof(uint64_t);
}

void DirectoryEntry::check() const {
  const auto all = records();
  for (size_t i = 0; i < size; ++i) {
    memserve::check(i == 0 || all[i - 1].holder < all[i].holder, "directory: holders of a block are out of order");
    memserve::check(all[i].value > 0, "directory: a holder without a reference or a promise");
  }
  if (size <= kInline) return;
  memserve::check(crowd_->records.size() == size, "directory: a crowd's size differs from its entry's");
  Crowd expected;
  for (const HolderRecord& record : all) {
    if (has_bits()) expected.mark(record.holder, true, record.only_dram());
  }
  expected.held.resize(std::max(expected.held.size(), crowd_->held.size()));  // words of holders that left
  expected.dram.resize(expected.held.size());
  memserve::check(crowd_->held == expected.held && crowd_->dram == expected.dram &&
                      crowd_->dram_holders == expected.dram_holders,
                  "directory: a crowd's bits differ from its records");
}

}  // namespace memserve
