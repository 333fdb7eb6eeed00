// The files of a memory tier in /dev/shm, data and index, and how an owner takes them: one at a time, by a lock that the
// kernel gives back when the owner ends, however it ends. The lock is a third file: the others are replaced now and then.
//
// Files are never shrunk or made anew in place, for readers map them: what does not fit is unlinked, and replaced.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pool/shared_arena.h"
#include "store/shared_table.h"

namespace memserve::store {

struct TierGeometry {
  uint64_t arena_bytes, block_bytes, unit_bytes;
  size_t buckets;
};

class TierFiles {
 public:
  // Throws std::system_error: another process owns them (EWOULDBLOCK), they are another user's, or there is no room.
  TierFiles(const std::string& name, const TierGeometry& geometry);
  ~TierFiles();
  TierFiles(const TierFiles&) = delete;
  TierFiles& operator=(const TierFiles&) = delete;

  static std::string path_of(const std::string& name, const std::string& what);

  SharedArena& arena() { return *arena_; }
  const SharedTable& table() const { return *table_; }
  bool adopted() const { return adopted_; }
  const std::string& data_path() const { return data_path_; }
  const std::string& index_path() const { return index_path_; }
  std::string client_path(uint64_t number) const;
  // Areas of an earlier owner's clients, when the files were adopted.
  const std::vector<std::string>& old_clients() const { return old_clients_; }
  void unlink();

 private:
  bool adopt(int index_fd, const TierGeometry& geometry);
  void create(const TierGeometry& geometry);
  void list_clients();

  std::string name_, data_path_, index_path_;
  int lock_fd_ = -1;
  uint8_t* index_ = nullptr;
  size_t index_bytes_ = 0;
  bool adopted_ = false;
  std::unique_ptr<SharedArena> arena_;
  std::unique_ptr<SharedTable> table_;
  std::vector<std::string> old_clients_;
};

}  // namespace memserve::store
