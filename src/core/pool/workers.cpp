#include "pool/workers.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace memserve {

namespace {

constexpr int kThreadsMax = 16;

// Threads that live as long as the process. One job at a time; every thread that joins claims units until none is left.
class Workers {
 public:
  // Calls `unit(i)` for each i in [0, units), on the caller and up to `helpers` others; returns when all are done.
  // While another caller's job has the helpers, the caller works alone: waiting for them would take longer.
  void run(size_t units, int helpers, const std::function<void(size_t)>& unit) {
    const std::unique_lock one_job(run_mutex_, std::try_to_lock);
    if (!one_job) {
      for (size_t i = 0; i < units; ++i) unit(i);
      return;
    }
    start(helpers);
    {
      const std::lock_guard lock(mutex_);
      unit_ = &unit;
      units_ = units;
      next_.store(0, std::memory_order_relaxed);
      seats_ = helpers;
      ++job_;
    }
    wake_.notify_all();
    work(unit, units);
    std::unique_lock lock(mutex_);
    seats_ = 0;  // helpers that have not joined by now are not needed
    done_.wait(lock, [this] { return working_ == 0; });
    unit_ = nullptr;
  }

 private:
  void start(int helpers) {
    while (static_cast<int>(threads_.size()) < helpers) {
      threads_.emplace_back([this] { loop(); });
      threads_.back().detach();
    }
  }

  void work(const std::function<void(size_t)>& unit, size_t units) {
    for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < units;) unit(i);
  }

  void loop() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return job_ != seen; });
      seen = job_;
      if (seats_ == 0) continue;
      --seats_;
      ++working_;
      const auto* unit = unit_;
      const size_t units = units_;
      lock.unlock();
      work(*unit, units);
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex run_mutex_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  const std::function<void(size_t)>* unit_ = nullptr;
  std::atomic<size_t> next_{0};
  size_t units_ = 0;
  uint64_t job_ = 0;
  int seats_ = 0;
  int working_ = 0;
};

// Never destroyed: its threads may sleep in it when the process ends. A forked child has none of them and starts new
// ones.
Workers& workers() {
  static std::mutex mutex;
  static Workers* current = nullptr;
  static pid_t owner = 0;
  const std::lock_guard lock(mutex);
  if (owner != getpid()) {
    current = new Workers;
    owner = getpid();
  }
  return *current;
}

}  // namespace

void run_units(size_t units, int threads, const std::function<void(size_t)>& unit) {
  threads = std::clamp(threads, 1, kThreadsMax);
  if (threads > 1 && units > 1) return workers().run(units, threads - 1, unit);
  for (size_t i = 0; i < units; ++i) unit(i);
}

}  // namespace memserve
