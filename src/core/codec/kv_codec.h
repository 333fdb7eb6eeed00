// KV made smaller without losing a bit: floats whose exponents are written in fewer bits.
//
// The exponents of keys and values are few and uneven (2.7 bits each in real KV); sign and mantissa are noise. A value is
// cut into chunks of 2,048 floats, each of which says for itself how its exponents are written:
//
//   value   | head | chunk | chunk | ... | bytes behind the last whole float |
//   chunk   | widths | counts | tables | mantissas | tier 1 | tier 2 | tier 3 | exponents in no table |
//
// Tier 1 has `width` bits for each float: the number of its exponent in the chunk's first table, or all ones: then the
// exponent is the next of tier 2, which is written in the same way with the second table, and so on; what is in none of
// the three tables follows in whole bytes. Tables and widths are chosen by a sample of the chunk, the commonest exponents
// first. A chunk that does not become shorter is written as it is: the encoding is at most a byte a chunk and the head
// longer than the value.
//
// Bits lie in planes: of each 64 exponents first the lowest bit of each, then the next. A mask register of AVX-512 has
// one plane's bits. Every instruction set writes the same bytes.
//
// Decoding never reads or writes out of bounds, whatever it is given: what does not fit ends in `damaged`. That what has
// been decoded is what was encoded only a checksum over the original says.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace memserve::codec {

// What the floats are.
enum class Floats : uint8_t { bfloat16 = 1, float16 = 2, float32 = 3 };

constexpr uint8_t kVersion = 1;
constexpr size_t kHeadBytes = 24;
constexpr size_t kChunkFloats = 2048;

// The kind of floats whose encoding is shortest, by a sample. Nothing: none becomes shorter by a thirtieth.
std::optional<Floats> detect(const uint8_t* src, size_t bytes);

// The memory that `encode` may write, for several values one behind the other of which each becomes shorter.
size_t encoded_bytes_max(size_t bytes, size_t values = 1);

// Bytes of the encoding; 0: it would not be shorter by a thirty-second of the value.
size_t encode(const uint8_t* src, size_t bytes, Floats floats, uint8_t* out);

struct Decoded {
  size_t encoded_bytes = 0;  // 0: damaged
  uint64_t seal = 0;         // of what was written (seal_sums.h); 0 of nothing
};

// Writes the value, which must have `bytes` bytes. What lies behind its encoding in `src` is not looked at.
Decoded decode(const uint8_t* src, size_t src_bytes, uint8_t* out, size_t bytes);

// The instruction sets that this processor supports, the best last.
std::vector<std::string> isas();
// Uses one of them from now on; "" = the best. False: there is no such one. For tests.
bool force_isa(const std::string& name);

}  // namespace memserve::codec
