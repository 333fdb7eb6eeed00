// What the router knows of each instance, in columns by its number: router/members/loads.py keeps them.
#pragma once
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "scheduling/sequence.h"

namespace memserve {

using Row = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Columns = nb::ndarray<const int64_t, nb::shape<2, -1>, nb::c_contig, nb::device::cpu>;
using Loads = nb::ndarray<const int64_t, nb::shape<3, 3, -1>, nb::c_contig, nb::device::cpu>;

inline std::span<const int64_t> span_of(const Row& row) { return {row.data(), row.shape(0)}; }

struct Work {
  int64_t prefill, sequences, context;
  int64_t busy() const { return prefill + context; }
};

// Loads (own, reported, since; each of queue, sequences, contexts), memory, and how much of this prompt is cached.
class LoadColumns {
 public:
  LoadColumns(const Loads& loads, const Row& room, const Columns& matches)
      : columns(loads.shape(2)), loads_(loads.data()), room_(room.data()), matches_(matches.data()) {
    if (matches.shape(1) != columns || room.shape(0) != columns) {
      throw nb::value_error("give room and matches for each column");
    }
  }

  Work work(int64_t at) const { return {of(0, at), of(1, at), of(2, at)}; }
  // Context tokens that do not run yet: sent since the last report, or waiting there at that time.
  int64_t context_waiting(int64_t at) const { return of(2, at) - loads_[5 * columns + static_cast<size_t>(at)]; }
  int64_t room_blocks(int64_t at) const { return room_[at]; }
  // Blocks of the prompt, and how many of them lie in DRAM.
  int64_t matched(int64_t at) const { return matches_[at]; }
  int64_t matched_in_dram(int64_t at) const { return matches_[columns + static_cast<size_t>(at)]; }

  void check_numbers(std::span<const int64_t> numbers) const {
    for (const int64_t at : numbers) {
      if (at < 0 || static_cast<size_t>(at) >= columns) throw nb::value_error("a number has no column");
    }
  }

  // What a policy needs to know of one instance.
  nb::tuple row(int64_t at) const {
    const auto [prefill, sequences, context] = work(at);
    return nb::make_tuple(at, prefill, sequences, context, room_blocks(at), context_waiting(at), matched(at),
                          matched_in_dram(at));
  }

  const size_t columns;

 private:
  int64_t of(size_t kind, int64_t at) const {
    const auto value = [&](size_t table) { return loads_[(3 * table + kind) * columns + static_cast<size_t>(at)]; };
    return std::max(value(0), value(1) + value(2));
  }

  const int64_t *loads_, *room_, *matches_;
};

}  // namespace memserve
