#include "pool/shared_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "sanitize.h"

namespace memserve {

// What lies at the file's start. Only the owner writes it.
struct SharedHeader {
  uint64_t magic;
  uint64_t nbytes;
  std::atomic<uint64_t> generation;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "two processes share it");

namespace {

constexpr size_t kHeaderBytes = 4096;  // a page, so that blocks begin on one
constexpr size_t kHugePage = size_t{2} << 20;
constexpr uint64_t kMagic = 0x31414e4552414d53;  // "SMARENA1"
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// A descriptor that is closed unless it is kept.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int keep() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Maps the file at an address that suits huge pages: file offset and address agree modulo their size.
uint8_t* map_aligned(int fd, size_t bytes, int protection) {
  void* const room = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) fail(errno, "no address space for a shared arena");
  auto* const from = static_cast<uint8_t*>(room);
  const size_t skip = (kHugePage - reinterpret_cast<uintptr_t>(from) % kHugePage) % kHugePage;
  if (skip > 0) munmap(from, skip);
  munmap(from + skip + bytes, kHugePage - skip);
  void* const start = mmap(from + skip, bytes, protection, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0);
  if (start == MAP_FAILED) {
    const int error = errno;
    munmap(from + skip, bytes);
    fail(error, "a shared arena cannot be mapped");
  }
  return static_cast<uint8_t*>(start);
}

// Whole huge pages, so that the last blocks may lie on one too, unless the arena is smaller than that.
size_t file_bytes(size_t arena_bytes) {
  const size_t page = arena_bytes < kHugePage ? kHeaderBytes : kHugePage;
  return (kHeaderBytes + arena_bytes + page - 1) / page * page;
}

const SharedHeader* header(const uint8_t* start) { return reinterpret_cast<const SharedHeader*>(start); }

}  // namespace

SharedArena::SharedArena(size_t bytes) : nbytes_(bytes), mapped_(file_bytes(bytes)) {
  Descriptor file(memfd_create("memserve-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) fail(errno, "no shared memory (memfd_create)");
  if (ftruncate(file.get(), static_cast<off_t>(mapped_)) != 0) fail(errno, "a shared arena cannot have this size");
  start_ = map_aligned(file.get(), mapped_, PROT_READ | PROT_WRITE);
  madvise(start_, mapped_, MADV_HUGEPAGE);  // advice: most machines have it off for shared memory
  auto* const head = new (start_) SharedHeader{kMagic, bytes, {}};
  head->generation.store(0);
  const int size_seals = F_SEAL_SHRINK | F_SEAL_GROW;
  if (fcntl(file.get(), F_ADD_SEALS, size_seals | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
    fcntl(file.get(), F_ADD_SEALS, size_seals | F_SEAL_SEAL);  // an older kernel
  }
  fd_ = file.keep();
}

SharedArena::~SharedArena() {
  ASAN_UNPOISON_MEMORY_REGION(start_, mapped_);
  munmap(start_, mapped_);
  close(fd_);
}

uint8_t* SharedArena::data() const { return start_ + kHeaderBytes; }
uint64_t SharedArena::generation() const { return header(start_)->generation.load(std::memory_order_acquire); }
void SharedArena::set_generation(uint64_t generation) {
  reinterpret_cast<SharedHeader*>(start_)->generation.store(generation, std::memory_order_release);
}

size_t SharedArena::collapse(size_t offset, size_t bytes) {
  const size_t first = (kHeaderBytes + offset) / kHugePage * kHugePage;
  const size_t end = kHeaderBytes + std::min(offset + bytes, nbytes_);
  size_t collapsed = 0;
  if (bytes == 0) return 0;
  for (size_t at = first; at < end && at + kHugePage <= mapped_; at += kHugePage) {
    static_cast<void>(*static_cast<volatile uint8_t*>(start_ + at));  // a stretch without a page is not collapsed
    if (madvise(start_ + at, kHugePage, MADV_COLLAPSE) == 0) collapsed += kHugePage;
  }
  return collapsed;
}

PeerArena::PeerArena(pid_t pid, int fd, size_t bytes) : nbytes_(bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const std::string peer = "arena of process " + std::to_string(pid) + " (descriptor " + std::to_string(fd) + ")";
  // Not blocking: the number may belong to a pipe or terminal of some other program by now.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (file.get() < 0) fail(errno, peer + " cannot be opened");
  struct stat status {};
  if (fstat(file.get(), &status) != 0) fail(errno, peer + " cannot be examined");
  uint64_t start[2] = {};
  if (!S_ISREG(status.st_mode) || pread(file.get(), start, sizeof start, 0) != sizeof start || start[0] != kMagic) {
    fail(ESTALE, peer + " is no longer there: something else has its number");
  }
  if (start[1] != bytes || static_cast<size_t>(status.st_size) != file_bytes(bytes)) {
    fail(ESTALE, peer + " has " + std::to_string(start[1]) + " bytes, not " + std::to_string(bytes));
  }
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) fail(EACCES, peer + " could shrink under its readers");
  start_ = map_aligned(file.get(), file_bytes(bytes), PROT_READ);
}

PeerArena::~PeerArena() { munmap(const_cast<uint8_t*>(start_), file_bytes(nbytes_)); }

void PeerArena::forget() const { madvise(const_cast<uint8_t*>(start_), file_bytes(nbytes_), MADV_DONTNEED); }

const uint8_t* PeerArena::data() const { return start_ + kHeaderBytes; }
uint64_t PeerArena::generation() const { return header(start_)->generation.load(std::memory_order_acquire); }

}  // namespace memserve
