#include "codec/kv_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "codec/tiers.h"
#include "transfer/seal_sums.h"

namespace memserve::codec {

namespace {

constexpr uint32_t kMagic = 0x434b564d;  // "MVKC"
constexpr size_t kTiers = 3;
constexpr size_t kSamples = 256;                             // of a chunk
constexpr size_t kLooks = 16;                                // chunks by which a value is judged
constexpr size_t kChunkHeadBytes = 1 + 2 * kTiers;           // widths, and how many exponents go on behind each tier
constexpr uint8_t kRaw = 0;                                  // in the place of the widths

struct Head {
  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  Floats floats = Floats::bfloat16;
  uint16_t unused = 0;
  uint64_t value_bytes = 0;
  uint64_t encoded_bytes = 0;
};
static_assert(sizeof(Head) == kHeadBytes);

constexpr size_t float_bytes(Floats floats) { return floats == Floats::float32 ? 4 : 2; }

// The bits of each float that are no exponent.
constexpr unsigned rest_bits(Floats floats) {
  return floats == Floats::bfloat16 ? 8 : floats == Floats::float16 ? 11 : 24;
}

constexpr size_t rest_bytes(Floats floats, size_t count) {
  if (floats == Floats::float16) return count + groups_of(count) * 24;
  return floats == Floats::float32 ? 3 * count : count;
}

uint8_t exponent_at(const uint8_t* src, size_t index, Floats floats) {
  uint16_t bits;
  std::memcpy(&bits, src + (floats == Floats::float32 ? 4 * index + 2 : 2 * index), sizeof bits);
  return floats == Floats::float16 ? bits >> 10 & 0x1f : static_cast<uint8_t>(bits >> 7);
}

// How a chunk is written.
struct Plan {
  int widths[kTiers] = {};                                   // 0: no such tier
  uint8_t tables[kTiers][8] = {};
  size_t bits = 0;                                           // of the sample, tables aside

  uint8_t packed_widths() const { return static_cast<uint8_t>(widths[0] | widths[1] << 2 | widths[2] << 4); }
};

// The exponents of a sample, the commonest first, then some that are near: as many as the tables can hold.
class Sample {
 public:
  Sample(const uint8_t* src, size_t count, Floats floats) {
    samples_ = std::min(count, kSamples);
    const size_t stride = std::bit_floor(count / samples_);
    for (size_t i = 0; i < samples_; ++i) {
      // Not every n-th: exponents of one channel often lie a power of two apart.
      ++times_[i & 1][exponent_at(src, i * stride + ((i * 5 + i / 8) & (stride - 1)), floats)];
    }
    for (size_t word = 0; word < 256; word += 8) {
      uint64_t both[2];
      std::memcpy(&both[0], times_[0] + word, 8);
      std::memcpy(&both[1], times_[1] + word, 8);
      if (!(both[0] | both[1])) continue;
      for (size_t exponent = word; exponent < word + 8; ++exponent) {
        if (const unsigned times = times_[0][exponent] + times_[1][exponent]) insert(exponent, times);
      }
    }
    add_near();
  }

  size_t samples() const { return samples_; }

  Plan best_plan(Floats floats) const {
    unsigned below[kRanksMax + 1];                           // samples behind the first n exponents
    below[0] = static_cast<unsigned>(samples_);
    for (size_t rank = 0; rank < kRanksMax; ++rank) below[rank + 1] = below[rank] - (rank < ranks_ ? count_[rank] : 0);
    size_t best = samples_ * 8;
    int widths[kTiers] = {};
    for (int first = 1; first <= kWidthMax; ++first) {
      const size_t one = (1u << first) - 1, bits_one = first * below[0];
      for (int second = 1; second <= kWidthMax; ++second) {
        const size_t two = one + (1u << second) - 1, bits_two = bits_one + second * below[one];
        if (bits_two >= best) continue;
        for (int third = 1; third <= kWidthMax; ++third) {
          const size_t three = two + (1u << third) - 1;
          const size_t bits = bits_two + third * below[two] + 8 * below[three];
          if (bits >= best) continue;
          best = bits;
          widths[0] = first, widths[1] = second, widths[2] = third;
        }
      }
    }
    Plan plan;
    plan.bits = best + samples_ * rest_bits(floats);
    size_t rank = 0;
    for (size_t tier = 0; tier < kTiers; ++tier) {
      plan.widths[tier] = widths[tier];
      for (int code = 0; code < (1 << widths[tier]) - 1; ++code) plan.tables[tier][code] = exponent_[rank++];
    }
    return plan;
  }

