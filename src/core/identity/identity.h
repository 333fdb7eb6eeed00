// Block identity: a keyed 128-bit hash chain over (namespace, tokens), the same on every process and machine.
//
//   identity[-1] = namespace
//   identity[i]  = SipHash-2-4-128(key, identity[i-1] || tokens of block i as little-endian int32)
#pragma once
#include "identity/siphash.h"

namespace memserve {

constexpr size_t kIdentityBytes = 16;

inline Hash128 load_identity(const uint8_t* bytes) { return {load_le64(bytes), load_le64(bytes + 8)}; }

inline void store_identity(uint8_t* bytes, Hash128 identity) {
  store_le64(bytes, identity.low);
  store_le64(bytes + 8, identity.high);
}

// One link of the chain over `count` tokens; `key` is 16 bytes.
inline Hash128 next_identity(const uint8_t* key, Hash128 parent, const int32_t* tokens, size_t count) {
  SipHash128 hash(load_le64(key), load_le64(key + 8));
  hash.word(parent.low);
  hash.word(parent.high);
  size_t i = 0;
  for (; i + 2 <= count; i += 2) {
    hash.word(static_cast<uint32_t>(tokens[i]) | static_cast<uint64_t>(static_cast<uint32_t>(tokens[i + 1])) << 32);
  }
  return hash.finish(i < count ? static_cast<uint32_t>(tokens[i]) : 0, 16 + 4 * count);
}

}  // namespace memserve
