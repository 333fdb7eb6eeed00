#include "store/tier_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "pool/mapping.h"

namespace memserve::store {

namespace {

constexpr const char* kFolder = "/dev/shm/";
constexpr int kTries = 8;
// Some GiB come within it on a machine that has them ready; one that must find them first starts no later for it.
constexpr std::chrono::milliseconds kHugePatience{2000};

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(other.keep()) {}
  int get() const { return fd_; }
  int keep() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

bool ours(const struct stat& status) {
  return S_ISREG(status.st_mode) && status.st_uid == geteuid() && (status.st_mode & 077) == 0;
}

// Whether `path` is the file that `fd` is of: else it was replaced between open and lock.
bool still_named(int fd, const std::string& path) {
  struct stat mine {}, named {};
  return fstat(fd, &mine) == 0 && lstat(path.c_str(), &named) == 0 && mine.st_ino == named.st_ino &&
         mine.st_dev == named.st_dev;
}

// The file of that name, locked. Nothing is in it when it is new.
Descriptor locked(const std::string& path) {
  for (int i = 0; i < kTries; ++i) {
    Descriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (file.get() < 0) fail(errno, path + " cannot be opened: is it another user's? Choose another name for this store");
    struct stat status {};
    if (fstat(file.get(), &status) != 0 || !ours(status)) {
      fail(EACCES, path + " is another user's, or open to others: choose another name for this store, or remove it");
    }
    if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      fail(errno, path + " has an owner: another store of this name runs on this host. Stop it, or choose another name");
    }
    if (still_named(file.get(), path)) return file;
  }
  fail(EAGAIN, path + " is replaced again and again");
}

Descriptor create_file(const std::string& path, size_t bytes) {
  ::unlink(path.c_str());
  Descriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (file.get() < 0) fail(errno, path + " cannot be created");
  // All memory is taken now: a page that is missing later would end whichever process touches it. On huge pages values
  // are copied, and the table is read, as quickly as in a process's own memory.
  if (const int error = fill_file(file.get(), bytes, kHugePatience); error != 0) {
    ::unlink(path.c_str());
    fail(error, path + " would take " + std::to_string(bytes) +
                    " bytes, and /dev/shm has not that many: give the store less memory, or /dev/shm more room");
  }
  return file;
}

}  // namespace

std::string TierFiles::path_of(const std::string& name, const std::string& what) {
  return kFolder + ("memserve-store-" + name) + "." + what;
}

TierFiles::TierFiles(const std::string& name, const TierGeometry& geometry)
    : name_(name), data_path_(path_of(name, "data")), index_path_(path_of(name, "index")) {
  Descriptor lock = locked(path_of(name, "lock"));
  Descriptor index(open(index_path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  adopted_ = index.get() >= 0 && adopt(index.get(), geometry);
  list_clients();
  if (!adopted_) {
    for (const std::string& path : old_clients_) ::unlink(path.c_str());
    old_clients_.clear();
    create(geometry);
  }
  table_ = std::make_unique<SharedTable>(index_);
  ++reinterpret_cast<TableHead*>(index_)->epoch;
  lock_fd_ = lock.keep();
}

TierFiles::~TierFiles() {
  if (index_) munmap(index_, index_bytes_);
  if (lock_fd_ >= 0) close(lock_fd_);
}

bool TierFiles::adopt(int index_fd, const TierGeometry& geometry) {
  struct stat status {};
  TableHead head;
  index_bytes_ = SharedTable::file_bytes(geometry.buckets);
  if (fstat(index_fd, &status) != 0 || !ours(status) || static_cast<size_t>(status.st_size) != index_bytes_ ||
      pread(index_fd, &head, sizeof head, 0) != sizeof head || head.magic != TableHead::kMagic ||
      head.check != SharedTable::check_of(head) || head.arena_bytes != geometry.arena_bytes ||
      head.block_bytes != geometry.block_bytes || head.unit_bytes != geometry.unit_bytes ||
      head.buckets != geometry.buckets) {
    return false;
  }
  Descriptor data(open(data_path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (data.get() < 0 || fstat(data.get(), &status) != 0 || !ours(status)) return false;
  uint8_t* const start = map_aligned(index_fd, index_bytes_, PROT_READ | PROT_WRITE);
  try {
    arena_ = std::make_unique<SharedArena>(data.get(), geometry.arena_bytes, head.arena_id, false);
  } catch (const std::system_error&) {  // not the one that belongs to this index
    munmap(start, index_bytes_);
    return false;
  }
  data.keep();
  index_ = start;
  return true;
}

void TierFiles::create(const TierGeometry& geometry) {
  TableHead head;
  head.arena_bytes = geometry.arena_bytes;
  head.block_bytes = geometry.block_bytes;
  head.unit_bytes = geometry.unit_bytes;
  head.buckets = geometry.buckets;
  uint64_t random[4];
  if (getrandom(random, sizeof random, 0) != sizeof random) fail(errno, "no random bytes");
  std::memcpy(head.secret, random, 16);
  std::memcpy(head.arena_id, random + 2, 16);
  head.check = SharedTable::check_of(head);

  ::unlink(index_path_.c_str());
  try {
    Descriptor data = create_file(data_path_, SharedArena::file_bytes(geometry.arena_bytes));
    arena_ = std::make_unique<SharedArena>(data.get(), geometry.arena_bytes, head.arena_id, true);
    data.keep();
    index_bytes_ = SharedTable::file_bytes(geometry.buckets);
    const Descriptor index = create_file(index_path_, index_bytes_);
    index_ = map_aligned(index.get(), index_bytes_, PROT_READ | PROT_WRITE);
    collapse_pages(index_, 0, index_bytes_, index_bytes_);  // readers touch it everywhere
    new (index_) TableHead(head);
  } catch (...) {
    ::unlink(data_path_.c_str());
    ::unlink(index_path_.c_str());
    throw;
  }
}

std::string TierFiles::client_path(uint64_t number) const {
  return path_of(name_, "client-" + std::to_string(table_->head().epoch) + "-" + std::to_string(number));
}

void TierFiles::list_clients() {
  DIR* const folder = opendir(kFolder);
  if (!folder) return;
  const std::string prefix = "memserve-store-" + name_ + ".client-";
  while (const dirent* const item = readdir(folder)) {
    if (std::strncmp(item->d_name, prefix.c_str(), prefix.size()) == 0) old_clients_.push_back(kFolder + std::string(item->d_name));
  }
  closedir(folder);
}

void TierFiles::unlink() {
  ::unlink(data_path_.c_str());
  ::unlink(index_path_.c_str());
  ::unlink(path_of(name_, "lock").c_str());  // last: from now on there may be another owner
}

}  // namespace memserve::store
