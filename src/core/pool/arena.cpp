#include "pool/arena.h"

#include <sys/mman.h>

#include <new>

#include "sanitize.h"

namespace memserve {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

Arena::Arena(size_t bytes)
    : nbytes_(bytes), mapped_(bytes < kHugePage ? bytes : (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage) {
  void* start = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(start);
  if (bytes < kHugePage) return;
  // Unmap the part before the first huge-page boundary, so that the whole arena can lie on huge pages.
  const auto at = reinterpret_cast<uintptr_t>(start);
  const size_t skip = (kHugePage - at % kHugePage) % kHugePage;
  if (skip > 0) munmap(start, skip);
  data_ += skip;
  mapped_ -= skip;
  madvise(data_, mapped_, MADV_HUGEPAGE);  // only advice: the arena works without huge pages
}

Arena::~Arena() {
  ASAN_UNPOISON_MEMORY_REGION(data_, mapped_);  // the next mapping may lie here
  munmap(data_, mapped_);
}

}  // namespace memserve
