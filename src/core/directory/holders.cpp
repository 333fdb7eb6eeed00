// The effects of an instance's events on the directory.
#include <algorithm>

#include "directory/directory.h"

namespace memserve {

PrefixDirectory::Holder& PrefixDirectory::holder_at(uint32_t holder) {
  if (holder >= holders_.size()) holders_.resize(holder + 1);
  return holders_[holder];
}

// The holder's record of this block; an empty one if it has none.
HolderRecord PrefixDirectory::record_of(uint32_t id, uint32_t holder) {
  if (const HolderRecord* record = entry(id).find(holder)) return *record;
  HolderRecord fresh;
  fresh.holder = holder;
  return fresh;
}

void PrefixDirectory::put(uint32_t id, HolderRecord record) {
  DirectoryEntry& block = entry(id);
  if (!block.find(record.holder)) {
    heap_bytes_ -= block.heap_bytes();
    block.add(record.holder);
    heap_bytes_ += block.heap_bytes();
    holder_at(record.holder).entries.insert(id);
  }
  block.set(record);
}

void PrefixDirectory::drop(uint32_t id, uint32_t holder) {
  HolderRecord record = record_of(id, holder);
  if (record.speculative) make_real(record);
  DirectoryEntry& block = entry(id);
  heap_bytes_ -= block.heap_bytes();
  block.remove(holder);
  heap_bytes_ += block.heap_bytes();
  holders_[holder].entries.erase(id);
  if (block.size == 0) free_entry(id);
}

// Detaches a speculative record from its promise; it has no references yet.
void PrefixDirectory::make_real(HolderRecord& record) {
  close_one(record.value);
  --holders_[record.holder].speculative;
  record.speculative = 0;
  record.value = 0;
}

void PrefixDirectory::close_one(uint64_t promise) {
  const auto at = promises_.find(promise);
  if (--at->second.open > 0) return;
  due_.erase({at->second.expires_ns, promise});
  promises_.erase(at);
}

void PrefixDirectory::store(uint32_t holder, int tier, const Identities& blocks) {
  for (size_t i = 0; i < blocks.count; ++i) {
    prefetch(blocks, i);
    const uint32_t id = find_or_add(blocks[i]);
    HolderRecord record = record_of(id, holder);
    if (record.speculative) make_real(record);
    record.add(tier, +1);
    put(id, record);
  }
}

size_t PrefixDirectory::move(uint32_t holder, int tier, const Identities& blocks) {
  const int from = tier == kHbm ? kDram : kHbm;
  size_t unknown = 0;
  for (size_t i = 0; i < blocks.count; ++i) {
    prefetch(blocks, i);
    const uint32_t id = find_or_add(blocks[i]);
    HolderRecord record = record_of(id, holder);
    if (record.speculative) make_real(record);
    if (record.count(from) > 0) {
      record.add(from, -1);
      record.add(tier, +1);
    } else {
      ++unknown;
      if (record.count(tier) == 0) record.add(tier, +1);
    }
    put(id, record);
  }
  return unknown;
}

size_t PrefixDirectory::evict(uint32_t holder, const Identities& blocks, std::optional<int> tier) {
  size_t unknown = 0;
  for (size_t i = 0; i < blocks.count; ++i) {
    prefetch(blocks, i);
    const uint32_t id = lookup(blocks[i]);
    const HolderRecord* const found = id ? entry(id).find(holder) : nullptr;
    if (!found || found->speculative) {
      ++unknown;
      continue;
    }
    HolderRecord record = *found;
    const int from = tier ? *tier : record.count(kDram) > 0 ? kDram : kHbm;
    if (record.count(from) == 0) {
      ++unknown;
      continue;
    }
    record.add(from, -1);
    record.value == 0 ? drop(id, holder) : put(id, record);
  }
  return unknown;
}

void PrefixDirectory::clear(uint32_t holder) {
  constexpr size_t kAhead = 16;
  if (holder >= holders_.size()) return;
  const std::vector<uint32_t> ids = holders_[holder].entries.take();
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) __builtin_prefetch(&entry(ids[i + kAhead]));
    drop(ids[i], holder);
  }
}

void PrefixDirectory::speculate(uint32_t holder, const Identities& blocks, int64_t expires_ns) {
  const uint64_t number = ++promises_made_;
  Promise& promise = promises_.try_emplace(number, Promise{expires_ns, holder, 0, {}}).first->second;
  for (size_t i = 0; i < blocks.count; ++i) {
    prefetch(blocks, i);
    const uint32_t id = find_or_add(blocks[i]);
    HolderRecord record = record_of(id, holder);
    if (record.speculative) {
      if (promises_.at(record.value).expires_ns >= expires_ns) continue;
      make_real(record);
    } else if (record.value > 0) {
      continue;
    }
    record.speculative = 1;
    record.value = number;
    put(id, record);
    ++holders_[holder].speculative;
    ++promise.open;
    promise.entries.push_back(id);
  }
  if (promise.open > 0) {
    due_.emplace(expires_ns, number);
  } else {
    promises_.erase(number);
  }
}

size_t PrefixDirectory::expire(int64_t now_ns) {
  size_t dropped = 0;
  while (!due_.empty() && due_.begin()->first <= now_ns) {
    const uint64_t number = due_.begin()->second;
    Promise& promise = promises_.at(number);
    const uint32_t holder = promise.holder;
    for (const uint32_t id : std::exchange(promise.entries, {})) {  // dropping the last one also removes the promise
      const HolderRecord* const record = entry(id).find(holder);
      if (!record || !record->speculative || record->value != number) continue;
      drop(id, holder);
      ++dropped;
    }
  }
  return dropped;
}

std::optional<int64_t> PrefixDirectory::next_expiry_ns() const {
  if (due_.empty()) return std::nullopt;
  return due_.begin()->first;
}

std::vector<uint32_t> PrefixDirectory::holders() const {
  std::vector<uint32_t> ids;
  for (uint32_t holder = 0; holder < holders_.size(); ++holder) {
    if (holders_[holder].entries.size() > 0) ids.push_back(holder);
  }
  return ids;
}

size_t PrefixDirectory::blocks(uint32_t holder) const {
  return holder < holders_.size() ? holders_[holder].entries.size() - holders_[holder].speculative : 0;
}

size_t PrefixDirectory::speculative_blocks(uint32_t holder) const {
  return holder < holders_.size() ? holders_[holder].speculative : 0;
}

std::vector<DumpedBlock> PrefixDirectory::dump(uint32_t holder) const {
  std::vector<DumpedBlock> all;
  if (holder >= holders_.size()) return all;
  for (const uint32_t id : holders_[holder].entries.members()) {
    const HolderRecord* const record = entry(id).find(holder);
    DumpedBlock& block = all.emplace_back();
    store_identity(block.identity.data(), entry(id).identity);
    if (!record->speculative) block.hbm = record->count(kHbm), block.dram = record->count(kDram);
  }
  std::ranges::sort(all, {}, &DumpedBlock::identity);
  return all;
}

}  // namespace memserve
