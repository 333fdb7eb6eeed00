// A stretch of memory that holds the blocks of one tier.
#pragma once
#include <cstddef>
#include <cstdint>

namespace memserve {

// Owns one mapping. Anonymous memory; a shared-memory arena differs only in how the mapping is made.
class Arena {
 public:
  // Zeroed on first touch; asks for huge pages unless it is smaller than one. Throws std::bad_alloc if there is no
  // address space.
  explicit Arena(size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint8_t* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t nbytes_ = 0;
  size_t mapped_ = 0;
};

}  // namespace memserve
