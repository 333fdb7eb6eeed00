#include "store/tier_reader.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "pool/copy_pages.h"
#include "pool/mapping.h"
#include "pool/shared_arena.h"
#include "pool/workers.h"

namespace memserve::store {

namespace {

constexpr size_t kUnitBytes = size_t{256} << 10;      // what a thread copies at once
constexpr size_t kParallelBytes = size_t{1} << 20;    // below this, waking a thread costs more than it saves
constexpr size_t kAtOnce = 256;                       // values that a copy pins together
constexpr size_t kAtOnceBytes = size_t{64} << 20;     // of them, where all are copied or none
constexpr int kTries = 64;

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

TierReader::Map::~Map() {
  if (start) munmap(start, bytes);
  if (fd >= 0) close(fd);
}

void TierReader::map(Map& map, const std::string& path, bool writable, size_t bytes_min) {
  map.fd = open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (map.fd < 0) fail(errno, path + " cannot be opened: the store is gone, or it runs as another user");
  struct stat status {};
  if (fstat(map.fd, &status) != 0 || !S_ISREG(status.st_mode) || static_cast<size_t>(status.st_size) < bytes_min) {
    fail(ESTALE, path + " is no file of a store");
  }
  map.bytes = static_cast<size_t>(status.st_size);
  map.start = map_aligned(map.fd, map.bytes, PROT_READ | (writable ? PROT_WRITE : 0));
}

TierReader::TierReader(const std::string& data_path, const std::string& index_path, const std::string& client_path) {
  map(index_map_, index_path, false, SharedTable::kHeadBytes);
  const auto& head = *reinterpret_cast<const TableHead*>(index_map_.start);
  if (head.magic != TableHead::kMagic || head.check != SharedTable::check_of(head) ||
      index_map_.bytes != SharedTable::file_bytes(head.buckets)) {
    fail(ESTALE, index_path + " is no index of a store");
  }
  table_.emplace(index_map_.start);
  map(data_map_, data_path, false, SharedArena::file_bytes(head.arena_bytes));
  uint64_t start[5];  // magic, nbytes, generation, id
  std::memcpy(start, data_map_.start, sizeof start);
  if (start[1] != head.arena_bytes || start[3] != head.arena_id[0] || start[4] != head.arena_id[1]) {
    fail(ESTALE, data_path + " does not belong to " + index_path);
  }
  data_ = data_map_.start + SharedArena::kHeaderBytes;
  data_bytes_ = head.arena_bytes;
  map(area_map_, client_path, true, sizeof(ClientArea));
  area_ = reinterpret_cast<ClientArea*>(area_map_.start);
  if (area_->magic != ClientArea::kMagic) fail(ESTALE, client_path + " is no client's area");
  if (flock(area_map_.fd, LOCK_EX | LOCK_NB) != 0) fail(errno, client_path + " has a reader already");
  bytes_max_ = area_->bytes_max;
  pinned_.assign(ClientArea::kPins, -1);
  for (uint32_t pin = ClientArea::kPins; pin > 0; --pin) free_pins_.push_back(pin - 1);
}

TierReader::~TierReader() {
  if (!area_ || getpid() != pid_) return;  // the pins are those of the process that forked
  for (auto& pin : area_->pins) pin.store(0, std::memory_order_release);
}

size_t TierReader::held() const {
  const std::lock_guard lock(mutex_);
  return pinned_.size() - free_pins_.size();
}

uint32_t TierReader::take_pin(uint32_t length) {
  const std::lock_guard lock(mutex_);
  if (free_pins_.empty() || (pinned_bytes_ > 0 && pinned_bytes_ + length > bytes_max_)) {
    fail(ENOBUFS, "this client holds " + std::to_string(pinned_.size() - free_pins_.size()) + " values of " +
                      std::to_string(pinned_bytes_) + " bytes: release some before the next");
  }
  const uint32_t pin = free_pins_.back();
  free_pins_.pop_back();
  pinned_[pin] = length;
  pinned_bytes_ += length;
  return pin;
}

bool TierReader::let_go(uint32_t pin) {
  const std::lock_guard lock(mutex_);
  if (pin >= pinned_.size() || pinned_[pin] < 0) return false;
  area_->pins[pin].store(0, std::memory_order_release);  // after every read of the value
  pinned_bytes_ -= static_cast<uint64_t>(pinned_[pin]);
  pinned_[pin] = -1;
  free_pins_.push_back(pin);
  return true;
}

std::optional<TierReader::Held> TierReader::hold(Hash128 key, std::string_view name) {
  for (int i = 0; i < kTries; ++i) {
    const auto seen = table_->look(key);
    if (!seen) return std::nullopt;
    at(Moment::seen);
    bool again = false;
    const auto held = try_hold(*seen, name, again);
    if (!again) return held;
  }
  return std::nullopt;
}

std::optional<TierReader::Held> TierReader::hold_if_room(Hash128 key, std::string_view name) {
  try {
    return hold(key, name);
  } catch (const std::system_error& error) {
    if (error.code().value() != ENOBUFS) throw;
    return std::nullopt;
  }
}

int64_t TierReader::length(Hash128 key, std::string_view name) {
  const auto held = hold_if_room(key, name);
  if (!held) return -1;
  let_go(held->pin);
  return held->length;
}

std::optional<TierReader::Held> TierReader::try_hold(const SharedTable::Seen& seen, std::string_view name,
                                                     bool& again) {
  constexpr uint8_t kReadable = Shown::kInMemory | Shown::kVerified;
  const Shown& shown = seen.shown;
  if ((shown.state & kReadable) != kReadable || shown.name_bytes != name.size()) return std::nullopt;
  const uint64_t bytes = shown.length + uint64_t{shown.name_bytes};
  if (bytes > data_bytes_ || shown.offset > data_bytes_ - bytes) return std::nullopt;
  const uint32_t pin = take_pin(shown.length);
  area_->pins[pin].store(shown.offset + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  at(Moment::pinned);
  again = !table_->unchanged(seen);
  const uint8_t* const data = data_ + shown.offset;
  const bool closed_now = closed();
  if (again || closed_now || std::memcmp(data + shown.length, name.data(), name.size()) != 0) {
    let_go(pin);
    if (closed_now) fail(ESTALE, "the store has dropped this client: say hello to it again");
    return std::nullopt;
  }
  const uint64_t at = area_->hits_written.fetch_add(1, std::memory_order_relaxed);
  area_->hits[at % ClientArea::kHits].store(shown.offset, std::memory_order_relaxed);
  return Held{data, shown.length, pin};
}

void TierReader::where(const Hash128* keys, size_t count, uint8_t* out) const {
  table_->states(keys, count, out);
  for (size_t i = 0; i < count; ++i) out[i] = out[i] == 0 ? 0 : out[i] & Shown::kInMemory ? 1 : 2;
}

size_t TierReader::prefix(const Hash128* keys, size_t count) const {
  constexpr size_t kStep = 128;
  uint8_t here[kStep];
  for (size_t from = 0; from < count; from += kStep) {
    const size_t some = std::min(kStep, count - from);
    table_->states(keys + from, some, here);
    const auto* const gap = static_cast<const uint8_t*>(std::memchr(here, 0, some));
    if (gap) return from + static_cast<size_t>(gap - here);
  }
  return count;
}

void TierReader::copy(std::span<Copy> copies, int threads) {
  for (size_t from = 0; from < copies.size(); from += kAtOnce) {
    copy_some(copies.subspan(from, std::min(kAtOnce, copies.size() - from)), threads);
  }
}

// Pins of one copy, and what is copied under them.
class TierReader::Copying {
 public:
  explicit Copying(TierReader& reader) : reader_(reader) {}
  ~Copying() { release(); }
  Copying(const Copying&) = delete;
  Copying& operator=(const Copying&) = delete;

  bool pins_any() const { return !pins_.empty(); }
  void add(const Held& held, const Copy& item) {
    pins_.push_back(held.pin);
    bytes_ += held.length;
    if (held.length > item.room) return;
    for (size_t at = 0; at < held.length; at += kUnitBytes) {
      pieces_.push_back({item.to + at, held.data + at, std::min(kUnitBytes, held.length - at)});
    }
  }
  uint64_t bytes() const { return bytes_; }
  // False: an area that was closed meanwhile has pinned nothing, so what was copied may be another value's.
  bool finish(int threads) {
    const auto unit = [&](size_t i) { copy_pages(pieces_[i].to, pieces_[i].from, pieces_[i].bytes); };
    run_units(pieces_.size(), bytes_ < kParallelBytes ? 1 : threads, unit);
    release();
    reader_.at(Moment::copied);
    std::atomic_thread_fence(std::memory_order_acquire);
    return !reader_.closed();
  }
  // Nothing is copied.
  void release() {
    for (const uint32_t pin : pins_) reader_.let_go(pin);
    pins_.clear();
    pieces_.clear();
    bytes_ = 0;
  }

 private:
  struct Piece {
    uint8_t* to;
    const uint8_t* from;
    size_t bytes;
  };
  TierReader& reader_;
  std::vector<Piece> pieces_;
  std::vector<uint32_t> pins_;
  uint64_t bytes_ = 0;
};

void TierReader::copy_some(std::span<Copy> copies, int threads) {
  Copying copying(*this);
  size_t first = 0;  // whose bytes are not certain as yet
  const auto certain = [&](size_t end) {
    if (!copying.finish(threads)) {
      for (; first < end; ++first) copies[first].length = -1;
    }
    first = end;
  };
  for (size_t i = 0; i < copies.size(); ++i) {
    Copy& item = copies[i];
    item.length = -1;
    std::optional<Held> held;
    try {
      held = hold(item.key, item.name);
    } catch (const std::system_error& error) {
      if (error.code().value() != ENOBUFS || !copying.pins_any()) throw;
      certain(i);  // gives its own pins back
      held = hold(item.key, item.name);
    }
    if (!held) continue;
    item.length = held->length;
    copying.add(*held, item);
  }
  certain(copies.size());
}

bool TierReader::copy_all(std::span<Copy> copies, int threads) {
  if (copies.size() > kAtOnce) return false;
  Copying copying(*this);
  for (Copy& item : copies) {
    const auto held = hold_if_room(item.key, item.name);
    if (!held) return false;
    item.length = held->length;
    copying.add(*held, item);
    if (held->length > item.room || copying.bytes() > kAtOnceBytes) return false;
  }
  return copying.finish(threads);
}

}  // namespace memserve::store
