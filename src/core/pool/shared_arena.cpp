#include "pool/shared_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "pool/mapping.h"
#include "sanitize.h"

namespace memserve {

// The start of the file. Only the owner writes it.
struct SharedHeader {
  uint64_t magic;
  uint64_t nbytes;
  std::atomic<uint64_t> generation;
  uint64_t id[2];  // of a named file
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "two processes share the generation");

namespace {

constexpr size_t kHeaderBytes = SharedArena::kHeaderBytes;
constexpr uint64_t kMagic = 0x31414e4552414d53;  // "SMARENA1"
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// A descriptor, closed at the end unless it is kept.
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

const SharedHeader* header(const uint8_t* start) { return reinterpret_cast<const SharedHeader*>(start); }

size_t file_bytes(size_t arena_bytes) { return SharedArena::file_bytes(arena_bytes); }

// Whether a file keeps its size: a sealed memfd by the kernel's word, and a named file in memory by its owner's, which
// is ours: no process but this user's opens it, and SharedArena replaces files, it never shrinks one.
bool keeps_its_size(int fd, const struct stat& status) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0) return true;
  constexpr long kTmpfs = 0x01021994;
  struct statfs system {};
  return fstatfs(fd, &system) == 0 && system.f_type == kTmpfs && status.st_nlink <= 1 && status.st_uid == geteuid() &&
         (status.st_mode & 077) == 0 && seals == F_SEAL_SEAL;
}

}  // namespace

// Whole huge pages, so that the last blocks may lie on one too, unless the arena is smaller than that.
size_t SharedArena::file_bytes(size_t arena_bytes) {
  const size_t page = arena_bytes < kHugePage ? kHeaderBytes : kHugePage;
  return (kHeaderBytes + arena_bytes + page - 1) / page * page;
}

SharedArena::SharedArena(int fd, size_t bytes, const uint64_t id[2], bool fresh)
    : nbytes_(bytes), mapped_(file_bytes(bytes)) {
  struct stat status {};
  if (fstat(fd, &status) != 0) fail(errno, "a shared arena's file cannot be examined");
  if (static_cast<size_t>(status.st_size) != mapped_) fail(EINVAL, "a shared arena's file has another size");
  start_ = map_aligned(fd, mapped_, PROT_READ | PROT_WRITE);
  madvise(start_, mapped_, MADV_HUGEPAGE);
  if (fresh) {
    auto* const head = new (start_) SharedHeader{kMagic, bytes, {}, {id[0], id[1]}};
    head->generation.store(0);
  } else if (const auto* head = header(start_);
             head->magic != kMagic || head->nbytes != bytes || head->id[0] != id[0] || head->id[1] != id[1]) {
    munmap(start_, mapped_);
    fail(ESTALE, "a shared arena's file is another arena's");
  }
  fd_ = fd;
}

SharedArena::SharedArena(size_t bytes, bool sealed) : nbytes_(bytes), mapped_(file_bytes(bytes)) {
  Descriptor file(memfd_create("memserve-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) fail(errno, "no shared memory (memfd_create)");
  if (ftruncate(file.get(), static_cast<off_t>(mapped_)) != 0) fail(errno, "a shared arena cannot have this size");
  start_ = map_aligned(file.get(), mapped_, PROT_READ | PROT_WRITE);
  madvise(start_, mapped_, MADV_HUGEPAGE);  // advice: most machines have it off for shared memory
  auto* const head = new (start_) SharedHeader{kMagic, bytes, {}, {}};
  head->generation.store(0);
  fd_ = file.keep();
  fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  if (sealed) seal();
}

void SharedArena::seal() {
  if (fcntl(fd_, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
    fcntl(fd_, F_ADD_SEALS, F_SEAL_SEAL);  // an older kernel
  }
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
  if (bytes == 0) return 0;
  return collapse_pages(start_, kHeaderBytes + offset, kHeaderBytes + std::min(offset + bytes, nbytes_), mapped_);
}

PeerArena::PeerArena(pid_t pid, int fd, size_t bytes) : nbytes_(bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const std::string peer = "arena of process " + std::to_string(pid) + " (descriptor " + std::to_string(fd) + ")";
  // Not blocking: by now the number may belong to a pipe or terminal of another program.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (file.get() < 0) fail(errno, peer + " cannot be opened");
  struct stat status {};
  if (fstat(file.get(), &status) != 0) fail(errno, peer + " cannot be examined");
  uint64_t start[2] = {};
  if (!S_ISREG(status.st_mode) || pread(file.get(), start, sizeof start, 0) != sizeof start || start[0] != kMagic) {
    fail(ESTALE, peer + " no longer exists: its number was reused");
  }
  if (start[1] != bytes || static_cast<size_t>(status.st_size) != file_bytes(bytes)) {
    fail(ESTALE, peer + " has " + std::to_string(start[1]) + " bytes, not " + std::to_string(bytes));
  }
  if (!keeps_its_size(file.get(), status)) fail(EACCES, peer + " could shrink under its readers");
  start_ = map_aligned(file.get(), file_bytes(bytes), PROT_READ);
}

PeerArena::~PeerArena() { munmap(const_cast<uint8_t*>(start_), file_bytes(nbytes_)); }

void PeerArena::forget() const { madvise(const_cast<uint8_t*>(start_), file_bytes(nbytes_), MADV_DONTNEED); }

const uint8_t* PeerArena::data() const { return start_ + kHeaderBytes; }
uint64_t PeerArena::generation() const { return header(start_)->generation.load(std::memory_order_acquire); }

}  // namespace memserve