 private:
  static constexpr size_t kRanksMax = kTiers * kTableMax;

  void insert(size_t exponent, unsigned times) {
    size_t rank = ranks_ < kRanksMax ? ranks_++ : kRanksMax;
    if (rank == kRanksMax && count_[--rank] >= times) return;
    for (; rank > 0 && count_[rank - 1] < times; --rank) {
      exponent_[rank] = exponent_[rank - 1];
      count_[rank] = count_[rank - 1];
    }
    exponent_[rank] = static_cast<uint8_t>(exponent);
    count_[rank] = static_cast<uint16_t>(times);
  }

  // What the sample missed is most likely next to what it has: below, then above. Tables need that many in any case.
  void add_near() {
    uint8_t low = exponent_[0], high = exponent_[0];
    size_t rank = ranks_;
    while (rank < kRanksMax) {
      bool grows = false;
      while (low > 0 && taken(--low)) {
      }
      if (!taken(low)) exponent_[rank++] = low, mark(low), grows = true;
      if (rank == kRanksMax) break;
      while (high < 255 && taken(++high)) {
      }
      if (!taken(high)) exponent_[rank++] = high, mark(high), grows = true;
      if (!grows) break;
    }
    for (; rank < kRanksMax; ++rank) exponent_[rank] = 0;    // never: there are 256
  }

  bool taken(uint8_t exponent) const { return times_[0][exponent] | times_[1][exponent]; }
  void mark(uint8_t exponent) { times_[0][exponent] = 1; }

  size_t samples_ = 0, ranks_ = 0;
  alignas(8) uint8_t times_[2][256] = {};
  uint8_t exponent_[kRanksMax] = {};
  uint16_t count_[kRanksMax] = {};
};

class Writer {
 public:
  explicit Writer(uint8_t* to) : to_(to) {}
  void put(const void* from, size_t bytes) {
    std::memcpy(to_, from, bytes);
    to_ += bytes;
  }
  uint8_t* take(size_t bytes) {
    uint8_t* const begin = to_;
    to_ += bytes;
    return begin;
  }
  uint8_t* end() const { return to_; }

 private:
  uint8_t* to_;
};

// At any address: what compilers make vector loads of.
using Half = uint16_t __attribute__((aligned(1), may_alias));
using Word = uint32_t __attribute__((aligned(1), may_alias));

void split_words(const uint8_t* src, size_t count, uint8_t* high, uint8_t* low) {
  const auto* const words = reinterpret_cast<const Word*>(src);
  auto* __restrict const highs = reinterpret_cast<Half*>(high);
  auto* __restrict const lows = reinterpret_cast<Half*>(low);
  for (size_t i = 0; i < count; ++i) {
    lows[i] = static_cast<uint16_t>(words[i]);
    highs[i] = static_cast<uint16_t>(words[i] >> 16);
  }
}

void join_words(const uint8_t* high, const uint8_t* low, size_t count, uint8_t* out) {
  const auto* const highs = reinterpret_cast<const Half*>(high);
  const auto* const lows = reinterpret_cast<const Half*>(low);
  auto* __restrict const words = reinterpret_cast<Word*>(out);
  for (size_t i = 0; i < count; ++i) words[i] = uint32_t{highs[i]} << 16 | lows[i];
}

// Scratch memory of a chunk: exponents that a tier has passed on, and the upper halves of float32.
struct Scratch {
  alignas(64) uint8_t escapes[kTiers + 1][kScratchBytes];
  alignas(64) uint8_t upper[2 * kChunkFloats];
};

// Returns where the chunk ends.
uint8_t* encode_chunk(const uint8_t* src, size_t count, Floats floats, Scratch& scratch, uint8_t* out) {
  const size_t raw_bytes = count * float_bytes(floats);
  const Path& path = codec::path();
  const Plan plan = Sample(src, count, floats).best_plan(floats);
  Writer writer(out);
  uint8_t* const head = writer.take(kChunkHeadBytes);
  if (plan.widths[0] > 0) {
    head[0] = plan.packed_widths();
    for (size_t tier = 0; tier < kTiers; ++tier) {
      writer.put(plan.tables[tier], (size_t{1} << plan.widths[tier]) - 1);
    }
    uint8_t* const low = writer.take(rest_bytes(floats, count));
    uint8_t* planes = writer.take(plane_bytes(count, plan.widths[0]));
    const uint8_t* words = src;
    if (floats == Floats::float32) {
      split_words(src, count, scratch.upper, low + count);
      words = scratch.upper;
    }
    const auto escaped_of_split =
        floats == Floats::float16
            ? path.split_half(words, count, plan.tables[0], plan.widths[0], low, low + count, planes, scratch.escapes[0])
            : path.split(words, count, plan.tables[0], plan.widths[0], low, planes, scratch.escapes[0]);
    auto escaped = static_cast<uint16_t>(escaped_of_split);
    std::memcpy(head + 1, &escaped, sizeof escaped);
    for (size_t tier = 1; tier < kTiers; ++tier) {
      planes = writer.take(plane_bytes(escaped, plan.widths[tier]));
      escaped = static_cast<uint16_t>(path.pack(scratch.escapes[tier - 1], escaped, plan.tables[tier],
                                                plan.widths[tier], planes, scratch.escapes[tier]));
      std::memcpy(head + 1 + 2 * tier, &escaped, sizeof escaped);
    }
    writer.put(scratch.escapes[kTiers - 1], escaped);
    if (static_cast<size_t>(writer.end() - out) < 1 + raw_bytes) return writer.end();
  }
  return nullptr;
}

uint8_t* encode_or_copy_chunk(const uint8_t* src, size_t count, Floats floats, Scratch& scratch, uint8_t* out) {
  if (uint8_t* const end = encode_chunk(src, count, floats, scratch, out)) return end;
  *out = kRaw;
  std::memcpy(out + 1, src, count * float_bytes(floats));
  return out + 1 + count * float_bytes(floats);
}

class Reader {
 public:
  Reader(const uint8_t* from, size_t bytes) : from_(from), left_(bytes) {}
  // Null: there are fewer.
  const uint8_t* take(size_t bytes) {
    if (bytes > left_) return nullptr;
    const uint8_t* const begin = from_;
    from_ += bytes;
    left_ -= bytes;
    return begin;
  }
  size_t left() const { return left_; }

