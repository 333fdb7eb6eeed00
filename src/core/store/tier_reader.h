// A client's side of a memory tier: values in place, found and pinned without a word to the owner.
//
//   look at the entry -> write a pin -> look at its version again: unchanged, so the owner sees the pin before it gives
//   the extent to another value (client_area.h)
#pragma once
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/client_area.h"
#include "store/shared_table.h"

namespace memserve::store {

// Several threads may use it.
class TierReader {
 public:
  struct Held {
    const uint8_t* data;
    uint32_t length;
    uint32_t pin;
  };
  struct Copy {
    Hash128 key;
    std::string_view name;
    uint8_t* to;
    size_t room;
    int64_t length;  // comes back: -1 absent
  };
  // Moments of a `hold` or `copy` at which the owner may do anything: the entry was found; the pin is written, and the
  // version not looked at again; values were copied, and it is not known yet whether they count.
  enum class Moment : uint8_t { seen, pinned, copied };

  // Throws std::system_error: files that are not there, are no tier's, or an area that another reader has.
  TierReader(const std::string& data_path, const std::string& index_path, const std::string& client_path);
  ~TierReader();
  TierReader(const TierReader&) = delete;
  TierReader& operator=(const TierReader&) = delete;

  // Nothing: not in memory, not verified as yet, or another key's value. Throws std::system_error: the owner has closed
  // this area (ESTALE); too much is held already (ENOBUFS).
  std::optional<Held> hold(Hash128 key, std::string_view name);
  // False: that pin holds nothing.
  bool let_go(uint32_t pin);
  // Bytes of a value that `hold` would find; -1: it would find none, or too much is held. Throws as `hold` does.
  int64_t length(Hash128 key, std::string_view name);
  // 0 absent, 1 in memory, 2 on disk alone.
  void where(const Hash128* keys, size_t count, uint8_t* out) const;
  size_t prefix(const Hash128* keys, size_t count) const;
  // Copies those values that have room; `length` says what each has.
  void copy(std::span<Copy> copies, int threads);
  // Copies all of them in one go, each found once. False, and nothing was written: one is not in memory, or has no room,
  // or they are too much to be held at once. False as well, and anything was written: the owner closed this area just
  // now. Throws as `hold` does, but for ENOBUFS.
  bool copy_all(std::span<Copy> copies, int threads);
  // `watcher` is called at each of these moments from now on; empty: none is. For tests, which change the table then.
  void watch(std::function<void(Moment)> watcher) { watcher_ = std::move(watcher); }
  bool closed() const { return area_->closed.load(std::memory_order_acquire) != 0; }
  size_t held() const;
  size_t values_max() const { return ClientArea::kPins; }
  uint64_t bytes_max() const { return bytes_max_; }

 private:
  struct Map {
    uint8_t* start = nullptr;
    size_t bytes = 0;
    int fd = -1;
    ~Map();
  };
  class Copying;
  static void map(Map& map, const std::string& path, bool writable, size_t bytes_min);
  std::optional<Held> try_hold(const SharedTable::Seen& seen, std::string_view name, bool& again);
  // As `hold`; nothing as well when too much is held.
  std::optional<Held> hold_if_room(Hash128 key, std::string_view name);
  uint32_t take_pin(uint32_t length);
  void at(Moment moment) const {
    if (watcher_) watcher_(moment);
  }
  void copy_some(std::span<Copy> copies, int threads);

  Map data_map_, index_map_, area_map_;
  std::optional<SharedTable> table_;
  ClientArea* area_ = nullptr;
  const pid_t pid_ = getpid();
  const uint8_t* data_ = nullptr;
  uint64_t data_bytes_ = 0;
  mutable std::mutex mutex_;
  std::vector<uint32_t> free_pins_;
  std::vector<int64_t> pinned_;  // bytes by pin, -1: free
  uint64_t pinned_bytes_ = 0, bytes_max_ = 0;
  std::function<void(Moment)> watcher_;
};

}  // namespace memserve::store
