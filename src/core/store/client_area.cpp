#include "store/client_area.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <system_error>

namespace memserve::store {

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

ClientAreas::~ClientAreas() {
  for (auto& [number, area] : areas_) ::close(area.fd);
  for (Area& area : orphans_) ::close(area.fd);
}

void ClientAreas::open(uint64_t number, const std::string& path, uint64_t bytes_max) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) fail("the area of a client cannot be created (" + path + ")");
  const uint64_t head[2] = {ClientArea::kMagic, bytes_max};
  const int error = posix_fallocate(fd, 0, sizeof(ClientArea));
  if (error != 0 || pwrite(fd, head, sizeof head, 0) != sizeof head) {
    errno = error ? error : errno;
    ::close(fd);
    unlink(path.c_str());
    fail("the area of a client has no room (" + path + ")");
  }
  areas_[number] = {fd, path};
}

void ClientAreas::adopt(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd >= 0) orphans_.push_back({fd, path});
}

void ClientAreas::close(uint64_t number) {
  end(areas_.at(number));
  areas_.erase(number);
}

void ClientAreas::close_all() {
  for (auto& [number, area] : areas_) end(area);
  for (Area& area : orphans_) end(area);
  areas_.clear();
  orphans_.clear();
}

// The word is written before any extent is given to others: a reader that finds 0 behind its copy has read the value.
void ClientAreas::end(Area& area) {
  const uint64_t closed = 1;
  static_cast<void>(!pwrite(area.fd, &closed, sizeof closed, offsetof(ClientArea, closed)));
  unlink(area.path.c_str());
  ::close(area.fd);
}

bool ClientAreas::fetch(const Area& area) {
  std::fill(words_.begin(), words_.end(), 0);  // what a file that shrank does not have
  return pread(area.fd, words_.data(), words_.size() * 8, 0) > 0;
}

// A client keeps its area locked; the kernel unlocks it when the last of its processes ends.
void ClientAreas::drop_dead() {
  std::erase_if(orphans_, [](Area& area) {
    if (flock(area.fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
    end(area);
    return true;
  });
}

}  // namespace memserve::store
