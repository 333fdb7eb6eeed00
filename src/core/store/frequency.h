// How often keys were recently requested: a count-min sketch of 4-bit counters behind a doorkeeper (TinyLFU: Einziger,
// Friedman and Manes, 2017). The first request sets a bit of the doorkeeper alone; counters halve, and the doorkeeper
// is cleared, after as many requests as there are counters in a row: what was asked for long ago fades.
#pragma once
#include <bit>
#include <cstdint>
#include <vector>

#include "identity/siphash.h"

namespace memserve::store {

class Frequency {
 public:
  // `keys`: how many keys to tell apart, three bytes of memory each.
  explicit Frequency(size_t keys) : width_(std::bit_ceil(keys < 64 ? size_t{64} : keys)) {
    counters_.resize(width_ * kRows / 16);
    seen_.resize(width_ / 64 * 8);
  }

  // Counts one request. Returns how many came before it, at least; never more than 16.
  unsigned note(Hash128 key) {
    if (++noted_ >= width_) fade();
    const uint64_t bit = key.high & (seen_.size() * 64 - 1);
    const uint64_t also = (key.high >> 32 ^ key.low >> 17) & (seen_.size() * 64 - 1);
    const bool known = seen_[bit / 64] >> bit % 64 & seen_[also / 64] >> also % 64 & 1;
    if (!known) {
      seen_[bit / 64] |= uint64_t{1} << bit % 64;
      seen_[also / 64] |= uint64_t{1} << also % 64;
      return 0;
    }
    unsigned least = 15;
    for (unsigned row = 0; row < kRows; ++row) least = std::min(least, count(row, key));
    for (unsigned row = 0; row < kRows; ++row) {
      if (count(row, key) == least && least < 15) add(row, key);
    }
    return least + 1;
  }

  size_t nbytes() const { return (counters_.size() + seen_.size()) * 8; }

 private:
  static constexpr unsigned kRows = 4;

  size_t slot(unsigned row, Hash128 key) const {
    return ((key.low + row * key.high) * 0x9e3779b97f4a7c15u >> 20 & (width_ - 1)) + row * width_;
  }
  unsigned count(unsigned row, Hash128 key) const {
    const size_t at = slot(row, key);
    return counters_[at / 16] >> at % 16 * 4 & 15;
  }
  void add(unsigned row, Hash128 key) {
    const size_t at = slot(row, key);
    counters_[at / 16] += uint64_t{1} << at % 16 * 4;
  }
  void fade() {
    noted_ = 0;
    for (uint64_t& word : counters_) word = word >> 1 & 0x7777777777777777u;
    seen_.assign(seen_.size(), 0);
  }

  size_t width_;
  std::vector<uint64_t> counters_, seen_;
  size_t noted_ = 0;
};

}  // namespace memserve::store
