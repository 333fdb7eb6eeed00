// Drawing tokens with the vectors of one instruction set (MEMSERVE_ISA).
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "fused_vector.h"
#include "sampling.h"

namespace {

using memserve::sampling::Draw;

constexpr std::ptrdiff_t kChunk = 256;  // tokens with a kept sum and maximum

static inline float max_of(Floats v) {
  float best = v[0];
  for (std::ptrdiff_t i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

static float row_max(const float* x, std::ptrdiff_t n) {
  Floats best = splat(-std::numeric_limits<float>::infinity());
  std::ptrdiff_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Floats v = load(x + i);
    best = v > best ? v : best;
  }
  float top = max_of(best);
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// exp((x - top) / temperature), 0 where that is below the smallest normal number.
static inline Floats weight_of(Floats x, float top, float per_temperature) {
  const Floats z = (x - top) * per_temperature;
  const Floats w = exp_of(z), zero = splat(0.0f);
  return z > -87.0f ? w : zero;
}

struct Chunk {
  double sum;
  float best;
};

struct Candidate {
  float value;
  std::int32_t token;
};

// Larger first; ties go to the lower id.
static inline bool before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.token < b.token);
}

static inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The weights of one row (1 for the best token), and room for everything else that a draw needs; used by one thread.
struct Row {
  std::vector<float> weights;  // padded with zeros to whole chunks
  std::vector<Chunk> chunks;
  std::vector<Candidate> members;
  std::vector<float> bests;
  double total = 0;

  struct Heavy {
    std::int64_t count;
    double mass;
  };

