// Hash -> small numbers: open addressing with linear probes, in 256 parts that grow each for itself, so that no insert
// ever waits for more than a part to be copied. What a number stands for is the caller's: it compares.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "identity/siphash.h"

namespace memserve::store {

// Two words into one, by the halves of their product.
inline uint64_t mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

class IdTable {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // The number that was inserted with this hash and for which `equal` holds; kNone: there is none.
  template <class Equal>
  uint32_t find(uint64_t hash, Equal equal) const {
    const Part& part = parts_[hash >> 56];
    if (part.slots.empty()) return kNone;
    const uint32_t tag = tag_of(hash);
    for (size_t i = tag & part.mask();; i = (i + 1) & part.mask()) {
      const Slot& slot = part.slots[i];
      if (slot.id == kNone) return kNone;
      if (slot.tag == tag && equal(slot.id)) return slot.id;
    }
  }

  void prefetch(uint64_t hash) const {
    const Part& part = parts_[hash >> 56];
    if (!part.slots.empty()) __builtin_prefetch(&part.slots[tag_of(hash) & part.mask()]);
  }

  void insert(uint64_t hash, uint32_t id) {
    Part& part = parts_[hash >> 56];
    if ((part.size + 1) * 4 > part.slots.size() * 3) part.grow();
    part.put({tag_of(hash), id});
    ++part.size;
    ++size_;
  }

  void erase(uint64_t hash, uint32_t id) {
    Part& part = parts_[hash >> 56];
    size_t hole = tag_of(hash) & part.mask();
    while (part.slots[hole].id != id) hole = (hole + 1) & part.mask();
    // What probed past the hole moves into it, so that no probe ends too early.
    for (size_t i = (hole + 1) & part.mask(); part.slots[i].id != kNone; i = (i + 1) & part.mask()) {
      const size_t home = part.slots[i].tag & part.mask();
      if (((i - home) & part.mask()) >= ((i - hole) & part.mask())) {
        part.slots[hole] = part.slots[i];
        hole = i;
      }
    }
    part.slots[hole] = Slot{};
    --part.size;
    --size_;
  }

  size_t size() const { return size_; }
  size_t nbytes() const {
    size_t bytes = sizeof *this;
    for (const Part& part : parts_) bytes += part.slots.capacity() * sizeof(Slot);
    return bytes;
  }

 private:
  struct Slot {
    uint32_t tag = 0;
    uint32_t id = kNone;
  };
  struct Part {
    std::vector<Slot> slots;  // a power of two, or none
    size_t size = 0;

    size_t mask() const { return slots.size() - 1; }
    void put(Slot slot) {
      size_t i = slot.tag & mask();
      while (slots[i].id != kNone) i = (i + 1) & mask();
      slots[i] = slot;
    }
    void grow() {
      std::vector<Slot> old(slots.empty() ? 8 : slots.size() * 2);
      old.swap(slots);
      for (const Slot& slot : old) {
        if (slot.id != kNone) put(slot);
      }
    }
  };
  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 24); }

  std::array<Part, 256> parts_;
  size_t size_ = 0;
};

}  // namespace memserve::store
