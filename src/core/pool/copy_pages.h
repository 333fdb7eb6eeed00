// memcpy for pieces of many pages, a page at a time.
//
// glibc's memcpy copies large pieces by `rep movsb`, which on AMD's Zen 3 and 4 takes two to six times as long when the
// target begins 1 to 31 bytes behind the source, modulo 4096. That is the common case, not a rare one: what a store
// keeps begins on a page, and a large array of NumPy 16 bytes behind one. A page is copied by vector moves instead,
// which are at least as quick everywhere (bench/store_memory.py: "copy / memcpy").
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace memserve {

// The two must not overlap.
inline void copy_pages(uint8_t* to, const uint8_t* from, size_t bytes) {
  constexpr size_t kPage = 4096;
  for (size_t at = 0; at < bytes; at += kPage) std::memcpy(to + at, from + at, std::min(kPage, bytes - at));
}

}  // namespace memserve
