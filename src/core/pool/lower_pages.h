// What a lower tier keeps of KV that lies in the first one as it was computed: pages of codes (kernels/kv_codes.h).
//
//   page           head 0: K [head_dim_k, tokens] | V [tokens, head_dim_v] | head 1 ...      2 or 4 bytes a value
//   lower page     the same heads, each with its codes and maxima                            a byte a value, or less
//
// Nothing drifts: what `up` writes, `down` turns into the same bytes again.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "../../kernels/kv_codes.h"

namespace memserve {

enum class PageDtype : int { float32, bfloat16, float16 };

class LowerPages {
 public:
  // `head.dim_k` and `head.dim_v` are at most kCodedDimMax; `scheme` is not as_computed.
  LowerPages(int kv_heads, const CodedHead& head, PageDtype dtype, Scheme scheme);

  size_t page_bytes() const { return kv_heads_ * size_t(head_.tokens) * (head_.dim_k + head_.dim_v) * value_bytes(); }
  size_t lower_page_bytes() const { return kv_heads_ * head_.bytes(); }

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

  size_t kv_heads_;
  CodedHead head_;
  PageDtype dtype_;
  Scheme scheme_;
};

}  // namespace memserve
