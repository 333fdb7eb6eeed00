// Which bytes of an arena are taken: blocks of one size from the bottom, runs of units from the top, small values in
// slabs of one unit each. Numbers alone: no byte of the arena is touched.
//
//   | block 0 | block 1 | ...      free      ...  | run | slab | run |
//   0         block_bytes                          multiples of a unit
//
// A block is a run of whole units that begins at a multiple of block_bytes, so both kinds share one bitmap of units.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "pool/bitmap.h"

namespace memserve::store {

// A stretch of the arena that was taken.
struct Extent {
  uint64_t offset = 0;
  uint32_t units = 0;      // 0: a part of a slab
  uint8_t size_class = 0;  // of the slab
};

class Extents {
 public:
  static constexpr size_t kUnit = 4096;
  static constexpr size_t kClasses = 6;  // 64, 128 ... 2048 bytes
  static constexpr size_t class_bytes(size_t size_class) { return size_t{64} << size_class; }

  Extents(uint64_t arena_bytes, uint64_t block_bytes);

  size_t unit_bytes() const { return unit_bytes_; }
  size_t units() const { return units_; }
  size_t blocks() const { return blocks_; }
  size_t units_per_block() const { return units_per_block_; }
  size_t blocks_free() const { return blocks_free_; }
  size_t units_free() const { return units_free_; }
  size_t slabs() const { return slabs_.size(); }
  uint64_t bytes_of(const Extent& extent) const {
    return extent.units ? extent.units * uint64_t{unit_bytes_} : class_bytes(extent.size_class);
  }

  // What `bytes` bytes take. `units` 0: a part of a slab of that class.
  Extent shape(uint64_t bytes) const;

  // The lowest block; its offset follows from its number. Nothing: no block is whole.
  std::optional<Extent> take_block();
  // The highest run, or a part of a slab. Nothing: no run is that long.
  std::optional<Extent> take(const Extent& shape);
  bool has_room(const Extent& shape) {
    return (shape.units == 0 && !open_slabs_[shape.size_class].empty()) || find_run(shape.units ? shape.units : 1);
  }
  // Exactly these bytes, as an earlier life of the owner had them. False: they are no extent, or taken.
  bool claim(const Extent& extent);
  void give(const Extent& extent);

  struct Slab {
    uint8_t size_class;
    uint64_t used;  // a bit for each part
  };
  // The run or slab that a unit belongs to, by its first unit; nothing: the unit is free.
  struct Taken {
    size_t first;
    const Slab* slab;  // null: a run
  };
  std::optional<Taken> taken_at(size_t unit) const;

  size_t nbytes() const;
  void check_invariants() const;

 private:
  using Words = std::vector<uint64_t>;

  bool is_free(size_t unit) const { return free_[unit >> 6] >> (unit & 63) & 1; }
  size_t parts_of(size_t size_class) const;
  bool all_free(size_t first, size_t count) const;
  std::optional<size_t> find_run(size_t count);
  void take_units(size_t first, size_t count);
  void give_units(size_t first, size_t count);
  void raise_hints(size_t first, size_t count);
  void count_in_blocks(size_t first, size_t count, bool taken);

  uint64_t arena_bytes_, block_bytes_;
  size_t unit_bytes_, units_per_block_, units_, blocks_;
  size_t blocks_free_, units_free_;
  Words free_;         // a bit for each unit
  Words free_words_;   // a bit for each word of `free_` that is not zero
  Words starts_;       // a bit for the first unit of each run or slab
  Bitmap whole_;       // blocks of which every unit is free
  std::vector<uint32_t> taken_;  // units of each block
  // No run of 2^c free units or more ends above hints_[c].
  std::array<size_t, 44> hints_;
  std::unordered_map<uint32_t, Slab> slabs_;  // by unit
  std::array<std::set<uint32_t>, kClasses> open_slabs_;  // with a free part
};

}  // namespace memserve::store
