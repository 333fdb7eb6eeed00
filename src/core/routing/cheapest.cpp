// Chooses the instances that compute and decode a prompt at the least expected cost, of all pairs: the sums of
// router/placement/routing.py in one pass, each instance by its own profile. There is no need to examine each pair: a decoder
// costs every first instance the same, except for the transfer, which the decoder pulls, and which depends only on
// whether both share a host.
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "routing/load_columns.h"
#include "scheduling/sequence.h"

namespace memserve {

namespace {

using Coefficients = std::array<double, 3>;
using Crowd = std::vector<std::pair<Row, bool>>;

constexpr int64_t kNobody = -1;
constexpr int64_t kUnknownHost = 0;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// Longer than any wait: larger costs are cut to it, so that a sum of a few of them does not overflow.
constexpr double kForeverNs = 1e17;

// As Python's round: half to even. Contraction is off in this file, so that sums equal those of kv/costs.py.
int64_t rounded(double ns) { return std::lrint(std::min(ns, kForeverNs)); }

// How KV is divided: a token's bytes, a block's tokens, and pieces of a block.
struct Cut {
  int64_t token_bytes, block_tokens, pieces;
  int64_t blocks(int64_t tokens) const { return (tokens + block_tokens - 1) / block_tokens; }
};

// The curves of one CostModel of kv/costs.py.
struct Prices {
  Coefficients prefill, decode, swap_in, same_host, network, disk;

  int64_t prefill_ns(int64_t fresh, int64_t context) const {
    if (fresh <= 0) return 0;
    const int64_t pairs = fresh * context + fresh * (fresh + 1) / 2;
    return rounded(prefill[0] + prefill[1] * static_cast<double>(fresh) + prefill[2] * static_cast<double>(pairs));
  }
  int64_t decode_step_ns(int64_t batch, int64_t context) const {
    if (batch <= 0) return 0;
    return rounded(decode[0] + decode[1] * static_cast<double>(batch) + decode[2] * static_cast<double>(context));
  }
  int64_t swap_in_ns(int64_t blocks, const Cut& cut) const { return kv_ns(swap_in, blocks, cut); }
  int64_t transfer_ns(int64_t blocks, const Cut& cut, bool near) const {
    return kv_ns(near ? same_host : network, blocks, cut);
  }
  // Of a store: from its disks into its memory.
  int64_t disk_ns(int64_t blocks, const Cut& cut) const { return kv_ns(disk, blocks, cut); }

 private:
  // CopyCurve.kv_ns
  static int64_t kv_ns(const Coefficients& curve, int64_t blocks, const Cut& cut) {
    const int64_t bytes = blocks * cut.block_tokens * cut.token_bytes;
    if (bytes <= 0) return 0;
    return rounded(curve[0] + curve[1] * static_cast<double>(blocks * cut.pieces) +
                   curve[2] * static_cast<double>(bytes));
  }
};

// The prices of all instances; those with equal profiles share an entry.
struct RoutingPrices {
  std::vector<Prices> profiles;
};

// What a request needs, and the longest prefix of it that may be fetched from another instance or a store.
struct Wanted {
  int64_t prompt_tokens, max_tokens, sequences, block_tokens;
  Cut whole, handoff;
  int64_t holder = kNobody, holder_tokens = 0, disk_tokens = 0;  // the last: of them on a store's disks
  int64_t state_blocks = 0;  // of a recurrent state, which goes with KV
};

// A total to minimise; ties go to instances that know the session, then to the lowest number.
struct Price {
  int64_t total_ns = kNever, minus_known = 0, first = kNobody, decode_at = kNobody;
  auto operator<=>(const Price&) const = default;
};

class Weighing {
 public:
  Weighing(const std::vector<Prices>& profiles, std::span<const int64_t> profile_of, const Wanted& wanted,
           const LoadColumns& table, std::span<const int64_t> hosts, const std::vector<int64_t>& favourites,
           int64_t window_steps)
      : profiles_(profiles),
        profile_of_(profile_of),
        wanted_(wanted),
        table_(table),
        hosts_(hosts),
        favourites_(favourites),
        window_(window_steps),
        prompt_blocks_(wanted.whole.blocks(wanted.prompt_tokens)),
        there_(std::min(wanted.holder_tokens, wanted.prompt_tokens - 1)),
        there_blocks_(wanted.whole.blocks(there_)),
        disk_blocks_(wanted.whole.blocks(wanted.disk_tokens)),
        alone_ns_(profiles.size()),
        near_(table.columns + 1) {
    for (size_t at = 0; at < profiles.size(); ++at) alone_ns_[at] = profiles[at].prefill_ns(wanted.prompt_tokens, 0);
  }

