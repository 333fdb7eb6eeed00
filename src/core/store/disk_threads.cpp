// The engine where io_uring is forbidden: a few threads, each with one pread or pwrite at a time.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "store/disk_queue.h"

namespace memserve::store {

namespace {

class Threads : public DiskEngine {
 public:
  Threads(int fd, int event_fd, unsigned count) : fd_(fd), event_fd_(event_fd) {
    for (unsigned i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Threads() override {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void begin(uint64_t id, const DiskOp& op) override {
    const std::lock_guard lock(mutex_);
    waiting_.emplace_back(id, op);
  }
  void submit() override { wake_.notify_all(); }
  void finished(std::vector<std::pair<uint64_t, int64_t>>& into) override {
    const std::lock_guard lock(mutex_);
    into.swap(finished_);
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const auto [id, op] = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      const int64_t result = perform(op);
      lock.lock();
      finished_.emplace_back(id, result);
      const uint64_t one = 1;
      [[maybe_unused]] const auto told = write(event_fd_, &one, sizeof one);
    }
  }

  int64_t perform(const DiskOp& op) const {
    ssize_t result = 0;
    const auto offset = static_cast<off_t>(op.offset);
    switch (op.kind) {
      case DiskOp::Kind::read:
        result = pread(fd_, op.data, op.bytes, offset);
        break;
      case DiskOp::Kind::write:
        result = pwrite(fd_, op.data, op.bytes, offset);
        break;
      case DiskOp::Kind::sync:
        result = fdatasync(fd_);
        break;
    }
    return result < 0 ? -errno : result;
  }

  int fd_, event_fd_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::pair<uint64_t, DiskOp>> waiting_;
  std::vector<std::pair<uint64_t, int64_t>> finished_;
  std::vector<std::thread> threads_;
  bool ending_ = false;
};

}  // namespace

std::unique_ptr<DiskEngine> make_threads(int fd, int event_fd, unsigned threads) {
  return std::make_unique<Threads>(fd, event_fd, threads);
}

}  // namespace memserve::store
