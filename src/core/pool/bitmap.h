// A set of small integers that finds its lowest member quickly.
#pragma once
#include <bit>
#include <cstdint>
#include <vector>

namespace memserve {

// Two levels: bit i of `words_` = member i; bit w of `summary_` = word w has a member. Half a million members are
// 8,192 words under 128 summary words, so that finding the lowest one reads a few cache lines even when it is last.
class Bitmap {
 public:
  explicit Bitmap(size_t size, bool full)
      : words_((size + 63) / 64, 0), summary_((words_.size() + 63) / 64, 0) {
    if (full) for (size_t i = 0; i < size; ++i) insert(i);
  }

  bool contains(size_t i) const { return words_[i >> 6] >> (i & 63) & 1; }

  void insert(size_t i) {
    words_[i >> 6] |= uint64_t{1} << (i & 63);
    summary_[i >> 12] |= uint64_t{1} << (i >> 6 & 63);
    if (i >> 12 < first_summary_) first_summary_ = i >> 12;
  }

  void erase(size_t i) {
    uint64_t& word = words_[i >> 6];
    word &= ~(uint64_t{1} << (i & 63));
    if (word == 0) summary_[i >> 12] &= ~(uint64_t{1} << (i >> 6 & 63));
  }

  // Removes the `count` lowest members, in order, into `out`. The set must have that many.
  template <class Int>
  void take_lowest(size_t count, Int* out) {
    while (count > 0) {
      const size_t w = lowest_word();
      uint64_t& word = words_[w];
      while (word != 0 && count > 0) {
        *out++ = static_cast<Int>(w * 64 + std::countr_zero(word));
        word &= word - 1;
        --count;
      }
      if (word == 0) summary_[w >> 6] &= ~(uint64_t{1} << (w & 63));
    }
  }

  // The lowest member. The set must not be empty.
  size_t lowest() {
    const size_t w = lowest_word();
    return w * 64 + std::countr_zero(words_[w]);
  }

 private:
  size_t lowest_word() {
    while (summary_[first_summary_] == 0) ++first_summary_;
    return first_summary_ * 64 + std::countr_zero(summary_[first_summary_]);
  }

  std::vector<uint64_t> words_;
  std::vector<uint64_t> summary_;
  size_t first_summary_ = 0;  // no summary word before this one has a bit
};

}  // namespace memserve
