// What a client of a memory tier says to its owner: which values it reads right now, and which it has hit.
//
//   file  | head, 64 bytes | pins: 1024 words | hits: a ring of 1024 words |
//
// A pin is an extent's offset plus 1, or 0. The client maps the file and writes; the owner reads it by pread, so that
// neither garbage nor a file that shrank can do it harm. What the owner writes is one word: this area is closed.
//
// A reader writes its pin and looks at the entry's version again; the owner makes the version odd and looks at the
// pins then. A full barrier between the two steps on both sides: at least one of them sees the other.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace memserve::store {

struct ClientArea {
  static constexpr uint64_t kMagic = 0x3141455241494c43;  // "CLIAREA1"
  static constexpr size_t kPins = 1024, kHits = 1024;

  uint64_t magic;
  uint64_t bytes_max;            // of the values that may be pinned at once
  std::atomic<uint64_t> closed;  // not 0: pins hold nothing any more
  std::atomic<uint64_t> hits_written;
  uint64_t unused[4];
  std::atomic<uint64_t> pins[kPins];
  std::atomic<uint64_t> hits[kHits];
};
static_assert(sizeof(ClientArea) == 64 + 8 * (ClientArea::kPins + ClientArea::kHits));

// The owner's side of all its clients.
class ClientAreas {
 public:
  ~ClientAreas();

  // Throws std::system_error.
  void open(uint64_t number, const std::string& path, uint64_t bytes_max);
  // The area of a client of an earlier owner: it counts as long as that client lives.
  void adopt(const std::string& path);
  bool has(uint64_t number) const { return areas_.count(number) != 0; }
  const std::string& path(uint64_t number) const { return areas_.at(number).path; }
  void close(uint64_t number);
  void close_all();
  size_t count() const { return areas_.size() + orphans_.size(); }

  // Reads every area: `pin(bytes_max, offset)` is called for each pin of one client after the other, a new client
  // beginning with `client()`; `hit(offset)` for each hit since the last call.
  template <class Client, class Pin, class Hit>
  void read(Client client, Pin pin, Hit hit) {
    drop_dead();
    for (auto& [number, area] : areas_) read_one(area, client, pin, hit);
    for (Area& area : orphans_) read_one(area, client, pin, hit);
  }

 private:
  struct Area {
    int fd;
    std::string path;
    uint64_t hits_read = 0;
  };

  bool fetch(const Area& area);
  void drop_dead();
  static void end(Area& area);

  template <class Client, class Pin, class Hit>
  void read_one(Area& area, Client& client, Pin& pin, Hit& hit) {
    if (!fetch(area)) return;
    client();
    for (size_t i = 0; i < ClientArea::kPins; ++i) {
      if (words_[8 + i] != 0) pin(words_[8 + i] - 1);
    }
    const uint64_t written = words_[3];
    uint64_t from = area.hits_read;
    if (written - from > ClientArea::kHits) from = written - ClientArea::kHits;
    for (; from != written; ++from) hit(words_[8 + ClientArea::kPins + from % ClientArea::kHits]);
    area.hits_read = written;
  }

  std::map<uint64_t, Area> areas_;
  std::vector<Area> orphans_;
  std::vector<uint64_t> words_ = std::vector<uint64_t>(sizeof(ClientArea) / 8);
};

}  // namespace memserve::store