 private:
  const uint8_t* from_;
  size_t left_;
};

bool decode_chunk(Reader& reader, size_t count, Floats floats, Scratch& scratch, uint8_t* out) {
  const uint8_t* const widths_byte = reader.take(1);
  if (!widths_byte) return false;
  if (*widths_byte == kRaw) {
    const uint8_t* const raw = reader.take(count * float_bytes(floats));
    if (raw) std::memcpy(out, raw, count * float_bytes(floats));
    return raw != nullptr;
  }
  const int widths[kTiers] = {*widths_byte & 3, *widths_byte >> 2 & 3, *widths_byte >> 4 & 3};
  if (*widths_byte >> 6 || !widths[0] || !widths[1] || !widths[2]) return false;
  const uint8_t* const counts = reader.take(2 * kTiers);
  if (!counts) return false;
  uint16_t escaped[kTiers];
  std::memcpy(escaped, counts, sizeof escaped);
  if (escaped[0] > count || escaped[1] > escaped[0] || escaped[2] > escaped[1]) return false;
  uint8_t tables[kTiers][8] = {};
  for (size_t tier = 0; tier < kTiers; ++tier) {
    const size_t length = (size_t{1} << widths[tier]) - 1;
    const uint8_t* const table = reader.take(length);
    if (!table) return false;
    std::memcpy(tables[tier], table, length);
  }
  const uint8_t* const low = reader.take(rest_bytes(floats, count));
  const uint8_t* planes[kTiers];
  planes[0] = reader.take(plane_bytes(count, widths[0]));
  for (size_t tier = 1; tier < kTiers; ++tier) planes[tier] = reader.take(plane_bytes(escaped[tier - 1], widths[tier]));
  const uint8_t* const last = reader.take(escaped[kTiers - 1]);
  if (!low || !planes[0] || !planes[1] || !planes[2] || !last) return false;
  const Path& path = codec::path();
  // Scratch memory holds as many as there are floats, whatever the planes say: how many were taken is compared.
  std::memcpy(scratch.escapes[kTiers - 1], last, escaped[kTiers - 1]);
  for (size_t tier = kTiers - 1; tier > 0; --tier) {
    const size_t taken = path.unpack(planes[tier], escaped[tier - 1], tables[tier], widths[tier],
                                     scratch.escapes[tier], scratch.escapes[tier - 1]);
    if (taken != escaped[tier]) return false;
  }
  if (floats == Floats::float16) {
    return path.join_half(low, low + count, planes[0], count, tables[0], widths[0], scratch.escapes[0], out) ==
           escaped[0];
  }
  uint8_t* const upper = floats == Floats::float32 ? scratch.upper : out;
  if (path.join(low, planes[0], count, tables[0], widths[0], scratch.escapes[0], upper) != escaped[0]) return false;
  if (floats == Floats::float32) join_words(upper, low + count, count, out);
  return true;
}

// Bits that a float takes, by samples of some chunks, tables included.
double bits_a_float(const uint8_t* src, size_t count, Floats floats) {
  const size_t chunks = count / kChunkFloats, looks = std::min(kLooks / 4, chunks);
  size_t bits = 0, samples = 0;
  for (size_t look = 0; look < std::max<size_t>(looks, 1); ++look) {
    const size_t chunk = looks ? look * chunks / looks : 0;
    const Sample sample(src + chunk * kChunkFloats * float_bytes(floats),
                        std::min(count - chunk * kChunkFloats, kChunkFloats), floats);
    bits += sample.best_plan(floats).bits;
    samples += sample.samples();
  }
  return static_cast<double>(bits) / static_cast<double>(samples) + 0.1;
}

}  // namespace

std::optional<Floats> detect(const uint8_t* src, size_t bytes) {
  std::optional<Floats> best;
  double share_best = 1 - 1.0 / 30;
  for (const Floats floats : {Floats::bfloat16, Floats::float16, Floats::float32}) {
    const size_t count = bytes / float_bytes(floats);
    if (count == 0) continue;
    const double share = bits_a_float(src, count, floats) / (8.0 * static_cast<double>(float_bytes(floats)));
    if (share < share_best) best = floats, share_best = share;
  }
  return best;
}

size_t encoded_bytes_max(size_t bytes, size_t values) {
  // The last chunk may be longer than it is raw before it is given up.
  return values * (kHeadBytes + bytes + bytes / (2 * kChunkFloats) + 1) + 8 * kChunkFloats;
}

size_t encode(const uint8_t* src, size_t bytes, Floats floats, uint8_t* out) {
  const size_t count = bytes / float_bytes(floats), most = bytes - bytes / 32;
  thread_local Scratch scratch;
  uint8_t* to = out + kHeadBytes;
  size_t chunks = 0;
  for (size_t from = 0; from < count; from += kChunkFloats) {
    const size_t here = std::min(kChunkFloats, count - from);
    to = encode_or_copy_chunk(src + from * float_bytes(floats), here, floats, scratch, to);
    const size_t done = (from + here) * float_bytes(floats);
    // A value that begins without any gain will bring none.
    if (++chunks == kLooks && static_cast<size_t>(to - out) > done - done / 32) return 0;
  }
  const size_t rest = bytes - count * float_bytes(floats);
  if (rest > 0) std::memcpy(to, src + bytes - rest, rest);
  to += rest;
  const auto encoded_bytes = static_cast<size_t>(to - out);
  if (encoded_bytes > most) return 0;
  Head head;
  head.floats = floats;
  head.value_bytes = bytes;
  head.encoded_bytes = encoded_bytes;
  std::memcpy(out, &head, sizeof head);
  return encoded_bytes;
}

Decoded decode(const uint8_t* src, size_t src_bytes, uint8_t* out, size_t bytes) {
  Head head;
  if (src_bytes < sizeof head) return {};
  std::memcpy(&head, src, sizeof head);
  const bool known = head.magic == kMagic && head.version == kVersion && head.unused == 0 &&
                     (head.floats == Floats::bfloat16 || head.floats == Floats::float16 || head.floats == Floats::float32);
  if (!known || head.value_bytes != bytes || head.encoded_bytes > src_bytes || head.encoded_bytes < sizeof head) return {};
  Reader reader(src + sizeof head, head.encoded_bytes - sizeof head);
  const size_t float_size = float_bytes(head.floats), count = bytes / float_size;
  thread_local Scratch scratch;
  SealSums sums;
  size_t sealed = 0;  // whole stripes, until the end
  for (size_t from = 0; from < count; from += kChunkFloats) {
    const size_t here = std::min(kChunkFloats, count - from);
    if (!decode_chunk(reader, here, head.floats, scratch, out + from * float_size)) return {};
    const size_t done = (from + here) * float_size;
    if (from + here == count) break;
    sums += seal_sums(out + sealed, nullptr, sealed, done - sealed);
    sealed = done;
  }
  const size_t rest = bytes - count * float_size;
  const uint8_t* const behind = reader.take(rest);
  if (!behind || reader.left() > 0) return {};
  std::memcpy(out + bytes - rest, behind, rest);
  if (bytes > sealed) sums += seal_sums(out + sealed, nullptr, sealed, bytes - sealed);
  return {head.encoded_bytes, bytes > 0 ? sums.finish(bytes) : 0};
}

}  // namespace memserve::codec
