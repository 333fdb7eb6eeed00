// Where keys and values lie: the arena of pages, and the inside of a page.
//
//   block b, layer l        one page            one head of a page
//   +-----+-----+---+       +------+------+     +----------------------+----------------------+
//   | l=0 | l=1 |...|       | kv 0 | kv 1 |     | K [head_dim_k, block] | V [block, head_dim_v] |
//   +-----+-----+---+       +------+------+     +----------------------+----------------------+
//
// A worker that has some of the heads sees the arena from its first head on (`base`), with whole pages as strides. Where
// layers differ, those of one shape see it from the first of their pages on, with whole blocks as strides.
// K lies transposed: a step of the dot product over head_dim_k then reads neighbouring tokens with one vector load.
// That is KV as it was computed; kv_codes.h has the inside of a head whose values are codes. Of latents a page has K
// alone, of one head: a value is the first head_dim_v elements of its key.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv_codes.h"

namespace memserve {

enum class Dtype : int { float32 = 0, bfloat16 = 1, float16 = 2 };

struct PageLayout {
  char* base;  // of the arena
  int num_layers, num_kv_heads, head_dim_k, head_dim_v, block_tokens;
  Dtype dtype;
  int page_heads;  // of a whole page: more than num_kv_heads where other workers have the rest
  Scheme scheme = Scheme::as_computed;
  bool latent = false;
  size_t block_stride = 0;  // bytes; 0: blocks have these pages alone

  size_t element_bytes() const { return dtype == Dtype::float32 ? 4 : 2; }
  CodedHead coded_head() const { return CodedHead::make(scheme, head_dim_k, head_dim_v, block_tokens); }
  size_t head_bytes() const {
    if (scheme != Scheme::as_computed) return coded_head().bytes();
    return size_t(block_tokens) * (head_dim_k + (latent ? 0 : head_dim_v)) * element_bytes();
  }
  size_t page_bytes() const { return head_bytes() * page_heads; }

  size_t block_bytes() const { return block_stride ? block_stride : page_bytes() * num_layers; }

  // The only place that maps blocks to pages.
  char* page(int32_t block, int layer) const { return base + block * block_bytes() + layer * page_bytes(); }

  char* head(int32_t block, int layer, int kv_head) const { return page(block, layer) + kv_head * head_bytes(); }

  // Element offsets inside a head. A token's key is a column with stride `block_tokens`, its value is a row.
  int key_offset(int slot) const { return slot; }
  int value_offset(int slot) const { return head_dim_k * block_tokens + slot * head_dim_v; }
};

}  // namespace memserve
