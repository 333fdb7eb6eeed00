// A growing array of items that never move, on huge pages once it is large.
#pragma once
#include <bit>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "pool/arena.h"

namespace memserve {

// The first chunk is small, for the many small indexes; each later one is a huge page. Growing copies nothing.
template <class T>
class Slab {
 public:
  Slab() = default;
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;
  ~Slab() {
    for (size_t i = 0; i < size_; ++i) std::destroy_at(&(*this)[i]);
  }

  size_t size() const { return size_; }

  // Of the chunks, whose ends no item fits into.
  size_t bytes() const {
    size_t total = 0;
    for (const auto& arena : arenas_) total += arena->nbytes();
    return total;
  }

  T& operator[](size_t i) {
    if (i < kFirst) return chunks_[0][i];
    return chunks_[1 + (i - kFirst) / kLater][(i - kFirst) % kLater];
  }
  const T& operator[](size_t i) const { return const_cast<Slab&>(*this)[i]; }

  T& append() {
    if (size_ == (chunks_.empty() ? 0 : kFirst + (chunks_.size() - 1) * kLater)) {
      arenas_.push_back(std::make_unique<Arena>(chunks_.empty() ? kFirst * sizeof(T) : kHugePage));
      chunks_.push_back(reinterpret_cast<T*>(arenas_.back()->data()));
    }
    T* const item = &(*this)[size_++];
    return *new (item) T{};
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kFirst = std::bit_floor((size_t{64} << 10) / sizeof(T));
  static constexpr size_t kLater = std::bit_floor(kHugePage / sizeof(T));  // a power of two: division is a shift

  std::vector<std::unique_ptr<Arena>> arenas_;
  std::vector<T*> chunks_;
  size_t size_ = 0;
};

}  // namespace memserve