  void offer_decoder(int64_t at) {
    const Work work = table_.work(at);
    const Prices& prices = prices_of(at);
    const int64_t swap_ns = prices.swap_in_ns(table_.matched_in_dram(at), wanted_.whole);
    const int64_t decoder_ns = decode_ns(at, work) + queued_ns(at, work.prefill) + swap_ns;
    const int64_t lacking = std::max<int64_t>(0, prompt_blocks_ - table_.matched(at)) + wanted_.state_blocks;
    const auto price = [&](bool near) {
      return Price{decoder_ns + prices.transfer_ns(lacking, wanted_.handoff, near), -is_known(at), kNobody, at};
    };
    if (const int64_t host = hosts_[at]; host != kUnknownHost) near_[host] = std::min(near_[host], price(true));
    keep_far(price(false));
  }

  // Each instance that may compute the prompt, before the first of them is offered.
  void note_first(int64_t at) { least_lacking_ns_ = std::min(least_lacking_ns_, lacking_ns(at)); }

  // `alone`: the instance decodes as well.
  void offer_first(int64_t at, bool alone) {
    const Work work = table_.work(at);
    const int64_t prompts_ns = queued_ns(at, work.prefill);
    const int64_t step_ns = prices_of(at).decode_step_ns(work.sequences, work.context);
    if (prompts_ns + step_ns > best_.total_ns) return;
    const int64_t first_ns = step_ns + first_token_ns(at, prompts_ns) + others_ns(at, work);
    if (alone) {
      best_ = std::min(best_, Price{first_ns + decode_ns(at, work), -is_known(at), at, kNobody});
    } else if (const Price decoder = decoder_for(hosts_[at]); decoder.total_ns != kNever) {
      const int64_t minus_known = decoder.minus_known - is_known(at);
      best_ = std::min(best_, Price{first_ns + decoder.total_ns, minus_known, at, decoder.decode_at});
    }
  }

  const Price& best() const { return best_; }
  int64_t least_lacking_ns() const { return least_lacking_ns_; }

 private:
  const Prices& prices_of(int64_t at) const { return profiles_[static_cast<size_t>(profile_of_[at])]; }

  int64_t is_known(int64_t at) const { return std::ranges::find(favourites_, at) != favourites_.end(); }

  // Keeps the cheapest decoder over the network, and the cheapest one on another host than that.
  void keep_far(const Price& price) {
    if (price < far_) {
      if (far_.total_ns != kNever && hosts_[far_.decode_at] != hosts_[price.decode_at]) other_far_ = far_;
      far_ = price;
    } else if (price < other_far_ && hosts_[price.decode_at] != hosts_[far_.decode_at]) {
      other_far_ = price;
    }
  }

  Price decoder_for(int64_t host) const {
    if (host == kUnknownHost) return far_;
    const bool same = far_.total_ns != kNever && hosts_[far_.decode_at] == host;
    return std::min(near_[host], same ? other_far_ : far_);
  }

