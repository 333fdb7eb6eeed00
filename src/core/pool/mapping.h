// Maps of files in memory that suit huge pages.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace memserve {

constexpr size_t kHugePage = size_t{2} << 20;

// Maps a file, shared, where its offsets and addresses agree modulo a huge page. Throws std::system_error.
uint8_t* map_aligned(int fd, size_t bytes, int protection);

// Puts the huge-page stretches that [from, to) of a writable map touches on huge pages, and commits their memory; those
// that end behind `mapped` are left alone. Most machines give shared memory none of their own accord, but do on demand
// (MADV_COLLAPSE, Linux 6.1). Returns how many bytes lie on huge pages now.
size_t collapse_pages(uint8_t* start, size_t from, size_t to, size_t mapped);

// Takes all `bytes` of memory of an empty file in memory, or says that it is not there: 0, or an errno. Both ends of the
// file come first to lie on huge pages, as many as there are and as `patience` gives: the system fills them with zeros
// now, and small ones when they are first used.
int fill_file(int fd, size_t bytes, std::chrono::milliseconds patience);

}  // namespace memserve
