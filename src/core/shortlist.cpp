// Of very many instances the few that a routing policy should look at: one pass over their numbers.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "sequence.h"

namespace memserve {

namespace {

using Row = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Work = nb::ndarray<const int64_t, nb::shape<3, -1>, nb::c_contig, nb::device::cpu>;
using Prices = std::tuple<double, double, double, double>;

// The columns of the arrays, by instance.
struct Instances {
  Instances(const Row& numbers, const Work& work)
      : numbers(numbers), columns(work.shape(1)), prefill(work.data()), sequences(prefill + columns),
        context(sequences + columns) {
    if (numbers.shape(0) == 0) throw nb::value_error("no instances to choose from");
    for (size_t i = 0; i < numbers.shape(0); ++i) {
      if (numbers(i) < 0 || static_cast<size_t>(numbers(i)) >= columns) throw nb::value_error("a number has no column");
    }
  }
  int64_t busy(int64_t at) const { return prefill[at] + context[at]; }

  const Row& numbers;
  size_t columns;
  const int64_t *prefill, *sequences, *context;
};

std::pair<int64_t, int64_t> least_busy(const Row& numbers, const Work& work) {
  const Instances all(numbers, work);
  int64_t best = numbers(0);
  for (size_t i = 1; i < numbers.shape(0); ++i) {
    if (all.busy(numbers(i)) < all.busy(best)) best = numbers(i);
  }
  return {best, all.busy(best)};
}

// Instances later in `numbers` must be better to take a place.
std::tuple<int64_t, int64_t, int64_t, int64_t> shortlist(const Row& numbers, const Work& work, const Row& matched,
                                                         const Prices& prices, int64_t limit) {
  const Instances all(numbers, work);
  if (matched.shape(0) != all.columns) throw nb::value_error("one matched length a column is needed");
  const auto [queued, sequence, context, cached] = prices;
  const auto price = [&](int64_t at) {
    return queued * static_cast<double>(all.prefill[at]) + sequence * static_cast<double>(all.sequences[at]) +
           context * static_cast<double>(all.context[at]) + cached * static_cast<double>(matched(at));
  };
  const auto is_longer = [&](int64_t at, int64_t other) {
    return matched(at) > matched(other) || (matched(at) == matched(other) && all.busy(at) < all.busy(other));
  };
  int64_t idlest = numbers(0), cheapest = idlest, longest = idlest, fair = -1;
  double cheapest_price = price(cheapest);
  for (size_t i = 0; i < numbers.shape(0); ++i) {
    const int64_t at = numbers(i);
    const double at_price = price(at);
    if (all.busy(at) < all.busy(idlest)) idlest = at;
    if (at_price < cheapest_price) cheapest = at, cheapest_price = at_price;
    if (is_longer(at, longest)) longest = at;
    if (all.busy(at) <= limit && (fair < 0 || is_longer(at, fair))) fair = at;
  }
  return {idlest, cheapest, longest, fair < 0 ? idlest : fair};
}

}  // namespace

void bind_shortlist(nb::module_& m) {
  m.def("least_busy", &least_busy, nb::arg("numbers"), nb::arg("work"));
  m.def("shortlist", &shortlist, nb::arg("numbers"), nb::arg("work"), nb::arg("matched"), nb::arg("prices"),
        nb::arg("limit"));
}

}  // namespace memserve
