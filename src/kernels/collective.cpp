#include "collective.h"

#include <sched.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstring>

namespace memserve {

// Each rank's number lies on a cache line of its own: the others read it in a loop.
struct Collective::Control {
  struct alignas(64) Arrived {
    std::atomic<uint32_t> number;    // of the last operation that this rank has arrived at
    std::atomic<uint32_t> sleepers;  // ranks that sleep until it changes
  };
  alignas(64) std::atomic<uint32_t> aborted;
  Arrived arrived[kRanksMax];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share the numbers");

namespace {

constexpr int kSpins = 2048;                      // some 25 us: about as long as ranks differ in a layer
constexpr int kYields = 200;                      // then others may run; a sleep costs more than most waits
constexpr int64_t kSleepNs = 10 * 1000 * 1000;    // then sleep, and look now and then whether the collective is aborted

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  timespec most{0, kSleepNs};
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
#else
  most.tv_nsec = 50'000;
  if (word.load(std::memory_order_acquire) == value) nanosleep(&most, nullptr);
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

bool reached(uint32_t number, uint32_t wanted) { return int32_t(number - wanted) >= 0; }

struct Bf16 {
  uint16_t bits;
};

float wide(float x) { return x; }
float wide(_Float16 x) { return float(x); }
float wide(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

void narrow(float x, float& out) { out = x; }
void narrow(float x, _Float16& out) { out = _Float16(x); }
void narrow(float x, Bf16& out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = is_nan ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
void add_up(const std::vector<const uint8_t*>& parts, uint8_t* out, size_t count) {
  constexpr size_t kStep = 512;
  float sum[kStep];
  for (size_t at = 0; at < count; at += kStep) {
    const size_t n = std::min(kStep, count - at);
    const T* first = reinterpret_cast<const T*>(parts[0]) + at;
    for (size_t i = 0; i < n; ++i) sum[i] = wide(first[i]);
    for (size_t r = 1; r < parts.size(); ++r) {
      const T* part = reinterpret_cast<const T*>(parts[r]) + at;
      for (size_t i = 0; i < n; ++i) sum[i] += wide(part[i]);
    }
    T* to = reinterpret_cast<T*>(out) + at;
    for (size_t i = 0; i < n; ++i) narrow(sum[i], to[i]);
  }
}

}  // namespace

void add_to(const void* x, void* y, ptrdiff_t at, float value, Dtype dtype) {
  const auto add = [&](auto* from, auto* to) { narrow(wide(from[at]) + value, to[at]); };
  if (dtype == Dtype::float32) add(static_cast<const float*>(x), static_cast<float*>(y));
  else if (dtype == Dtype::bfloat16) add(static_cast<const Bf16*>(x), static_cast<Bf16*>(y));
  else add(static_cast<const _Float16*>(x), static_cast<_Float16*>(y));
}

size_t Collective::region_bytes(int size, size_t slot_bytes) { return sizeof(Control) + 2 * size_t(size) * slot_bytes; }

Collective::Collective(void* region, int rank, int size, size_t slot_bytes, int64_t timeout_ns)
    : control_(static_cast<Control*>(region)), slots_(static_cast<uint8_t*>(region) + sizeof(Control)), rank_(rank),
      size_(size), slot_bytes_(slot_bytes), timeout_ns_(timeout_ns) {}

uint8_t* Collective::slot(int rank) const { return slots_ + (size_t(number_ % 2) * size_ + rank) * slot_bytes_; }

void Collective::abort() {
  control_->aborted.store(1, std::memory_order_release);
  for (int rank = 0; rank < size_; ++rank) wake(control_->arrived[rank].number);
}

bool Collective::aborted() const { return control_->aborted.load(std::memory_order_acquire) != 0; }

Collective::Ending Collective::wait_for(int rank, uint32_t number) {
  Control::Arrived& other = control_->arrived[rank];
  for (int i = 0; i < kSpins; ++i) {
    if (reached(other.number.load(std::memory_order_acquire), number)) return Ending::good;
    pause_briefly();
  }
  const int64_t began = now_ns();
  Ending ending = Ending::good;
  for (int turn = 0;; ++turn) {
    const uint32_t seen = other.number.load(std::memory_order_acquire);
    if (reached(seen, number)) break;
    if (aborted()) { ending = Ending::aborted; break; }
    if (now_ns() - began > timeout_ns_) { ending = Ending::late; break; }
    if (turn < kYields) {
      sched_yield();
      continue;
    }
    other.sleepers.fetch_add(1);
    sleep_while(other.number, seen);
    other.sleepers.fetch_sub(1);
  }
  waited_ns_ += now_ns() - began;
  return ending;
}

// The others have read what this rank wrote two operations ago, if they have arrived at the one before this.
Collective::Ending Collective::begin() {
  if (aborted()) return Ending::aborted;
  ++number_;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    if (const Ending ending = wait_for(rank, number_ - 1); ending != Ending::good) return ending;
  }
  return Ending::good;
}

void Collective::say_arrived() {
  Control::Arrived& mine = control_->arrived[rank_];
  mine.number.store(number_, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) > 0) wake(mine.number);
}

Collective::Ending Collective::arrive() {
  say_arrived();
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    if (const Ending ending = wait_for(rank, number_); ending != Ending::good) return ending;
  }
  return Ending::good;
}

Collective::Ending Collective::all_reduce(const void* x, void* out, size_t count, Dtype dtype) {
  const size_t item = dtype == Dtype::float32 ? 4 : 2, most = slot_bytes_ / item;
  std::vector<const uint8_t*> parts(size_);
  for (size_t at = 0; at < count; at += most) {
    const size_t n = std::min(most, count - at);
    if (const Ending ending = begin(); ending != Ending::good) return ending;
    std::memcpy(slot(rank_), static_cast<const uint8_t*>(x) + at * item, n * item);
    if (const Ending ending = arrive(); ending != Ending::good) return ending;
    for (int rank = 0; rank < size_; ++rank) parts[rank] = slot(rank);
    uint8_t* to = static_cast<uint8_t*>(out) + at * item;
    if (dtype == Dtype::float32) add_up<float>(parts, to, n);
    else if (dtype == Dtype::bfloat16) add_up<Bf16>(parts, to, n);
    else add_up<_Float16>(parts, to, n);
  }
  return Ending::good;
}

Collective::Ending Collective::gather(const void* x, size_t rows, const std::vector<size_t>& widths, void* out) {
  size_t widest = 1, whole = 0;
  for (const size_t width : widths) widest = std::max(widest, width), whole += width;
  const size_t most = std::max<size_t>(1, slot_bytes_ / widest), mine = widths[rank_];
  for (size_t at = 0; at < rows; at += most) {
    const size_t n = std::min(most, rows - at);
    if (const Ending ending = begin(); ending != Ending::good) return ending;
    if (rank_ != 0) std::memcpy(slot(rank_), static_cast<const uint8_t*>(x) + at * mine, n * mine);
    if (rank_ != 0) {
      say_arrived();
      continue;  // rank 0 has read it when it arrives at the next operation
    }
    if (const Ending ending = arrive(); ending != Ending::good) return ending;
    for (size_t row = 0; row < n; ++row) {
      uint8_t* to = static_cast<uint8_t*>(out) + (at + row) * whole;
      for (int rank = 0; rank < size_; ++rank) {
        const uint8_t* from = rank == 0 ? static_cast<const uint8_t*>(x) + (at + row) * mine
                                        : slot(rank) + row * widths[rank];
        std::memcpy(to, from, widths[rank]);
        to += widths[rank];
      }
    }
  }
  return Ending::good;
}

Collective::Ending Collective::broadcast(void* data, size_t bytes, int root) {
  for (size_t at = 0; at < bytes; at += slot_bytes_) {
    const size_t n = std::min(slot_bytes_, bytes - at);
    if (const Ending ending = begin(); ending != Ending::good) return ending;
    if (rank_ == root) std::memcpy(slot(root), static_cast<uint8_t*>(data) + at, n);
    say_arrived();
    if (rank_ == root) continue;
    if (const Ending ending = wait_for(root, number_); ending != Ending::good) return ending;
    std::memcpy(static_cast<uint8_t*>(data) + at, slot(root), n);
  }
  return Ending::good;
}

Collective::Ending Collective::meet() {
  if (const Ending ending = begin(); ending != Ending::good) return ending;
  return arrive();
}

Collective::Ending Collective::announce() {
  const Ending ending = begin();
  if (ending == Ending::good) say_arrived();
  return ending;
}

}  // namespace memserve
