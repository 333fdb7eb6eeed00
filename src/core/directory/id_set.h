// A set of 32-bit ids: open addressing, four bytes a slot, no tombstones.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace memserve {

// Linear probing at a load of 3/8 to 3/4. Erasing moves the ids behind the gap up, so that a walk from an id's home
// slot finds it before it meets an empty slot. The id 2^32 - 1 is not allowed.
class IdSet {
 public:
  size_t size() const { return size_; }
  size_t nbytes() const { return slots_.capacity() * sizeof(uint32_t); }

  bool contains(uint32_t id) const { return !slots_.empty() && slots_[find(id)] == id; }

  void insert(uint32_t id) {
    if (4 * (size_ + 1) > 3 * slots_.size()) grow();
    uint32_t& slot = slots_[find(id)];
    size_ += slot == kEmpty;
    slot = id;
  }

  void erase(uint32_t id) {
    if (!contains(id)) return;
    --size_;
    const size_t mask = slots_.size() - 1;
    size_t gap = find(id);
    for (size_t at = (gap + 1) & mask; slots_[at] != kEmpty; at = (at + 1) & mask) {
      const size_t from_home = (at - home(slots_[at])) & mask, from_gap = (at - gap) & mask;
      if (from_home < from_gap) continue;  // its home lies behind the gap
      slots_[gap] = slots_[at];
      gap = at;
    }
    slots_[gap] = kEmpty;
  }

  // All ids, in arbitrary order; afterwards the set is empty and holds no memory.
  std::vector<uint32_t> take() {
    std::vector<uint32_t> ids = members();
    slots_ = {};
    size_ = 0;
    return ids;
  }

  std::vector<uint32_t> members() const {
    std::vector<uint32_t> ids;
    ids.reserve(size_);
    for (const uint32_t id : slots_) {
      if (id != kEmpty) ids.push_back(id);
    }
    return ids;
  }

 private:
  static constexpr uint32_t kEmpty = UINT32_MAX;

  // Fibonacci hashing: the product's upper bits.
  size_t home(uint32_t id) const { return uint64_t{id * 0x9e3779b1u} * slots_.size() >> 32; }

  // The slot of `id`, or the empty one where it belongs.
  size_t find(uint32_t id) const {
    size_t at = home(id);
    while (slots_[at] != id && slots_[at] != kEmpty) at = (at + 1) & (slots_.size() - 1);
    return at;
  }

  void grow() {
    const std::vector<uint32_t> old = std::exchange(slots_, {});
    slots_.assign(old.empty() ? 8 : 2 * old.size(), kEmpty);  // a power of two
    for (const uint32_t id : old) {
      if (id != kEmpty) slots_[find(id)] = id;
    }
  }

  std::vector<uint32_t> slots_;
  size_t size_ = 0;
};

}  // namespace memserve
