// Keys of the store at the border to Python: 16 bytes each, one behind the other where there are several.
#pragma once
#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "identity/identity.h"

namespace memserve {

inline Hash128 key_of(const nanobind::bytes& key) {
  if (key.size() != kIdentityBytes) throw nanobind::value_error("a key has 16 bytes");
  return load_identity(static_cast<const uint8_t*>(key.data()));
}

inline nanobind::bytes bytes_of(Hash128 key) {
  uint8_t bytes[kIdentityBytes];
  store_identity(bytes, key);
  return nanobind::bytes(bytes, sizeof bytes);
}

// 16 bytes a key, one behind the other: `each(add)` calls `add` with each of about `count` keys.
template <class Each>
nanobind::bytes joined_keys(size_t count, Each each) {
  std::string keys;
  keys.reserve(count * kIdentityBytes);
  each([&](Hash128 key) {
    uint8_t bytes[kIdentityBytes];
    store_identity(bytes, key);
    keys.append(reinterpret_cast<const char*>(bytes), sizeof bytes);
  });
  return nanobind::bytes(keys.data(), keys.size());
}

inline std::vector<Hash128> keys_of(const nanobind::bytes& keys) {
  if (keys.size() % kIdentityBytes) throw nanobind::value_error("keys have 16 bytes each");
  std::vector<Hash128> all(keys.size() / kIdentityBytes);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = load_identity(static_cast<const uint8_t*>(keys.data()) + i * kIdentityBytes);
  }
  return all;
}

}  // namespace memserve
