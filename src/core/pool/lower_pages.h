// Pages whose values take one byte each: what a lower tier keeps of KV.
//
//   page           head 0: K values | V values | head 1: K values | V values | ...      2 or 4 bytes a value
//   lower page     the same values in the same order, a byte each | a scale for each K and V | zeros to 64 bytes
//
// A run is the K or the V of one head. Its scale is the least float with 16 significant bits by which the run's largest
// magnitude becomes the largest code (int8: 127, fp8: 448); a value is its code times the scale.
//
// Nothing drifts: what `up` writes, `down` turns into the same bytes again. A scale of 16 bits times a code is exact in a
// float, so the largest magnitude comes back as it was (bfloat16, float16) or as a multiple of the same scale (float32),
// and half a unit in the last place of any of the three types is less than half the distance between two codes (but for
// the least values of float16, see `code_of`).
//
// Values that are no numbers, infinite, or 2^127 and more, come back as NaN and do not count for the scale. A run whose
// magnitudes are all below 2^-100 is zero.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace memserve {

enum class PageDtype : int { float32, bfloat16, float16 };
enum class LowerDtype : int { int8, fp8 };  // fp8: e4m3 without infinities

class LowerPages {
 public:
  // `key_values`, `value_values`: in a run of keys and of values.
  LowerPages(int kv_heads, size_t key_values, size_t value_values, PageDtype dtype, LowerDtype lower);

  size_t page_bytes() const { return kv_heads_ * (key_values_ + value_values_) * value_bytes(); }
  size_t lower_page_bytes() const;

  struct Piece {
    uint8_t* dst;
    const uint8_t* src;
  };

  // Pieces must not overlap. At most `threads` threads work (the caller is one); small jobs stay on the caller.
  void down(std::span<const Piece> pieces, int threads) const;  // page -> lower page
  void up(std::span<const Piece> pieces, int threads) const;    // lower page -> page

 private:
  size_t value_bytes() const { return dtype_ == PageDtype::float32 ? 4 : 2; }
  void run(std::span<const Piece> pieces, int threads, bool is_down) const;

  size_t kv_heads_, key_values_, value_values_;
  PageDtype dtype_;
  LowerDtype lower_;
};

}  // namespace memserve
