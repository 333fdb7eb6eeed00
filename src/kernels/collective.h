// The workers of one instance, and what they exchange in every layer, through memory that all of them map.
//
//   region:  | control | slots of buffer 0: rank 0, rank 1, ... | slots of buffer 1: ... |
//
// Operation n of every rank is the same one. A rank writes its part into its slot of buffer n % 2, says that it has
// arrived at n, and reads the others' parts when they have. It may write to a buffer again two operations later: by then
// all ranks have arrived at the operation between, so they have read what was there. Sums are taken in the order of
// ranks, so that all ranks have the same bits.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "page_layout.h"

namespace memserve {

// y[at] = x[at] + value, rounded to the dtype.
void add_to(const void* x, void* y, ptrdiff_t at, float value, Dtype dtype);

class Collective {
 public:
  static constexpr int kRanksMax = 64;
  // Bytes of a region for `size` ranks, with `slot_bytes` (a multiple of 64) for a rank's part of one operation.
  static size_t region_bytes(int size, size_t slot_bytes);

  // `region`: zeroed before the first rank comes, aligned to 64 bytes. Waits end after `timeout_ns`.
  Collective(void* region, int rank, int size, size_t slot_bytes, int64_t timeout_ns);

  int rank() const { return rank_; }
  int size() const { return size_; }

  enum class Ending { good, aborted, late };

  // out = the sum of all ranks' x, `count` elements; `x` may be `out`. Low precision is summed in float32, rounded once.
  Ending all_reduce(const void* x, void* out, size_t count, Dtype dtype);
  // Rank 0's `out` receives the rows of all ranks beside one another: `widths[r]` bytes of each row from rank r.
  Ending gather(const void* x, size_t rows, const std::vector<size_t>& widths, void* out);
  // Every rank's `data` becomes that of `root`.
  Ending broadcast(void* data, size_t bytes, int root);
  // Returns when all ranks have come.
  Ending meet();
  // Says that this rank has come, and waits for no other; `await` waits for one, before the next operation.
  Ending announce();
  Ending await(int rank) { return rank == rank_ ? Ending::good : wait_for(rank, number_); }

  // All waits of all ranks end, now and from now on.
  void abort();
  bool aborted() const;
  // Nanoseconds that this rank has waited for others, in all.
  int64_t waited_ns() const { return waited_ns_; }

 private:
  struct Control;
  uint8_t* slot(int rank) const;
  Ending begin();         // the slot of this operation may be written
  Ending arrive();        // this rank's part is written: wait for the others'
  void say_arrived();
  Ending wait_for(int rank, uint32_t number);

  Control* control_;
  uint8_t* slots_;
  int rank_, size_;
  size_t slot_bytes_;
  int64_t timeout_ns_, waited_ns_ = 0;
  uint32_t number_ = 0;
};

// Throws std::runtime_error unless `ending` is good.
void check(Collective::Ending ending);

}  // namespace memserve
