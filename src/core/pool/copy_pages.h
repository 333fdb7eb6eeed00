// memcpy for pieces of many pages.
//
// glibc's memcpy copies large pieces by `rep movsb`, which on AMD's Zen 3 and 4 takes two to six times as long when the
// target begins 1 to 31 bytes behind the source, modulo 4096. That is the common case, not a rare one: what a store
// keeps begins on a page, and a large array of NumPy 16 bytes behind one. There vector moves copy instead, which are at
// least as quick everywhere (bench/store_memory.py: "copy / memcpy"). Elsewhere the pieces are short enough that memcpy
// does not write past the caches: the caller reads the target next.
#pragma once
#include <cstddef>
#include <cstdint>

namespace memserve {

// The two must not overlap.
void copy_pages(uint8_t* to, const uint8_t* from, size_t bytes);

}  // namespace memserve
