// Reads and writes of one file or raw device, many at once, past the page cache where the file system can (O_DIRECT).
//
//   submit -> waiting (reads first) -> under way, at most `depth` -> done -> take
//
// Two engines behind one interface: io_uring, and a few threads with pread and pwrite where io_uring is forbidden, as
// in many containers. One thread uses a queue; `fd()` becomes readable when something is done.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace memserve::store {

struct DiskOp {
  enum class Kind : uint8_t { read, write, sync };
  uint64_t tag = 0;  // chosen by the caller, returned with the result
  Kind kind = Kind::read;
  uint64_t offset = 0;
  uint8_t* data = nullptr;
  size_t bytes = 0;
};

struct DiskDone {
  uint64_t tag;
  int error;  // errno; 0 = every byte was read or written
};

// Memory that does not move: io_uring registers its pages beforehand.
struct DiskMemory {
  uint8_t* data;
  size_t bytes;
};

class DiskEngine {
 public:
  virtual ~DiskEngine() = default;
  virtual void begin(uint64_t id, const DiskOp& op) = 0;
  virtual void submit() = 0;  // submits the operations begun
  // `(id, result)`: bytes, or -errno.
  virtual void finished(std::vector<std::pair<uint64_t, int64_t>>& into) = 0;
};

// Null: this kernel or container does not allow io_uring. `fixed`: whether the memory could be registered.
std::unique_ptr<DiskEngine> make_uring(int fd, int event_fd, unsigned depth, const std::vector<DiskMemory>& memory);
std::unique_ptr<DiskEngine> make_threads(int fd, int event_fd, unsigned threads);

class DiskQueue {
 public:
  // Opens or creates `path`; a file gets `bytes` at once (0: keep its size). `engine`: "io_uring", "threads", or "" for
  // the better one that works. Throws std::system_error.
  DiskQueue(const std::string& path, uint64_t bytes, unsigned depth, bool direct, const std::string& engine,
            const std::vector<DiskMemory>& memory);
  ~DiskQueue();  // waits for what is under way
  DiskQueue(const DiskQueue&) = delete;
  DiskQueue& operator=(const DiskQueue&) = delete;

  // With O_DIRECT offset, address and bytes are whole pages. The memory stays alive until the op is done.
  void submit(const DiskOp& op);
  // As `submit`, for bytes that are copied first.
  void submit_copy(uint64_t tag, uint64_t offset, const uint8_t* data, size_t bytes);
  std::vector<DiskDone> take();

  int fd() const { return event_fd_; }
  int file() const { return fd_; }
  bool direct() const { return direct_; }
  const std::string& engine() const { return engine_name_; }
  size_t waiting() const { return reads_.size() + writes_.size(); }
  size_t under_way() const { return under_way_.size(); }

 private:
  void pump();
  void drain();

  int fd_ = -1, event_fd_ = -1;
  bool direct_ = false;
  unsigned depth_;
  std::string engine_name_;
  std::unique_ptr<DiskEngine> engine_;
  std::deque<DiskOp> reads_, writes_;
  std::unordered_map<uint64_t, DiskOp> under_way_;  // what is left of each
  std::unordered_map<uint64_t, std::unique_ptr<uint8_t[], void (*)(void*)>> copies_;  // by tag
  std::vector<DiskDone> done_;
  unsigned writes_under_way_ = 0;
  uint64_t next_ = 1;
};

}  // namespace memserve::store
