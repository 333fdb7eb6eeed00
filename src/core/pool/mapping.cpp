#include "pool/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
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

namespace {

// Whether the file system says so: it says no before it takes anything.
bool has_room(int fd, size_t bytes) {
  struct statfs system {};
  return fstatfs(fd, &system) == 0 &&
         (system.f_blocks == 0 || system.f_bavail >= bytes / static_cast<size_t>(system.f_bsize));
}

}  // namespace

// A stretch with one page is collapsed at once: no small pages are filled with zeros and copied. The page is asked for
// by the file and not touched, since touching memory that there is not ends the process.
int fill_file(int fd, size_t bytes, std::chrono::milliseconds patience) {
  constexpr int kFailuresMax = 8;  // memory in pieces: looking for more would only take time
  constexpr off_t kPage = 4096;
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) return errno;
  const size_t count = bytes / kHugePage;
  if (count > 0 && has_room(fd, bytes)) {
    uint8_t* const start = map_aligned(fd, bytes, PROT_READ | PROT_WRITE);
    const auto end = std::chrono::steady_clock::now() + patience;
    int failures = 0;
    for (size_t i = 0; i < count && failures < kFailuresMax && std::chrono::steady_clock::now() < end; ++i) {
      const size_t at = (i % 2 ? count - 1 - i / 2 : i / 2) * kHugePage;
      if (fallocate(fd, 0, static_cast<off_t>(at), kPage) != 0) break;
      failures += collapse_pages(start, at, at + 1, bytes) == 0;
    }
    munmap(start, bytes);
  }
  return posix_fallocate(fd, 0, static_cast<off_t>(bytes));
}

}  // namespace memserve
