// The checksum that travels with KV: sums of keyed products over 64-byte stripes, in eight lanes.
//
//   x       = word[s][l] ^ (key[l] + s * golden)           s: stripe, l: lane; every position has a key of its own
//   sum[l] += low32(x) * high32(x)  +  word[s][l ^ 1]
//   seal    = mix of all sums and the length
//
// A flipped bit always changes the sum of its neighbour's lane, by the word itself; its own lane by half of a product.
// Words that swap places are combined with other keys. Sums commute, so threads may share a range. The last stripe is
// filled with zeros, which the length tells from data. It uses no secret: it detects damage, not forgery.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace memserve {

constexpr size_t kStripeBytes = 64;

struct SealSums {
  uint64_t lane[8] = {};

  SealSums& operator+=(const SealSums& other) {
    for (int l = 0; l < 8; ++l) lane[l] += other.lane[l];
    return *this;
  }
  // The seal of the whole range.
  uint64_t finish(size_t range_bytes) const;
};

// Sums over `bytes` bytes that begin `offset` bytes behind their range's start; `offset` is a multiple of a stripe.
// With `dst` the bytes are copied there on the way; the two must not overlap.
SealSums seal_sums(const uint8_t* src, uint8_t* dst, size_t offset, size_t bytes);

// The instruction sets with an implementation that this processor supports, the best last; all give the same seals.
std::vector<std::string> seal_isas();
// Uses one of them from now on; "" = the best. Returns false if there is no such one. For tests.
bool force_seal_isa(const std::string& name);

}  // namespace memserve