  // `count` times `each_ns`, or longer than any wait.
  static int64_t times(int64_t count, int64_t each_ns, int64_t divisor) {
    int64_t product = 0;
    if (__builtin_mul_overflow(count, each_ns, &product)) return static_cast<int64_t>(kForeverNs);
    return std::min(product / divisor, static_cast<int64_t>(kForeverNs));
  }

  // Time of the queued prompts, taken to be like this one.
  int64_t queued_ns(int64_t at, int64_t prefill_tokens) const {
    return times(prefill_tokens, alone_ns_[static_cast<size_t>(profile_of_[at])], wanted_.prompt_tokens);
  }

  bool is_full(int64_t at) const {
    return wanted_.prompt_tokens > table_.room_blocks(at) * wanted_.block_tokens - table_.context_waiting(at);
  }

  // Time to compute what the instance itself does not have of the prompt.
  int64_t lacking_ns(int64_t at) const {
    const int64_t own = std::min(table_.matched(at) * wanted_.block_tokens, wanted_.prompt_tokens - 1);
    return prices_of(at).prefill_ns(wanted_.prompt_tokens - own, own);
  }

  // What others lose there by what another instance need not compute.
  int64_t others_ns(int64_t at, const Work& work) const {
    const int64_t spared_ns = lacking_ns(at) - least_lacking_ns_;
    const int64_t behind_ns = times(work.prefill, spared_ns, wanted_.prompt_tokens);
    return is_full(at) ? std::max(behind_ns, times(work.sequences, spared_ns, 1)) : behind_ns;
  }

  int64_t decode_ns(int64_t at, const Work& work) const {
    const int64_t context = work.context + wanted_.sequences * wanted_.prompt_tokens;
    const int64_t steps = std::min(window_, std::max<int64_t>(1, wanted_.max_tokens));
    const int64_t waiting = is_full(at) ? window_ : 0;
    return (steps + waiting) * prices_of(at).decode_step_ns(work.sequences + wanted_.sequences, context);
  }

  // Time of the quickest way to get the prompt's KV there, behind other prompts: recompute, swap in, fetch.
  int64_t first_token_ns(int64_t at, int64_t prompts_ns) const {
    const Prices& prices = prices_of(at);
    const int64_t prompt = wanted_.prompt_tokens, last = prompt - 1;
    const int64_t matched = table_.matched(at) * wanted_.block_tokens;
    const int64_t own = std::min(matched, last);
    const int64_t hbm = std::min(matched - table_.matched_in_dram(at) * wanted_.block_tokens, last);
    int64_t best_ns = prompts_ns + prices.prefill_ns(prompt - hbm, hbm);
    int64_t swap_ns = 0;
    if (own > hbm) {
      swap_ns = prices.swap_in_ns(wanted_.whole.blocks(own - hbm), wanted_.whole);
      best_ns = std::min(best_ns, prompts_ns + swap_ns + prices.prefill_ns(prompt - own, own));
    }
    if (there_ > own && wanted_.holder != at) {  // so the whole match is its own
      const bool near = hosts_[at] != kUnknownHost && hosts_[at] == hosts_[wanted_.holder];
      const int64_t blocks = there_blocks_ - table_.matched(at);
      const int64_t read_ns = prices_of(wanted_.holder).disk_ns(std::min(disk_blocks_, blocks), wanted_.whole);
      const int64_t fetch_ns = prices.transfer_ns(blocks + wanted_.state_blocks, wanted_.whole, near) + read_ns;
      const int64_t rest_ns = swap_ns + prices.prefill_ns(prompt - there_, there_);
      best_ns = std::min(best_ns, std::max(prompts_ns, fetch_ns) + rest_ns);
    }
    return best_ns;
  }

