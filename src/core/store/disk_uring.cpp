// The engine over io_uring, by the kernel's own interface: the two rings are all of it that a queue needs.
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "store/disk_queue.h"

namespace memserve::store {

namespace {

class Uring : public DiskEngine {
 public:
  ~Uring() override {
    if (rings_ != MAP_FAILED) munmap(rings_, rings_bytes_);
    if (entries_ != MAP_FAILED) munmap(entries_, entries_bytes_);
    if (ring_ >= 0) close(ring_);
  }

  // False: no io_uring here.
  bool open(int fd, int event_fd, unsigned depth, const std::vector<DiskMemory>& memory) {
    fd_ = fd;
    io_uring_params params;
    std::memset(&params, 0, sizeof params);
    ring_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
    if (ring_ < 0 || !(params.features & IORING_FEAT_SINGLE_MMAP)) return false;
    rings_bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                            params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    rings_ = mmap(nullptr, rings_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, IORING_OFF_SQ_RING);
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    entries_ = mmap(nullptr, entries_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, IORING_OFF_SQES);
    if (rings_ == MAP_FAILED || entries_ == MAP_FAILED) return false;
    auto* const base = static_cast<uint8_t*>(rings_);
    sq_tail_ = reinterpret_cast<std::atomic<uint32_t>*>(base + params.sq_off.tail);
    sq_mask_ = *reinterpret_cast<uint32_t*>(base + params.sq_off.ring_mask);
    sq_array_ = reinterpret_cast<uint32_t*>(base + params.sq_off.array);
    cq_head_ = reinterpret_cast<std::atomic<uint32_t>*>(base + params.cq_off.head);
    cq_tail_ = reinterpret_cast<std::atomic<uint32_t>*>(base + params.cq_off.tail);
    cq_mask_ = *reinterpret_cast<uint32_t*>(base + params.cq_off.ring_mask);
    done_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
    if (syscall(__NR_io_uring_register, ring_, IORING_REGISTER_EVENTFD, &event_fd, 1) != 0) return false;
    std::vector<iovec> known;
    for (const DiskMemory& piece : memory) {
      for (size_t at = 0; at < piece.bytes; at += kRegisteredMax) {  // a buffer has at most 1 GiB
        known.push_back({piece.data + at, std::min(kRegisteredMax, piece.bytes - at)});
      }
    }
    // If the limit of locked memory is too small, the kernel looks buffers up at each operation.
    if (!known.empty() &&
        syscall(__NR_io_uring_register, ring_, IORING_REGISTER_BUFFERS, known.data(), known.size()) == 0) {
      registered_ = std::move(known);
    }
    return true;
  }

  void begin(uint64_t id, const DiskOp& op) override {
    const uint32_t tail = sq_tail_->load(std::memory_order_relaxed);
    const uint32_t slot = tail & sq_mask_;
    io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[slot];
    std::memset(&entry, 0, sizeof entry);
    entry.fd = fd_;
    entry.user_data = id;
    if (op.kind == DiskOp::Kind::sync) {
      entry.opcode = IORING_OP_FSYNC;
      entry.fsync_flags = IORING_FSYNC_DATASYNC;
    } else {
      const int buffer = buffer_of(op);
      const bool reads = op.kind == DiskOp::Kind::read;
      entry.opcode = buffer >= 0 ? (reads ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED)
                                 : (reads ? IORING_OP_READ : IORING_OP_WRITE);
      entry.buf_index = static_cast<uint16_t>(buffer >= 0 ? buffer : 0);
      entry.off = op.offset;
      entry.addr = reinterpret_cast<uint64_t>(op.data);
      entry.len = static_cast<uint32_t>(op.bytes);
    }
    sq_array_[slot] = slot;
    sq_tail_->store(tail + 1, std::memory_order_release);
    ++begun_;
  }

  void submit() override {
    while (begun_ > 0) {
      const long taken = syscall(__NR_io_uring_enter, ring_, begun_, 0, 0, nullptr, 0);
      if (taken > 0) {
        begun_ -= static_cast<unsigned>(taken);
      } else if (taken == 0 || (errno != EINTR && errno != EAGAIN && errno != EBUSY)) {
        return;  // the next call tries again
      }
    }
  }

  void finished(std::vector<std::pair<uint64_t, int64_t>>& into) override {
    if (begun_ > 0) submit();
    uint32_t head = cq_head_->load(std::memory_order_relaxed);
    while (head != cq_tail_->load(std::memory_order_acquire)) {
      const io_uring_cqe& done = done_[head & cq_mask_];
      into.emplace_back(done.user_data, done.res);
      cq_head_->store(++head, std::memory_order_release);
    }
  }

 private:
  static constexpr size_t kRegisteredMax = size_t{1} << 30;

  // The registered buffer that holds the whole operation; -1: none.
  int buffer_of(const DiskOp& op) const {
    for (size_t i = 0; i < registered_.size(); ++i) {
      const auto* const base = static_cast<const uint8_t*>(registered_[i].iov_base);
      if (op.data >= base && op.data + op.bytes <= base + registered_[i].iov_len) return static_cast<int>(i);
    }
    return -1;
  }

  int fd_ = -1, ring_ = -1;
  void* rings_ = MAP_FAILED;
  void* entries_ = MAP_FAILED;
  size_t rings_bytes_ = 0, entries_bytes_ = 0;
  std::atomic<uint32_t>*sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t *sq_array_ = nullptr, sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* done_ = nullptr;
  unsigned begun_ = 0;
  std::vector<iovec> registered_;
};

}  // namespace

std::unique_ptr<DiskEngine> make_uring(int fd, int event_fd, unsigned depth, const std::vector<DiskMemory>& memory) {
  auto ring = std::make_unique<Uring>();
  if (!ring->open(fd, event_fd, depth, memory)) return nullptr;
  return ring;
}

}  // namespace memserve::store
