#include "store/record_index.h"

#include "errors.h"

namespace memserve::store {

namespace {

constexpr size_t kFirstSlots = 8;

bool equal(Hash128 a, Hash128 b) { return a.low == b.low && a.high == b.high; }

}  // namespace

Entry* RecordIndex::find(Hash128 key) {
  Part& part = parts_[key.high >> 56];
  if (part.slots.empty()) return nullptr;
  for (size_t i = place(key, part);; i = (i + 1) & (part.slots.size() - 1)) {
    if (!part.slots[i].used) return nullptr;
    if (equal(part.slots[i].key, key)) return &part.slots[i];
  }
}

void RecordIndex::insert(const Entry& entry) {
  Part& part = parts_[entry.key.high >> 56];
  if ((part.size + 1) * 4 > part.slots.size() * 3) grow(part);
  size_t i = place(entry.key, part);
  while (part.slots[i].used && !equal(part.slots[i].key, entry.key)) i = (i + 1) & (part.slots.size() - 1);
  const bool isnew = !part.slots[i].used;
  part.slots[i] = entry;
  part.slots[i].used = 1;
  part.size += isnew;
  size_ += isnew;
}

bool RecordIndex::erase(Hash128 key) {
  Entry* const found = find(key);
  if (!found) return false;
  Part& part = parts_[key.high >> 56];
  const size_t mask = part.slots.size() - 1;
  size_t hole = static_cast<size_t>(found - part.slots.data());
  // Records that probed past the hole move into it, so that no probe ends too early.
  for (size_t i = (hole + 1) & mask; part.slots[i].used; i = (i + 1) & mask) {
    const size_t home = place(part.slots[i].key, part);
    if (((i - home) & mask) >= ((i - hole) & mask)) {
      part.slots[hole] = part.slots[i];
      hole = i;
    }
  }
  part.slots[hole] = Entry{};
  --part.size;
  --size_;
  return true;
}

void RecordIndex::clear() {
  for (Part& part : parts_) part = Part{};
  size_ = 0;
}

size_t RecordIndex::nbytes() const {
  size_t bytes = sizeof *this;
  for (const Part& part : parts_) bytes += part.slots.capacity() * sizeof(Entry);
  return bytes;
}

void RecordIndex::grow(Part& part) {
  std::vector<Entry> old(part.slots.empty() ? kFirstSlots : part.slots.size() * 2);
  old.swap(part.slots);
  for (const Entry& entry : old) {
    if (!entry.used) continue;
    size_t i = place(entry.key, part);
    while (part.slots[i].used) i = (i + 1) & (part.slots.size() - 1);
    part.slots[i] = entry;
  }
}

void RecordIndex::check_invariants() const {
  size_t all = 0;
  for (const Part& part : parts_) {
    size_t used = 0;
    for (const Entry& entry : part.slots) {
      if (!entry.used) continue;
      ++used;
      check(find(entry.key) == &entry, "a record of the index is not found by its key");
    }
    check(used == part.size, "a part of the record index counts wrongly");
    all += used;
  }
  check(all == size_, "the record index counts wrongly");
}

}  // namespace memserve::store
