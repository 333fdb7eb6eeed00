// SipHash-2-4 with 128-bit output (Aumasson and Bernstein; reference vectors in tests/unit/core/test_identity.py).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace memserve {

struct Hash128 {
  uint64_t low, high;
};

// Incremental over 64-bit little-endian words; the message length is known beforehand.
class SipHash128 {
 public:
  SipHash128(uint64_t key0, uint64_t key1)
      : v0_(key0 ^ 0x736f6d6570736575ull),
        v1_(key1 ^ 0x646f72616e646f6dull ^ 0xee),
        v2_(key0 ^ 0x6c7967656e657261ull),
        v3_(key1 ^ 0x7465646279746573ull) {}

  void word(uint64_t m) {
    v3_ ^= m;
    round();
    round();
    v0_ ^= m;
  }

  // `last`: the up to 7 bytes behind the last whole word, little-endian; `length`: bytes of the whole message.
  Hash128 finish(uint64_t last, size_t length) {
    word(last | static_cast<uint64_t>(length & 0xff) << 56);
    v2_ ^= 0xee;
    for (int i = 0; i < 4; ++i) round();
    const uint64_t low = v0_ ^ v1_ ^ v2_ ^ v3_;
    v1_ ^= 0xdd;
    for (int i = 0; i < 4; ++i) round();
    return {low, v0_ ^ v1_ ^ v2_ ^ v3_};
  }

 private:
  static uint64_t rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

  void round() {
    v0_ += v1_; v1_ = rotate(v1_, 13); v1_ ^= v0_; v0_ = rotate(v0_, 32);
    v2_ += v3_; v3_ = rotate(v3_, 16); v3_ ^= v2_;
    v0_ += v3_; v3_ = rotate(v3_, 21); v3_ ^= v0_;
    v2_ += v1_; v1_ = rotate(v1_, 17); v1_ ^= v2_; v2_ = rotate(v2_, 32);
  }

  uint64_t v0_, v1_, v2_, v3_;
};

// A 64-bit word of a byte string, little-endian on every machine.
inline uint64_t load_le64(const uint8_t* bytes, size_t count = 8) {
  uint64_t word = 0;
  for (size_t i = 0; i < count; ++i) word |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  return word;
}

inline void store_le64(uint8_t* bytes, uint64_t word) {
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(word >> (8 * i));
}

inline Hash128 siphash128(const uint8_t key[16], const uint8_t* data, size_t size) {
  SipHash128 hash(load_le64(key), load_le64(key + 8));
  size_t i = 0;
  for (; i + 8 <= size; i += 8) hash.word(load_le64(data + i));
  return hash.finish(load_le64(data + i, size - i), size);
}

}  // namespace memserve
