// The inner loops of the codec (kv_codec.h), for each instruction set.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "codec/kv_codec.h"

namespace memserve::codec {

constexpr int kWidthMax = 3;
constexpr int kTableMax = 7;         // (1 << kWidthMax) - 1 exponents
constexpr size_t kGroup = 64;        // exponents whose planes lie together
constexpr size_t kSlackBytes = 64;   // that a loop may read or write behind exponents in scratch memory
constexpr size_t kScratchBytes = kChunkFloats + kSlackBytes;

constexpr size_t groups_of(size_t count) { return (count + kGroup - 1) / kGroup; }
constexpr size_t plane_bytes(size_t count, int width) { return groups_of(count) * 8 * static_cast<size_t>(width); }

// `table`: of 8 bytes, (1 << width) - 1 of which count and differ. Exponents are bytes in scratch memory. Each returns
// how many exponents are in no table: they were appended to `escapes`, or taken from there.
struct Path {
  const char* name;
  // Floats at `src` to mantissas and the planes of their exponents. `bits16`: those of bfloat16, else of float16, whose
  // mantissas have three planes a group at `high` and a byte each at `low`.
  size_t (*split)(const uint8_t* src, size_t count, const uint8_t* table, int width, uint8_t* low, uint8_t* planes,
                  uint8_t* escapes);
  size_t (*split_half)(const uint8_t* src, size_t count, const uint8_t* table, int width, uint8_t* low, uint8_t* high,
                       uint8_t* planes, uint8_t* escapes);
  size_t (*pack)(const uint8_t* exponents, size_t count, const uint8_t* table, int width, uint8_t* planes,
                 uint8_t* escapes);
  size_t (*unpack)(const uint8_t* planes, size_t count, const uint8_t* table, int width, const uint8_t* escapes,
                   uint8_t* exponents);
  size_t (*join)(const uint8_t* low, const uint8_t* planes, size_t count, const uint8_t* table, int width,
                 const uint8_t* escapes, uint8_t* out);
  size_t (*join_half)(const uint8_t* low, const uint8_t* high, const uint8_t* planes, size_t count,
                      const uint8_t* table, int width, const uint8_t* escapes, uint8_t* out);
};

const Path& path();

}  // namespace memserve::codec
