// What lies on a disk: a superblock in two copies, then segments of one size. All numbers are little-endian.
//
//   disk     | superblock A | superblock B | ... 64 KiB | segment 0 | segment 1 | ...
//   segment  | head | record | record | ...        | footer entries | trailer |
//            0      4096                             ends with the segment
//   record   | head: one page; a short payload lies in it | payload, padded to whole pages |
//
// A payload may be encoded (codec/kv_codec.h): its record then says how many units of pages that takes. Length and seal
// are those of the value itself. The superblock's version is 2 from before the first such record on, so that a program
// that does not know them does not read the disk.
//
// Every structure carries a keyed checksum, with a secret that only the superblock holds: a value that a client chose
// can't be taken for a record. Segments and records carry the serial number of the segment's life as well, so what an
// earlier life left behind is never read as of this one. Payloads are checked by their seal (transfer/seal_sums.h).
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "identity/identity.h"

namespace memserve::store {

constexpr size_t kPage = 4096;
constexpr size_t kHeadBytes = 64 << 10;  // in front of the first segment
constexpr uint32_t kVersionPlain = 1;    // no payload is encoded
constexpr uint32_t kVersionEncoded = 2;  // some may be

// A record's or a tombstone's place in a footer.
enum class Kind : uint8_t { value = 1, removed = 2 };

struct Superblock {
  static constexpr uint64_t kMagic = 0x4b53494453564d;  // "MVSDISK"
  uint64_t magic = kMagic;
  uint32_t version = kVersionPlain;
  uint32_t segments = 0;
  uint64_t segment_bytes = 0;
  uint64_t written = 0;  // counts up with each write: the higher copy counts
  uint64_t epoch = 0;    // counts up with each purge: segments of another epoch hold nothing
  uint8_t secret[16] = {};
  uint64_t check = 0;
};

struct SegmentHead {
  static constexpr uint64_t kMagic = 0x474553564d;  // "MVSEG"
  uint64_t magic = kMagic;
  uint64_t serial = 0;
  uint64_t epoch = 0;
  uint32_t segment = 0;
  uint32_t unused = 0;
  uint64_t check = 0;
};

constexpr size_t kNameBytesMax = 1024;

struct RecordHead {
  static constexpr uint64_t kMagic = 0x434552564d;  // "MVREC"
  uint64_t magic = kMagic;
  uint64_t serial = 0;
  Hash128 key = {};
  uint64_t seal = 0;
  uint64_t number = 0;  // of the put that wrote it: of two records of one key the higher number counts
  uint64_t layers = 0;  // a bit each, 0 = all
  uint32_t length = 0;  // of the payload, in bytes
  uint32_t scope = 0;   // a tag chosen by the owner
  uint32_t page : 20 = 0;   // of the record, in its segment
  uint32_t units : 12 = 0;  // of its encoded payload; 0: it is as it is
  uint16_t name_bytes = 0;
  Kind kind = Kind::value;
  uint8_t unused = 0;
  uint64_t check = 0;
};  // then the name, then a short payload; of `removed`: keys with numbers, 24 bytes each

struct FooterEntry {
  Hash128 key = {};
  uint64_t seal = 0;
  uint64_t number = 0;
  uint32_t length = 0;
  uint32_t scope = 0;
  uint32_t page : 20 = 0;
  uint32_t units : 12 = 0;
  uint16_t name_bytes = 0;
  Kind kind = Kind::value;
  uint8_t unused = 0;
};
static_assert(sizeof(FooterEntry) == 48 && sizeof(RecordHead) == 80);

struct Trailer {
  static constexpr uint64_t kMagic = 0x444e45564d;  // "MVEND"
  uint64_t magic = kMagic;
  uint64_t serial = 0;
  uint32_t entries = 0;
  uint32_t unused = 0;
  uint64_t entries_check = 0;
  uint64_t check = 0;
};

constexpr size_t pages_of(size_t bytes) { return (bytes + kPage - 1) / kPage; }
constexpr size_t footer_pages(size_t entries) { return pages_of(entries * sizeof(FooterEntry) + sizeof(Trailer)); }
constexpr size_t kInlineBytesMax = kPage - sizeof(RecordHead);

// Whether the payload lies in the head's page.
constexpr bool lies_in_head(size_t length, size_t name_bytes) { return length + name_bytes <= kInlineBytesMax; }
// The pages of a unit: of values of up to 16 MiB one, of longer ones as many as let 12 bits count them.
constexpr size_t unit_pages(size_t length) {
  return size_t{1} << std::max(0, static_cast<int>(std::bit_width(pages_of(length))) - 12);
}
// How many units an encoding takes. 0: no fewer pages than the value itself.
constexpr uint32_t units_of(size_t length, size_t encoded_bytes) {
  const size_t pages = unit_pages(length), units = (pages_of(encoded_bytes) + pages - 1) / pages;
  return units * pages < pages_of(length) ? static_cast<uint32_t>(units) : 0;
}
constexpr size_t encoded_pages(size_t length, uint32_t units) { return units * unit_pages(length); }
constexpr size_t record_pages(size_t length, size_t name_bytes, uint32_t units) {
  if (units > 0) return 1 + encoded_pages(length, units);
  return 1 + (lies_in_head(length, name_bytes) ? 0 : pages_of(length));
}

class Checksum {
 public:
  explicit Checksum(const uint8_t secret[16]) { std::memcpy(secret_, secret, sizeof secret_); }

  uint64_t of(const void* data, size_t bytes) const {
    return siphash128(secret_, static_cast<const uint8_t*>(data), bytes).low;
  }
  // A structure's `check` is its last member, over all that stands before it.
  template <class T>
  void sign(T& item) const {
    item.check = of(&item, offsetof_check<T>());
  }
  template <class T>
  bool holds(const T& item) const {
    return item.magic == T::kMagic && item.check == of(&item, offsetof_check<T>());
  }
  // A record's check covers its name as well, which stands right behind the head.
  uint64_t of_record(const RecordHead& head, const uint8_t* name) const {
    std::array<uint8_t, sizeof(RecordHead) + kNameBytesMax> bytes;
    std::memcpy(bytes.data(), &head, offsetof_check<RecordHead>());
    std::memcpy(bytes.data() + offsetof_check<RecordHead>(), name, head.name_bytes);
    return of(bytes.data(), offsetof_check<RecordHead>() + head.name_bytes);
  }

 private:
  template <class T>
  static constexpr size_t offsetof_check() {
    return sizeof(T) - sizeof(uint64_t);
  }
  uint8_t secret_[16];
};

// A superblock is the secret's only carrier: its own check needs none.
inline constexpr uint8_t kNoSecret[16] = {};

}  // namespace memserve::store
