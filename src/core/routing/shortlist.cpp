// Picks, of very many instances, the few that a routing policy should examine, in one pass over their numbers.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "routing/load_columns.h"
#include "scheduling/sequence.h"

namespace memserve {

namespace {

using Codes = nb::ndarray<const int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Crowd = std::vector<Row>;
using Overload = std::pair<int64_t, int64_t>;

constexpr size_t kFair = 2;  // the last of the respects

// The best of one role in each respect; a later instance in `numbers` must be better to win.
std::array<int64_t, 3> best_of(std::span<const int64_t> numbers, const LoadColumns& table, int64_t limit) {
  struct Best {
    int64_t at, busy, matched;
  };
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Best idlest{-1, kMost, 0}, longest{-1, kMost, -1}, fair{-1, kMost, -1};
  const auto is_longer = [](const Best& one, const Best& other) {
    return one.matched > other.matched || (one.matched == other.matched && one.busy < other.busy);
  };
  for (const int64_t at : numbers) {
    const Best here{at, table.work(at).busy(), table.matched(at)};
    if (here.busy < idlest.busy) idlest = here;
    if (is_longer(here, longest)) longest = here;
    if (here.busy <= limit && is_longer(here, fair)) fair = here;
  }
  return {idlest.at, longest.at, fair.at < 0 ? idlest.at : fair.at};
}

int64_t least_busy(const Crowd& crowd, const LoadColumns& table) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const Row& numbers : crowd) {
    for (const int64_t at : span_of(numbers)) least = std::min(least, table.work(at).busy());
  }
  return least;
}

nb::list shortlist(const Crowd& crowd, const Loads& loads, const Row& room, const Columns& matches,
                   const std::vector<int64_t>& favourites, const std::vector<size_t>& respects, const Overload& overload,
                   size_t all_of) {
  const LoadColumns table(loads, room, matches);
  if (std::ranges::any_of(respects, [](size_t respect) { return respect > kFair; })) {
    throw nb::value_error("respects must be 0 to 2");
  }
  bool few = true;
  const bool by_limit = std::ranges::find(respects, kFair) != respects.end();
  for (const Row& numbers : crowd) {
    if (!numbers.shape(0)) throw nb::value_error("no instances to choose from");
    table.check_numbers(span_of(numbers));
    few = few && numbers.shape(0) <= all_of;
  }
  std::vector<int64_t> chosen;
  const auto choose = [&](int64_t at) {
    if (std::ranges::find(chosen, at) == chosen.end()) chosen.push_back(at);
  };
  const int64_t limit = by_limit && !few ? overload.first * least_busy(crowd, table) + overload.second : 0;
  for (const Row& numbers : crowd) {
    if (few) {
      chosen.insert(chosen.end(), numbers.data(), numbers.data() + numbers.shape(0));
      continue;
    }
    const auto best = best_of(span_of(numbers), table, limit);
    for (const size_t respect : respects) choose(best[respect]);
    for (const int64_t known : favourites) {
      if (std::ranges::binary_search(span_of(numbers), known)) choose(known);
    }
  }
  nb::list rows;
  for (const int64_t at : chosen) rows.append(table.row(at));
  return rows;
}

// The holders of most of a prompt, without those of the code `without`: most blocks, then an instance's HBM, its DRAM,
// a store's DRAM, its disks (`stores`: the code of stores), then the lowest number.
nb::list most_of(const Columns& matches, const Codes& codes, int64_t without, int64_t stores, size_t count) {
  const size_t columns = matches.shape(1);
  if (codes.shape(0) != columns) throw nb::value_error("give one code per column");
  struct Most {
    int64_t rank;
    size_t at;
  };
  std::vector<Most> most;
  for (size_t at = 0; at < columns; ++at) {
    const int64_t blocks = matches.data()[at];
    if (blocks == 0 || codes.data()[at] == without) continue;
    const int64_t depth = 2 * (codes.data()[at] == stores) + (matches.data()[columns + at] > 0);
    const int64_t rank = 4 * blocks - depth;
    if (most.size() == count && (count == 0 || rank <= most.back().rank)) continue;
    const auto place = std::ranges::find_if(most, [rank](const Most& other) { return other.rank < rank; });
    most.insert(place, {rank, at});
    if (most.size() > count) most.pop_back();
  }
  nb::list rows;
  for (const auto& [rank, at] : most) {
    rows.append(nb::make_tuple(at, matches.data()[at], matches.data()[columns + at]));
  }
  return rows;
}

}  // namespace

void bind_shortlist(nb::module_& m) {
  m.def("shortlist", &shortlist, nb::arg("crowd"), nb::arg("loads"), nb::arg("room"), nb::arg("matches"),
        nb::arg("favourites"), nb::arg("respects"), nb::arg("overload"), nb::arg("all_of"));
  m.def("most_of", &most_of, nb::arg("matches"), nb::arg("codes"), nb::arg("without"), nb::arg("stores"),
        nb::arg("count"));
}

}  // namespace memserve
