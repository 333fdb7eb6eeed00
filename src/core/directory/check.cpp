#include "directory/directory.h"
#include "errors.h"

namespace memserve {

void PrefixDirectory::check_invariants() const {
  std::vector<size_t> held(holders_.size());
  check_entries(held);
  check_promises();
  for (size_t h = 0; h < holders_.size(); ++h) {
    check(holders_[h].entries.size() == held[h], "directory: a holder's set differs from its records");
  }
}

// Every entry is free, or is in its bucket and in its holders' sets.
void PrefixDirectory::check_entries(std::vector<size_t>& held) const {
  size_t in_use = 0, heap_bytes = 0, free = 0;
  std::vector<size_t> speculative(holders_.size());
  for (uint32_t id = 1; id <= entries_.size(); ++id) {
    const DirectoryEntry& block = entry(id);
    if (block.size == 0) continue;
    ++in_use;
    heap_bytes += block.heap_bytes();
    block.check();
    check(lookup(block.identity) == id, "directory: an entry is not where its identity belongs");
    for (const HolderRecord& record : block.records()) {
      ++held[record.holder];
      speculative[record.holder] += record.speculative;
      check(holders_[record.holder].entries.contains(id), "directory: a holder does not know its block");
    }
  }
  for (uint32_t id = free_; id != 0; id = entry(id).next) ++free;
  check(in_use == entries_in_use_ && in_use + free == entries_.size(), "directory: entries are lost");
  check(heap_bytes == heap_bytes_, "directory: heap bytes are miscounted");
  for (size_t h = 0; h < holders_.size(); ++h) {
    check(holders_[h].speculative == speculative[h], "directory: speculative blocks are miscounted");
  }
}

// Every promise has as many records as it counts, and expires once.
void PrefixDirectory::check_promises() const {
  size_t open = 0, speculative = 0;
  for (const auto& [number, promise] : promises_) {
    size_t resting = 0;
    for (const uint32_t id : promise.entries) {
      const HolderRecord* const record = entry(id).find(promise.holder);
      resting += record && record->speculative && record->value == number;
    }
    check(resting > 0 && resting == promise.open, "directory: a promise has other records than it says");
    check(due_.contains({promise.expires_ns, number}), "directory: a promise never expires");
    open += promise.open;
  }
  for (const Holder& holder : holders_) speculative += holder.speculative;
  check(open == speculative && due_.size() == promises_.size(), "directory: promises are miscounted");
}

}  // namespace memserve
