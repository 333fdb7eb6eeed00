// Maps of files in memory that suit huge pages.
#pragma once
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

}  // namespace memserve