  // Weights below `floor` become 0.
  void weigh(const float* x, std::ptrdiff_t vocab, float temperature, float floor);
  std::int64_t invert(double uniform) const;
  Heavy at_least(float weight) const;
  Candidate last_kept(std::int64_t limit, double mass_limit, double& mass);
  void drop_after(const Candidate& last, float floor);
};

void Row::weigh(const float* x, std::ptrdiff_t vocab, float temperature, float floor) {
  const float top = row_max(x, vocab), per_temperature = 1.0f / std::max(temperature, 1e-30f);
  const std::ptrdiff_t padded = (vocab + kChunk - 1) / kChunk * kChunk;
  weights.resize(padded);
  chunks.resize(padded / kChunk);
  total = 0;
  const Floats least = splat(floor), zero = splat(0.0f);
  for (std::ptrdiff_t c = 0; c < padded / kChunk; ++c) {
    Floats sum = zero, best = zero;
    for (std::ptrdiff_t i = c * kChunk; i < (c + 1) * kChunk; i += kLanes) {
      Floats v;
      if (i + kLanes <= vocab) {
        v = load(x + i);
      } else {
        for (std::ptrdiff_t j = 0; j < kLanes; ++j)
          v[j] = i + j < vocab ? x[i + j] : -std::numeric_limits<float>::infinity();
      }
      Floats w = weight_of(v, top, per_temperature);
      w = w >= least ? w : zero;
      store(weights.data() + i, w);
      sum += w;
      best = w > best ? w : best;
    }
    chunks[c] = {sum_of(sum), max_of(best)};
    total += chunks[c].sum;
  }
}

// The first token at which the cumulative weight exceeds `uniform` of the total: by chunk first, then inside it.
std::int64_t Row::invert(double uniform) const {
  const double target = uniform * total;
  double passed = 0;
  std::size_t c = 0, last = 0;
  for (; c < chunks.size(); ++c) {
    if (chunks[c].sum > 0) last = c;
    if (passed + chunks[c].sum > target) break;
    passed += chunks[c].sum;
  }
  if (c == chunks.size()) c = last;
  std::int64_t token = static_cast<std::int64_t>(c) * kChunk;
  for (std::int64_t i = c * kChunk; i < static_cast<std::int64_t>(c + 1) * kChunk; ++i) {
    if (weights[i] <= 0) continue;
    token = i;
    passed += weights[i];
    if (passed > target) break;
  }
  return token;
}

// The number of tokens with this weight or more, and their mass.
Row::Heavy Row::at_least(float weight) const {
  const Floats least = splat(weight), zero = splat(0.0f);
  Heavy heavy{0, 0};
  Floats sum = zero;
  Ints count{};
  for (std::size_t c = 0, summed = 0; c < chunks.size(); ++c) {
    if (chunks[c].best < weight) continue;
    if (++summed % 8 == 0) heavy.mass += sum_of(sum), sum = zero;  // keep float32 sums short
    for (std::ptrdiff_t i = c * kChunk; i < static_cast<std::ptrdiff_t>(c + 1) * kChunk; i += kLanes) {
      const Floats w = load(weights.data() + i);
      const Ints taken = (Ints)(w >= least);
      sum += (Floats)((Ints)w & taken);
      count -= taken;
    }
  }
  heavy.mass += sum_of(sum);
  for (std::ptrdiff_t j = 0; j < kLanes; ++j) heavy.count += count[j];
  return heavy;
}

constexpr std::int64_t kSortedMax = 256;

// The last token, heaviest first, that is among the first `limit` and begins below `mass_limit`. `mass`: of all tokens
// up to and including it. Bisects the bits of the deciding weight until few tokens are left, and sorts those.
Candidate Row::last_kept(std::int64_t limit, double mass_limit, double& mass) {
  // tokens of weight `high` or more reach no limit; those of `low` or more do, or are all tokens
  std::uint32_t low = bits_of(1.0f), high = low + 1;
  Heavy above{0, 0}, reach = at_least(float_of(low));
  if (limit <= static_cast<std::int64_t>(chunks.size())) {  // that many chunks hold a token of this weight
    bests.clear();
    for (const Chunk& chunk : chunks) bests.push_back(chunk.best);
    std::nth_element(bests.begin(), bests.begin() + limit - 1, bests.end(), std::greater<float>());
    low = std::max(bits_of(bests[limit - 1]), 1u), reach = at_least(float_of(low));
  }
  for (const float guess : {0x1p-6f, 0x1p-12f, 0x1p-24f, float_of(1)}) {
    if (reach.count >= limit || reach.mass >= mass_limit) break;
    high = low, above = reach;
    low = bits_of(guess), reach = at_least(guess);
  }
  while (high - low > 1 && reach.count - above.count > kSortedMax) {
    const std::uint32_t middle = low + (high - low) / 2;
    const Heavy heavy = at_least(float_of(middle));
    const bool reaches = heavy.count >= limit || heavy.mass >= mass_limit;
    (reaches ? low : high) = middle;
    (reaches ? reach : above) = heavy;
  }
  members.clear();
  const float least = float_of(low), most = float_of(high);
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    if (chunks[c].best < least) continue;
    for (std::ptrdiff_t i = c * kChunk; i < static_cast<std::ptrdiff_t>(c + 1) * kChunk; ++i)
      if (weights[i] >= least && weights[i] < most) members.push_back({weights[i], static_cast<std::int32_t>(i)});
  }
  std::sort(members.begin(), members.end(), before);
  mass = above.mass;
  for (const Candidate& member : members) {
    mass += member.value;
    if (++above.count >= limit || mass >= mass_limit) return member;
  }
  // All possible tokens together reach neither limit: there are fewer than `limit`, or rounding separates their mass
  // from `mass_limit`. All are kept; there may be none in [low, high).
  return {float_of(1), static_cast<std::int32_t>(weights.size()) - 1};
}

