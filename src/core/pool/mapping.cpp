#include "pool/mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace memserve {

uint8_t* map_aligned(int fd, size_t bytes, int protection) {
  void* const room = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "no address space for a shared arena");
  auto* const from = static_cast<uint8_t*>(room);
  const size_t skip = (kHugePage - reinterpret_cast<uintptr_t>(from) % kHugePage) % kHugePage;
  if (skip > 0) munmap(from, skip);
  munmap(from + skip + bytes, kHugePage - skip);
  void* const start = mmap(from + skip, bytes, protection, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0);
  if (start == MAP_FAILED) {
    const int error = errno;
    munmap(from + skip, bytes);
    throw std::system_error(error, std::generic_category(), "a shared arena cannot be mapped");
  }
  return static_cast<uint8_t*>(start);
}

size_t collapse_pages(uint8_t* start, size_t from, size_t to, size_t mapped) {
  size_t collapsed = 0;
  for (size_t at = from / kHugePage * kHugePage; at < to && at + kHugePage <= mapped; at += kHugePage) {
    static_cast<void>(*static_cast<volatile uint8_t*>(start + at));  // a stretch without a page is not collapsed
    if (madvise(start + at, kHugePage, MADV_COLLAPSE) == 0) collapsed += kHugePage;
  }
  return collapsed;
}

}  // namespace memserve
