// Of very many instances the few that a routing policy should look at: one pass over their numbers.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "sequence.h"

namespace memserve {

namespace {

using Row = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Columns = nb::ndarray<const int64_t, nb::shape<2, -1>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Loads = nb::ndarray<const int64_t, nb::shape<3, 3, -1>, nb::c_contig, nb::device::cpu>;
using Prices = std::tuple<double, double, double, double>;
using Crowd = std::vector<std::pair<Row, Prices>>;
using Overload = std::pair<int64_t, int64_t>;

constexpr size_t kFair = 3;  // the last of the respects

struct Work {
  int64_t prefill, sequences, context;
  int64_t busy() const { return prefill + context; }
};

// The columns of the loads, by instance: own, reported, since; each of queue, sequences, contexts.
class Table {
 public:
  explicit Table(const Loads& loads) : columns(loads.shape(2)), data_(loads.data()) {}

  Work operator[](int64_t at) const { return {of(0, at), of(1, at), of(2, at)}; }
  // Context tokens sent since the last report.
  int64_t context_sent(int64_t at) const { return data_[8 * columns + static_cast<size_t>(at)]; }

  const size_t columns;

 private:
  int64_t of(size_t kind, int64_t at) const {
    const auto value = [&](size_t table) { return data_[(3 * table + kind) * columns + static_cast<size_t>(at)]; };
    return std::max(value(0), value(1) + value(2));
  }
  const int64_t* data_;
};

std::span<const int64_t> span_of(const Row& row) { return {row.data(), row.shape(0)}; }

void check_numbers(std::span<const int64_t> numbers, size_t columns) {
  if (numbers.empty()) throw nb::value_error("no instances to choose from");
  for (const int64_t at : numbers) {
    if (at < 0 || static_cast<size_t>(at) >= columns) throw nb::value_error("a number has no column");
  }
}

// The best of one role in each respect; instances later in `numbers` must be better to take a place.
std::array<int64_t, 4> best_of(std::span<const int64_t> numbers, const Table& table, std::span<const int64_t> matched,
                               const Prices& prices, int64_t limit) {
  const auto [queued, sequence, context, cached] = prices;
  struct Best {
    int64_t at, busy, matched;
  };
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Best idlest{-1, kMost, 0}, longest{-1, kMost, -1}, fair{-1, kMost, -1};
  int64_t cheapest = -1;
  double cheapest_price = 0;
  const auto is_longer = [](const Best& one, const Best& other) {
    return one.matched > other.matched || (one.matched == other.matched && one.busy < other.busy);
  };
  for (const int64_t at : numbers) {
    const Work work = table[at];
    const Best here{at, work.busy(), matched[static_cast<size_t>(at)]};
    const double price = queued * static_cast<double>(work.prefill) + sequence * static_cast<double>(work.sequences) +
                         context * static_cast<double>(work.context) + cached * static_cast<double>(here.matched);
    if (here.busy < idlest.busy) idlest = here;
    if (cheapest < 0 || price < cheapest_price) cheapest = at, cheapest_price = price;
    if (is_longer(here, longest)) longest = here;
    if (here.busy <= limit && is_longer(here, fair)) fair = here;
  }
  return {idlest.at, cheapest, longest.at, fair.at < 0 ? idlest.at : fair.at};
}

int64_t least_busy(const Crowd& crowd, const Table& table) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& [numbers, prices] : crowd) {
    for (const int64_t at : span_of(numbers)) least = std::min(least, table[at].busy());
  }
  return least;
}

nb::list shortlist(const Crowd& crowd, const Loads& loads, const Row& room, const Columns& matches,
                   const std::vector<int64_t>& favourites, const std::vector<size_t>& respects, const Overload& overload,
                   size_t all_of) {
  const Table table(loads);
  if (matches.shape(1) != table.columns || room.shape(0) != table.columns) {
    throw nb::value_error("room and matches of each column are needed");
  }
  const std::span<const int64_t> matched{matches.data(), table.columns};
  if (std::ranges::any_of(respects, [](size_t respect) { return respect > kFair; })) {
    throw nb::value_error("respects are 0 to 3");
  }
  bool few = true;
  const bool by_limit = std::ranges::find(respects, kFair) != respects.end();
  for (const auto& [numbers, prices] : crowd) {
    check_numbers(span_of(numbers), table.columns);
    few = few && numbers.shape(0) <= all_of;
  }
  std::vector<int64_t> chosen;
  const auto choose = [&](int64_t at) {
    if (std::ranges::find(chosen, at) == chosen.end()) chosen.push_back(at);
  };
  const int64_t limit = by_limit && !few ? overload.first * least_busy(crowd, table) + overload.second : 0;
  for (const auto& [numbers, prices] : crowd) {
    if (few) {
      chosen.insert(chosen.end(), numbers.data(), numbers.data() + numbers.shape(0));
      continue;
    }
    const auto best = best_of(span_of(numbers), table, matched, prices, limit);
    for (const size_t respect : respects) choose(best[respect]);
    for (const int64_t known : favourites) {
      if (std::ranges::binary_search(span_of(numbers), known)) choose(known);
    }
  }
  nb::list rows;
  for (const int64_t at : chosen) {
    const auto [prefill, sequences, context] = table[at];
    rows.append(nb::make_tuple(at, prefill, sequences, context, room.data()[at], table.context_sent(at),
                               matches.data()[at], matches.data()[table.columns + static_cast<size_t>(at)]));
  }
  return rows;
}

// Who has most of a prompt, of all but those with the code `without`: most blocks, then HBM, then the lowest number.
nb::list most_of(const Columns& matches, const Codes& codes, int64_t without, size_t count) {
  const size_t columns = matches.shape(1);
  if (codes.shape(0) != columns) throw nb::value_error("a code of each column is needed");
  struct Most {
    int64_t rank;
    size_t at;
  };
  std::vector<Most> most;
  for (size_t at = 0; at < columns; ++at) {
    const int64_t blocks = matches.data()[at];
    if (blocks == 0 || codes.data()[at] == without) continue;
    const int64_t rank = 2 * blocks - (matches.data()[columns + at] > 0);
    if (most.size() == count && (count == 0 || rank <= most.back().rank)) continue;
    const auto place = std::ranges::find_if(most, [rank](const Most& other) { return other.rank < rank; });
    most.insert(place, {rank, at});
    if (most.size() > count) most.pop_back();
  }
  nb::list rows;
  for (const auto& [rank, at] : most) {
    rows.append(nb::make_tuple(at, matches.data()[at], matches.data()[columns + at] > 0));
  }
  return rows;
}

}  // namespace

void bind_shortlist(nb::module_& m) {
  m.def("shortlist", &shortlist, nb::arg("crowd"), nb::arg("loads"), nb::arg("room"), nb::arg("matches"),
        nb::arg("favourites"), nb::arg("respects"), nb::arg("overload"), nb::arg("all_of"));
  m.def("most_of", &most_of, nb::arg("matches"), nb::arg("codes"), nb::arg("without"), nb::arg("count"));
}

}  // namespace memserve
