// Arenas that other processes of the host can read: one writer, any number of read-only maps.
//
//   file:  | header: magic, nbytes, generation | block bytes ...                 |
//          0                                   4096                              4096 + nbytes
//
// The owner's file is a memfd: it has no name, and lives as long as a process maps it. A peer opens it through
// /proc/<pid>/fd/<fd>, so it needs the same user (or CAP_SYS_PTRACE) and the same /proc, and no descriptor passing.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace memserve {

struct SharedHeader;

// The owner's side: writable memory, zeroed, touched lazily.
class SharedArena {
 public:
  // Throws std::system_error. The file is sealed: it never changes its size, and where the kernel can (5.1 and later)
  // no other process ever gets a writable map of it.
  explicit SharedArena(size_t bytes);
  ~SharedArena();
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;

  int fd() const { return fd_; }
  uint8_t* data() const;
  size_t nbytes() const { return nbytes_; }
  uint64_t generation() const;
  void set_generation(uint64_t generation);

  // Puts the huge-page stretches that [offset, offset + bytes) touches on huge pages, and commits their memory. Most
  // machines give shared memory none of their own accord, but do on demand (MADV_COLLAPSE, Linux 6.1). May take a
  // millisecond a stretch; others may read and write meanwhile. Returns how many bytes lie on huge pages now.
  size_t collapse(size_t offset, size_t bytes);

 private:
  int fd_ = -1;
  size_t nbytes_ = 0;
  size_t mapped_ = 0;
  uint8_t* start_ = nullptr;  // the header
};

// A peer's side: a read-only map, valid as long as this object lives, whatever becomes of the owner.
class PeerArena {
 public:
  // Throws std::system_error when the owner is gone, forbids it, or when that descriptor is no arena of `bytes`.
  PeerArena(pid_t pid, int fd, size_t bytes);
  ~PeerArena();
  PeerArena(const PeerArena&) = delete;
  PeerArena& operator=(const PeerArena&) = delete;

  const uint8_t* data() const;
  size_t nbytes() const { return nbytes_; }
  uint64_t generation() const;  // as the owner has it now

  // Lets go of the pages that were read: they count as resident here no longer, and are the owner's as before. Others
  // may read meanwhile; what is read again is found again.
  void forget() const;

 private:
  size_t nbytes_ = 0;
  const uint8_t* start_ = nullptr;
};

}  // namespace memserve
