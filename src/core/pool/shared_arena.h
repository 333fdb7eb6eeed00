// Arenas that other processes of the host can read: one writer, any number of read-only maps.
//
//   file:  | header: magic, nbytes, generation | block bytes ...                 |
//          0                                   4096                              4096 + nbytes
//
// The owner's file is a memfd: it has no name, and lives as long as a process maps it. A store's has a name in /dev/shm
// instead, and outlives its owner. A peer opens either through /proc/<pid>/fd/<fd>, so it needs the same user (or
// CAP_SYS_PTRACE) and the same /proc, and no descriptor passing.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace memserve {

struct SharedHeader;

// The owner's side: writable memory, zeroed, touched lazily.
class SharedArena {
 public:
  // Throws std::system_error. The file is sealed: its size never changes, and on kernels from 5.1 on
  // no other process can map it writable from then on: at once, or when the owner's workers have (`seal`).
  explicit SharedArena(size_t bytes, bool sealed = true);
  // A named file of `file_bytes(bytes)` in memory, whose descriptor it closes at the end. `fresh`: it is all zeros, else
  // it was an arena of this size and `id` before, and keeps its bytes and its generation. On a throw `fd` is the caller's.
  SharedArena(int fd, size_t bytes, const uint64_t id[2], bool fresh);
  ~SharedArena();
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;

  static constexpr size_t kHeaderBytes = 4096;  // a page, so that blocks begin on one
  static size_t file_bytes(size_t arena_bytes);
  int fd() const { return fd_; }
  uint8_t* data() const;
  size_t nbytes() const { return nbytes_; }
  uint64_t generation() const;
  void set_generation(uint64_t generation);
  void seal();

  // Puts the huge-page stretches that [offset, offset + bytes) touches on huge pages, and commits their memory. Most
  // machines use no huge pages for shared memory unless asked (MADV_COLLAPSE, Linux 6.1). May take a millisecond per
  // huge page; others may read and write meanwhile. Returns how many bytes now lie on huge pages.
  size_t collapse(size_t offset, size_t bytes);

 private:
  int fd_ = -1;
  size_t nbytes_ = 0;
  size_t mapped_ = 0;
  uint8_t* start_ = nullptr;  // the header
};

// A peer's side: a read-only map, valid as long as this object lives, even if the owner ends.
class PeerArena {
 public:
  // Throws std::system_error if the owner is gone or forbids it, or if the descriptor is no arena of `bytes`.
  PeerArena(pid_t pid, int fd, size_t bytes);
  ~PeerArena();
  PeerArena(const PeerArena&) = delete;
  PeerArena& operator=(const PeerArena&) = delete;

  const uint8_t* data() const;
  size_t nbytes() const { return nbytes_; }
  uint64_t generation() const;  // as the owner has it now

  // Unmaps the pages that were read: they no longer count as resident here, and stay the owner's. Others may read
  // meanwhile; pages that are read again are mapped again.
  void forget() const;

 private:
  size_t nbytes_ = 0;
  const uint8_t* start_ = nullptr;
};

}  // namespace memserve
