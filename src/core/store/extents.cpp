#include "store/extents.h"

#include <algorithm>
#include <bit>

#include "errors.h"

namespace memserve::store {

namespace {

constexpr size_t kScanMax = 4096;  // units looked at on each side of what is given back

// Calls `apply(word, mask)` for the words that [first, first + count) touches.
template <class Apply>
void each_word(size_t first, size_t count, Apply apply) {
  while (count > 0) {
    const size_t bit = first & 63, here = std::min(count, 64 - bit);
    apply(first >> 6, (here == 64 ? ~uint64_t{0} : (uint64_t{1} << here) - 1) << bit);
    first += here;
    count -= here;
  }
}

// The highest set bit below `end`; SIZE_MAX: none.
size_t last_set_below(const std::vector<uint64_t>& words, size_t end) {
  if (end == 0) return SIZE_MAX;
  size_t w = (end - 1) >> 6;
  uint64_t word = words[w] & (~uint64_t{0} >> (63 - ((end - 1) & 63)));
  while (word == 0) {
    if (w == 0) return SIZE_MAX;
    word = words[--w];
  }
  return w * 64 + 63 - std::countl_zero(word);
}

// How many set bits in a row end below `end`, at most `limit`.
size_t set_below(const std::vector<uint64_t>& words, size_t end, size_t limit) {
  size_t count = 0;
  while (count < limit && end > 0) {
    const size_t bits = ((end - 1) & 63) + 1;  // of this word
    const uint64_t word = words[(end - 1) >> 6] << (64 - bits);
    const size_t ones = std::min<size_t>(std::countl_one(word), bits);
    count += ones;
    if (ones < bits) break;
    end -= bits;
  }
  return std::min(count, limit);
}

// How many set bits in a row begin at `at`, at most `limit`; bits behind the last one are clear.
size_t set_from(const std::vector<uint64_t>& words, size_t at, size_t size, size_t limit) {
  size_t count = 0;
  while (count < limit && at < size) {
    const size_t bits = 64 - (at & 63);
    const size_t ones = std::min<size_t>(std::countr_one(words[at >> 6] >> (at & 63)), bits);
    count += ones;
    if (ones < bits) break;
    at += bits;
  }
  return std::min(count, limit);
}

}  // namespace

Extents::Extents(uint64_t arena_bytes, uint64_t block_bytes)
    : arena_bytes_(arena_bytes),
      block_bytes_(block_bytes),
      unit_bytes_(block_bytes % kUnit == 0 ? kUnit : block_bytes),
      units_per_block_(block_bytes / unit_bytes_),
      units_(arena_bytes / unit_bytes_),
      blocks_(arena_bytes / block_bytes),
      blocks_free_(blocks_),
      units_free_(units_),
      free_((units_ + 63) / 64, 0),
      free_words_((free_.size() + 63) / 64, 0),
      starts_(free_.size(), 0),
      whole_(blocks_, true),
      taken_(blocks_, 0) {
  each_word(0, units_, [&](size_t w, uint64_t mask) { free_[w] |= mask; });
  each_word(0, free_.size(), [&](size_t w, uint64_t mask) { free_words_[w] |= mask; });
  hints_.fill(units_);
}

Extent Extents::shape(uint64_t bytes) const {
  for (size_t c = 0; c < kClasses; ++c) {
    if (class_bytes(c) * 2 > unit_bytes_) break;
    if (bytes <= class_bytes(c)) return {0, 0, static_cast<uint8_t>(c)};
  }
  return {0, static_cast<uint32_t>(std::max<uint64_t>(1, (bytes + unit_bytes_ - 1) / unit_bytes_)), 0};
}

std::optional<Extent> Extents::take_block() {
  if (blocks_free_ == 0) return std::nullopt;
  const size_t block = whole_.lowest();
  take_units(block * units_per_block_, units_per_block_);
  return Extent{block * block_bytes_, static_cast<uint32_t>(units_per_block_), 0};
}

std::optional<Extent> Extents::take(const Extent& shape) {
  if (shape.units) {
    const auto first = find_run(shape.units);
    if (!first) return std::nullopt;
    take_units(*first, shape.units);
    return Extent{*first * unit_bytes_, shape.units, 0};
  }
  auto& open = open_slabs_[shape.size_class];
  if (open.empty()) {
    const auto unit = find_run(1);
    if (!unit) return std::nullopt;
    take_units(*unit, 1);
    slabs_[static_cast<uint32_t>(*unit)] = {shape.size_class, 0};
    open.insert(static_cast<uint32_t>(*unit));
  }
  const uint32_t unit = *open.rbegin();
  Slab& slab = slabs_[unit];
  const size_t part = static_cast<size_t>(std::countr_one(slab.used));
  slab.used |= uint64_t{1} << part;
  if (std::popcount(slab.used) == static_cast<int>(parts_of(slab.size_class))) open.erase(unit);
  return Extent{unit * uint64_t{unit_bytes_} + part * class_bytes(shape.size_class), 0, shape.size_class};
}

bool Extents::claim(const Extent& extent) {
  const uint64_t unit = extent.offset / unit_bytes_, inside = extent.offset % unit_bytes_;
  if (extent.units) {
    if (inside != 0 || unit >= units_ || extent.units > units_ - unit || !all_free(unit, extent.units)) return false;
    take_units(unit, extent.units);
    return true;
  }
  const size_t c = extent.size_class;
  if (c >= kClasses || class_bytes(c) * 2 > unit_bytes_ || unit >= units_) return false;
  const size_t part = inside / class_bytes(c);
  if (inside % class_bytes(c) != 0 || part >= parts_of(c)) return false;
  if (is_free(unit)) {
    take_units(unit, 1);
    slabs_[static_cast<uint32_t>(unit)] = {extent.size_class, 0};
    open_slabs_[c].insert(static_cast<uint32_t>(unit));
  }
  const auto found = slabs_.find(static_cast<uint32_t>(unit));
  if (found == slabs_.end() || found->second.size_class != c || found->second.used >> part & 1) return false;
  found->second.used |= uint64_t{1} << part;
  if (std::popcount(found->second.used) == static_cast<int>(parts_of(c))) {
    open_slabs_[c].erase(static_cast<uint32_t>(unit));
  }
  return true;
}

void Extents::give(const Extent& extent) {
  const size_t unit = extent.offset / unit_bytes_;
  if (extent.units) return give_units(unit, extent.units);
  const auto found = slabs_.find(static_cast<uint32_t>(unit));
  check(found != slabs_.end(), "a part of a slab is given back that is not there");
  Slab& slab = found->second;
  slab.used &= ~(uint64_t{1} << extent.offset % unit_bytes_ / class_bytes(slab.size_class));
  auto& open = open_slabs_[slab.size_class];
  if (slab.used != 0) {
    open.insert(static_cast<uint32_t>(unit));
    return;
  }
  open.erase(static_cast<uint32_t>(unit));
  slabs_.erase(found);
  give_units(unit, 1);
}

std::optional<Extents::Taken> Extents::taken_at(size_t unit) const {
  if (is_free(unit)) return std::nullopt;
  const size_t first = last_set_below(starts_, unit + 1);
  const auto slab = slabs_.find(static_cast<uint32_t>(first));
  return Taken{first, slab == slabs_.end() ? nullptr : &slab->second};
}

size_t Extents::parts_of(size_t size_class) const { return std::min<size_t>(64, unit_bytes_ / class_bytes(size_class)); }

bool Extents::all_free(size_t first, size_t count) const {
  bool all = true;
  each_word(first, count, [&](size_t w, uint64_t mask) { all = all && (free_[w] & mask) == mask; });
  return all;
}

std::optional<size_t> Extents::find_run(size_t count) {
  if (count > units_free_) return std::nullopt;
  const size_t c = static_cast<size_t>(std::bit_width(count)) - 1;
  size_t end = hints_[c], passed = 0;  // `passed`: where the highest run ends that is long enough for others of class c
  while (end > 0) {
    // Words without a free unit are passed over 64 at a time.
    if (free_[(end - 1) >> 6] == 0) {
      const size_t w = last_set_below(free_words_, (end - 1) >> 6);
      if (w == SIZE_MAX) break;
      end = (w + 1) * 64;
    }
    const size_t top = last_set_below(free_, end);
    if (top == SIZE_MAX) break;
    const size_t run = set_below(free_, top + 1, count);
    if (run == count) {
      hints_[c] = passed ? passed : top + 1;
      return top + 1 - count;
    }
    if (passed == 0 && run >> c) passed = top + 1;
    end = top + 1 - run;
  }
  hints_[c] = passed;
  return std::nullopt;
}

void Extents::take_units(size_t first, size_t count) {
  each_word(first, count, [&](size_t w, uint64_t mask) {
    free_[w] &= ~mask;
    if (free_[w] == 0) free_words_[w >> 6] &= ~(uint64_t{1} << (w & 63));
  });
  starts_[first >> 6] |= uint64_t{1} << (first & 63);
  units_free_ -= count;
  count_in_blocks(first, count, true);
}

void Extents::give_units(size_t first, size_t count) {
  each_word(first, count, [&](size_t w, uint64_t mask) {
    check((free_[w] & mask) == 0, "units are given back that are free");
    free_[w] |= mask;
    free_words_[w >> 6] |= uint64_t{1} << (w & 63);
  });
  starts_[first >> 6] &= ~(uint64_t{1} << (first & 63));
  units_free_ += count;
  count_in_blocks(first, count, false);
  raise_hints(first, count);
}

// The run around what was given back may be long enough for more than it was. Its neighbours are measured up to a
// limit; a piece above that is 2^c long itself lies below hints_[c] already.
void Extents::raise_hints(size_t first, size_t count) {
  const size_t above = set_from(free_, first + count, units_, kScanMax);
  const size_t below = set_below(free_, first, kScanMax);
  const bool cut = above == kScanMax || below == kScanMax;
  const size_t run = above + count + below, end = first + count + above;
  for (size_t c = 0; c < hints_.size(); ++c) {
    if (run >> c || cut) hints_[c] = std::max(hints_[c], above == kScanMax && kScanMax >> c == 0 ? units_ : end);
  }
}

void Extents::count_in_blocks(size_t first, size_t count, bool taken) {
  while (count > 0) {
    const size_t block = first / units_per_block_;
    if (block >= blocks_) return;  // behind the last whole block
    const size_t here = std::min(count, (block + 1) * units_per_block_ - first);
    if (taken) {
      if (taken_[block] == 0) {
        whole_.erase(block);
        --blocks_free_;
      }
      taken_[block] += static_cast<uint32_t>(here);
    } else {
      taken_[block] -= static_cast<uint32_t>(here);
      if (taken_[block] == 0) {
        whole_.insert(block);
        ++blocks_free_;
      }
    }
    first += here;
    count -= here;
  }
}

size_t Extents::nbytes() const {
  return sizeof *this + (free_.capacity() + free_words_.capacity() + starts_.capacity()) * 8 +
         taken_.capacity() * 4 + blocks_ / 8 + slabs_.size() * 64;
}

void Extents::check_invariants() const {
  size_t free = 0, whole = 0;
  for (size_t w = 0; w < free_.size(); ++w) {
    free += static_cast<size_t>(std::popcount(free_[w]));
    check((free_words_[w >> 6] >> (w & 63) & 1) == (free_[w] != 0), "a word of free units is not summed up");
    check((free_[w] & starts_[w]) == 0, "a free unit begins a run");
  }
  check(free == units_free_, "free units are counted wrongly");
  for (size_t block = 0; block < blocks_; ++block) {
    size_t taken = 0;
    for (size_t i = 0; i < units_per_block_; ++i) taken += !is_free(block * units_per_block_ + i);
    check(taken == taken_[block] && whole_.contains(block) == (taken == 0), "a block's units are counted wrongly");
    whole += taken == 0;
  }
  check(whole == blocks_free_, "free blocks are counted wrongly");
  for (size_t at = 0; at < units_;) {
    const size_t run = set_from(free_, at, units_, units_);
    for (size_t c = 0; run >> c; ++c) check(at + run <= hints_[c], "a run of free units would not be found");
    at += std::max<size_t>(run, 1);
  }
  for (const auto& [unit, slab] : slabs_) {
    check(!is_free(unit) && slab.used != 0, "a slab has no unit or no part");
    const bool open = std::popcount(slab.used) < static_cast<int>(parts_of(slab.size_class));
    check(open_slabs_[slab.size_class].count(unit) == open, "a slab's free parts are not found");
  }
}

}  // namespace memserve::store