  const std::vector<Prices>& profiles_;
  const std::span<const int64_t> profile_of_;
  const Wanted& wanted_;
  const LoadColumns& table_;
  const std::span<const int64_t> hosts_;
  const std::vector<int64_t>& favourites_;
  const int64_t window_, prompt_blocks_, there_, there_blocks_, disk_blocks_;
  std::vector<int64_t> alone_ns_;  // by profile: this prompt, with nothing cached
  std::vector<Price> near_;        // by host
  Price far_, other_far_, best_;
  int64_t least_lacking_ns_ = kNever;
};

nb::tuple cheapest(const Crowd& first, const std::vector<Row>& decoders, const Loads& loads, const Row& room,
                   const Columns& matches, const Row& hosts, const std::vector<int64_t>& favourites,
                   const RoutingPrices& prices, const Row& profile_of, const std::array<int64_t, 7>& ask,
                   const std::array<int64_t, 3>& holding, int64_t window_steps) {
  const LoadColumns table(loads, room, matches);
  const auto [prompt_tokens, max_tokens, sequences, token_bytes, block_tokens, pieces, state_blocks] = ask;
  if (prompt_tokens < 1 || block_tokens < 1) throw nb::value_error("prompt_tokens and block_tokens must be at least 1");
  const Wanted wanted{prompt_tokens,
                      max_tokens,
                      sequences,
                      block_tokens,
                      Cut{token_bytes, block_tokens, 1},
                      Cut{token_bytes, block_tokens, pieces},
                      holding[0],
                      holding[1],
                      holding[2],
                      state_blocks};
  const auto is_code = [&](int64_t host) { return host >= 0 && static_cast<size_t>(host) <= table.columns; };
  if (hosts.shape(0) != table.columns || !std::ranges::all_of(span_of(hosts), is_code)) {
    throw nb::value_error("give one host per column, 0 to the number of columns");
  }
  const auto is_profile = [&](int64_t at) { return at >= 0 && static_cast<size_t>(at) < prices.profiles.size(); };
  if (profile_of.shape(0) != table.columns || !std::ranges::all_of(span_of(profile_of), is_profile)) {
    throw nb::value_error("give one profile per column");
  }
  if (holding[1] > 0) table.check_numbers(std::span(holding).first(1));
  Weighing weighing(prices.profiles, span_of(profile_of), wanted, table, span_of(hosts), favourites, window_steps);
  for (const Row& numbers : decoders) {
    table.check_numbers(span_of(numbers));
    for (const int64_t at : span_of(numbers)) weighing.offer_decoder(at);
  }
  for (const auto& [numbers, _] : first) {
    table.check_numbers(span_of(numbers));
    for (const int64_t at : span_of(numbers)) weighing.note_first(at);
  }
  for (const auto& [numbers, alone] : first) {
    for (const int64_t at : span_of(numbers)) weighing.offer_first(at, alone);
  }
  const Price& best = weighing.best();
  if (best.first == kNobody) throw nb::value_error("no instances to choose from");
  const nb::object decoder = best.decode_at == kNobody ? nb::object(nb::none()) : nb::object(table.row(best.decode_at));
  return nb::make_tuple(table.row(best.first), decoder, weighing.least_lacking_ns());
}

}  // namespace

void bind_cheapest(nb::module_& m) {
  nb::class_<RoutingPrices>(m, "RoutingPrices")
      .def(
          "__init__",
          [](RoutingPrices* self, const std::vector<std::array<Coefficients, 6>>& profiles) {
            new (self) RoutingPrices{};
            for (const auto& [prefill, decode, swap_in, same_host, network, disk] : profiles) {
              self->profiles.push_back({prefill, decode, swap_in, same_host, network, disk});
            }
          },
          nb::arg("profiles"));
  m.def("cheapest", &cheapest, nb::arg("first"), nb::arg("decoders"), nb::arg("loads"), nb::arg("room"),
        nb::arg("matches"), nb::arg("hosts"), nb::arg("favourites"), nb::arg("prices"), nb::arg("profiles"),
        nb::arg("ask"), nb::arg("holding"), nb::arg("window_steps"));
}

}  // namespace memserve
