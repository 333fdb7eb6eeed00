// Where each key's record lies: open addressing with linear probes, in 256 parts that grow each for itself, so that no
// insert ever waits for more than a part to be copied (2 ms at ten million records).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "identity/siphash.h"

namespace memserve::store {

struct Entry {
  Hash128 key = {};
  uint64_t seal = 0;
  uint64_t number = 0;  // of the put that wrote it
  uint32_t length = 0;
  uint32_t scope = 0;
  uint32_t page : 20 = 0;
  uint32_t units : 12 = 0;  // of its encoded payload; 0: it is as it is
  uint16_t segment = 0;
  uint16_t name_bytes : 12 = 0;
  uint16_t hits : 3 = 0;  // since it was written, saturating
  uint16_t used : 1 = 0;  // this slot has a record
};
static_assert(sizeof(Entry) == 48);

class RecordIndex {
 public:
  // Null: there is none. Valid until the next insert or erase.
  Entry* find(Hash128 key);
  const Entry* find(Hash128 key) const { return const_cast<RecordIndex*>(this)->find(key); }
  // Replaces an entry with the same key.
  void insert(const Entry& entry);
  bool erase(Hash128 key);
  void clear();
  size_t size() const { return size_; }
  size_t nbytes() const;
  void check_invariants() const;

  template <class Visit>
  void each(Visit visit) const {
    for (const Part& part : parts_) {
      for (const Entry& entry : part.slots) {
        if (entry.used) visit(entry);
      }
    }
  }

 private:
  struct Part {
    std::vector<Entry> slots;
    size_t size = 0;
  };
  static size_t place(Hash128 key, const Part& part) { return key.low & (part.slots.size() - 1); }
  static void grow(Part& part);

  std::array<Part, 256> parts_;
  size_t size_ = 0;
};

}  // namespace memserve::store
