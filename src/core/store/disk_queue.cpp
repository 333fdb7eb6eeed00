#include "store/disk_queue.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "store/format.h"

namespace memserve::store {

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

constexpr unsigned kThreads = 8;

}  // namespace

DiskQueue::DiskQueue(const std::string& path, uint64_t bytes, unsigned depth, bool direct, const std::string& engine,
                     const std::vector<DiskMemory>& memory)
    : depth_(depth) {
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC;
  if (direct) fd_ = open(path.c_str(), flags | O_DIRECT, 0600);
  direct_ = fd_ >= 0;
  if (fd_ < 0) fd_ = open(path.c_str(), flags, 0600);  // a file system without O_DIRECT, such as tmpfs
  if (fd_ < 0) fail(path);
  struct stat status;
  const bool known = fstat(fd_, &status) == 0;
  if (bytes > 0 && known && S_ISREG(status.st_mode)) {
    // Allocated now: later a full disk could fail any write.
    const int error = posix_fallocate(fd_, 0, static_cast<off_t>(bytes));
    if (error != 0 || ftruncate(fd_, static_cast<off_t>(bytes)) != 0) {
      if (error != 0) errno = error;
      const int kept = errno;
      close(fd_);
      errno = kept;
      fail(path);
    }
  }
  event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_fd_ < 0) {
    close(fd_);
    fail("eventfd");
  }
  if (engine != "threads") engine_ = make_uring(fd_, event_fd_, depth, memory);
  engine_name_ = engine_ ? "io_uring" : "threads";
  if (!engine_ && engine == "io_uring") {
    close(fd_);
    close(event_fd_);
    fail("io_uring");
  }
  if (!engine_) engine_ = make_threads(fd_, event_fd_, std::min(depth, kThreads));
}

DiskQueue::~DiskQueue() {
  drain();
  engine_.reset();
  close(event_fd_);
  close(fd_);
}

// Drops waiting operations; those under way use the caller's memory, so they are waited for.
void DiskQueue::drain() {
  reads_.clear();
  writes_.clear();
  while (!under_way_.empty()) {
    pollfd ready{event_fd_, POLLIN, 0};
    poll(&ready, 1, 100);
    take();
  }
}

void DiskQueue::submit(const DiskOp& op) {
  (op.kind == DiskOp::Kind::read ? reads_ : writes_).push_back(op);
  pump();
}

void DiskQueue::submit_copy(uint64_t tag, uint64_t offset, const uint8_t* data, size_t bytes) {
  auto* const copy = static_cast<uint8_t*>(std::aligned_alloc(kPage, pages_of(bytes) * kPage));
  if (!copy) throw std::bad_alloc();
  std::memcpy(copy, data, bytes);
  copies_.emplace(tag, std::unique_ptr<uint8_t[], void (*)(void*)>(copy, std::free));
  submit({tag, DiskOp::Kind::write, offset, copy, bytes});
}

// Reads first: a request waits for them. Writes take at most half of the depth while reads wait or are under way.
void DiskQueue::pump() {
  bool begun = false;
  while (under_way_.size() < depth_) {
    const bool reading = !reads_.empty() || under_way_.size() > writes_under_way_;
    std::deque<DiskOp>* from = nullptr;
    if (!writes_.empty() && (!reading || writes_under_way_ < depth_ / 4 + 1)) from = &writes_;
    if (!reads_.empty()) from = &reads_;
    if (!from) break;
    const DiskOp op = from->front();
    from->pop_front();
    const uint64_t id = next_++;
    under_way_.emplace(id, op);
    writes_under_way_ += op.kind != DiskOp::Kind::read;
    engine_->begin(id, op);
    begun = true;
  }
  if (begun) engine_->submit();
}

std::vector<DiskDone> DiskQueue::take() {
  uint64_t count;
  while (read(event_fd_, &count, sizeof count) > 0) {
  }
  std::vector<std::pair<uint64_t, int64_t>> finished;
  engine_->finished(finished);
  for (const auto& [id, result] : finished) {
    const auto found = under_way_.find(id);
    DiskOp& op = found->second;
    if (result > 0 && static_cast<size_t>(result) < op.bytes) {
      // Only a part was done: submit the rest.
      op.offset += static_cast<uint64_t>(result);
      op.data += result;
      op.bytes -= static_cast<size_t>(result);
      engine_->begin(id, op);
      engine_->submit();
      continue;
    }
    if (result == -EINTR || result == -EAGAIN) {
      engine_->begin(id, op);
      engine_->submit();
      continue;
    }
    const bool short_of = op.kind != DiskOp::Kind::sync && result == 0 && op.bytes > 0;  // behind the file's end
    done_.push_back({op.tag, result < 0 ? static_cast<int>(-result) : short_of ? EIO : 0});
    writes_under_way_ -= op.kind != DiskOp::Kind::read;
    if (op.kind == DiskOp::Kind::write) copies_.erase(op.tag);
    under_way_.erase(found);
  }
  pump();
  return std::exchange(done_, {});
}

}  // namespace memserve::store