// Only tokens up to `last`, heaviest first, with a weight of at least `floor` keep their weights.
void Row::drop_after(const Candidate& last, float floor) {
  const Floats least = splat(std::max(last.value, floor)), zero = splat(0.0f);
  total = 0;
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    Floats sum = zero;
    const std::ptrdiff_t first = c * kChunk;
    if (chunks[c].best >= std::max(last.value, floor)) {
      for (std::ptrdiff_t i = first; i < first + kChunk; i += kLanes) {
        Floats w = load(weights.data() + i);
        w = w >= least ? w : zero;
        if (i + kLanes > last.token + 1)  // tokens equal to `last` behind it
          for (std::ptrdiff_t j = std::max<std::ptrdiff_t>(0, last.token + 1 - i); j < kLanes; ++j)
            w[j] = w[j] == last.value ? 0.0f : w[j];
        store(weights.data() + i, w);
        sum += w;
      }
    }
    chunks[c].sum = sum_of(sum);
    total += chunks[c].sum;
  }
}

static std::int64_t draw_row(Row& row, const Draw& op, std::ptrdiff_t i) {
  const float* x = op.logits + op.rows[i] * op.stride;
  const std::int64_t top_k = op.top_k[i] < op.vocab ? op.top_k[i] : 0;
  const float top_p = op.top_p[i], min_p = std::min(op.min_p[i], 1.0f);
  const bool ranked = top_k > 0 || top_p < 1;
  row.weigh(x, op.vocab, op.temperature[i], ranked ? 0.0f : min_p);
  if (!(row.total > 0)) return 0;  // no token is possible, or a logit is NaN
  if (ranked) {
    const std::int64_t limit = top_k > 0 ? top_k : op.vocab;
    double mass = row.total;
    Candidate last{};
    if (top_k > 0) last = row.last_kept(limit, std::numeric_limits<double>::infinity(), mass);
    if (top_p < 1) last = row.last_kept(limit, static_cast<double>(top_p) * mass, mass);
    row.drop_after(last, min_p);
  }
  return row.invert(op.uniform[i]);
}

static void draw(const Draw& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  static thread_local Row row;
  for (std::ptrdiff_t i = begin; i < end; ++i) op.tokens[i] = draw_row(row, op, i);
}

static void normalise(const float* x, std::ptrdiff_t vocab, float* out) {
  static thread_local Row row;
  row.weigh(x, vocab, 1.0f, 0.0f);
  *out = static_cast<float>(row_max(x, vocab) + std::log(row.total));
}

// The best values of the chunks bound how large a value must be to qualify; few tokens are that large.
static void best(const float* x, std::ptrdiff_t vocab, std::ptrdiff_t count, float* values, std::int64_t* tokens) {
  static thread_local std::vector<float> bests;
  static thread_local std::vector<Candidate> found;
  const std::ptrdiff_t chunks = (vocab + kChunk - 1) / kChunk;
  bests.clear(), found.clear();
  for (std::ptrdiff_t c = 0; c < chunks; ++c) bests.push_back(row_max(x + c * kChunk, std::min(kChunk, vocab - c * kChunk)));
  float least = -std::numeric_limits<float>::infinity();
  if (count <= chunks) {
    std::vector<float> ordered(bests);
    std::nth_element(ordered.begin(), ordered.begin() + count - 1, ordered.end(), std::greater<float>());
    least = ordered[count - 1];
  }
  for (std::ptrdiff_t c = 0; c < chunks; ++c)
    if (bests[c] >= least)
      for (std::ptrdiff_t i = c * kChunk; i < std::min((c + 1) * kChunk, vocab); ++i)
        if (x[i] >= least) found.push_back({x[i], static_cast<std::int32_t>(i)});
  const std::ptrdiff_t kept = std::min<std::ptrdiff_t>(count, found.size());
  std::partial_sort(found.begin(), found.begin() + kept, found.end(), before);
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    values[i] = i < kept ? found[i].value : -std::numeric_limits<float>::infinity();
    tokens[i] = i < kept ? found[i].token : 0;
  }
}

}  // namespace

namespace memserve::MEMSERVE_ISA {
extern const sampling::Kernels sampling_kernels;
const sampling::Kernels sampling_kernels{&draw, &normalise, &best};
}  // namespace memserve::MEMSERVE_ISA
