// Packs tensors of GGUF files, and grouped integers, into the strips that the kernels read: integers and scales as they
// are, in another order. See quantised.h for the layout, quantised_values.h for the bits of a line.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "quantised.h"

namespace memserve::quantised {
namespace {

constexpr std::ptrdiff_t kBlockMax = 256;  // inputs

// A block of one output: integers without a sign, and its scales. `minimum` is subtracted: float16 bits.
struct Decoded {
  std::uint8_t values[kBlockMax];
  std::uint16_t scale = 0, minimum = 0;
  float single = 0;
  std::int8_t scales[16] = {}, minima[16] = {};  // small ones, of each part of each group
};

std::uint16_t half_at(const std::uint8_t* p) {
  std::uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

constexpr std::uint16_t kSign = 0x8000;

// `count` bytes with two values each: the low halves first.
void split_halves(const std::uint8_t* from, std::uint8_t* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = from[i] & 15;
  for (int i = 0; i < count; ++i) to[count + i] = from[i] >> 4;
}

void add_fifth_bits(const std::uint8_t* from, std::uint8_t* to) {
  std::uint32_t bits;
  std::memcpy(&bits, from, 4);
  for (int i = 0; i < 32; ++i) to[i] |= ((bits >> i) & 1) << 4;
}

// The twelve bytes of 6-bit scales and minima of Q4_K and Q5_K.
void read_levels(const std::uint8_t* from, Decoded& to) {
  for (int i = 0; i < 4; ++i) {
    to.scales[i] = from[i] & 63;
    to.minima[i] = from[4 + i] & 63;
    to.scales[4 + i] = (from[8 + i] & 15) | (from[i] >> 6 << 4);
    to.minima[4 + i] = (from[8 + i] >> 4) | (from[4 + i] >> 6 << 4);
  }
}

void decode_q2_k(const std::uint8_t* from, Decoded& to) {
  for (int i = 0; i < 16; ++i) to.scales[i] = from[i] & 15, to.minima[i] = from[i] >> 4;
  for (int i = 0; i < 256; ++i) to.values[i] = (from[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
  to.scale = half_at(from + 80), to.minimum = half_at(from + 82);
}

void decode_q3_k(const std::uint8_t* from, Decoded& to) {
  const std::uint8_t *high = from, *low = from + 32, *levels = from + 96;
  for (int i = 0; i < 256; ++i) {
    const int two = (low[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
    to.values[i] = static_cast<std::uint8_t>(two | ((high[i % 32] >> (i / 32)) & 1) << 2);
  }
  for (int i = 0; i < 16; ++i) {
    const int four = i < 8 ? levels[i] & 15 : levels[i - 8] >> 4;
    to.scales[i] = static_cast<std::int8_t>((four | ((levels[8 + i % 4] >> (i / 4 * 2)) & 3) << 4) - 32);
  }
  to.scale = half_at(from + 108);
}

void decode_q4_k(const std::uint8_t* from, Decoded& to) {
  to.scale = half_at(from), to.minimum = half_at(from + 2);
  read_levels(from + 4, to);
  for (int i = 0; i < 4; ++i) split_halves(from + 16 + 32 * i, to.values + 64 * i, 32);
}

void decode_q5_k(const std::uint8_t* from, Decoded& to) {
  to.scale = half_at(from), to.minimum = half_at(from + 2);
  read_levels(from + 4, to);
  for (int i = 0; i < 4; ++i) split_halves(from + 48 + 32 * i, to.values + 64 * i, 32);
  for (int i = 0; i < 256; ++i) to.values[i] |= ((from[16 + i % 32] >> (i / 32)) & 1) << 4;
}

void decode_q6_k(const std::uint8_t* from, Decoded& to) {
  for (int half = 0; half < 2; ++half) {
    split_halves(from + 64 * half, to.values + 128 * half, 64);
    const std::uint8_t* high = from + 128 + 32 * half;
    for (int i = 0; i < 128; ++i) to.values[128 * half + i] |= ((high[i % 32] >> (i / 32 * 2)) & 3) << 4;
  }
  std::memcpy(to.scales, from + 192, 16);
  to.scale = half_at(from + 208);
}

void decode_iq4_xs(const std::uint8_t* from, Decoded& to) {
  to.scale = half_at(from);
  const std::uint16_t high = half_at(from + 2);
  for (int i = 0; i < 8; ++i) {
    const int low = (from[4 + i / 2] >> (i % 2 * 4)) & 15;
    to.scales[i] = static_cast<std::int8_t>((low | ((high >> (2 * i)) & 3) << 4) - 32);
    split_halves(from + 8 + 16 * i, to.values + 32 * i, 16);
  }
}

// Formats of 32 values with a half for a scale first.
void decode_short(Format format, const std::uint8_t* from, Decoded& to) {
  const bool has_minimum = layout_of(format).minimum == Minimum::half;
  to.scale = half_at(from);
  if (has_minimum) to.minimum = half_at(from + 2) ^ kSign;  // the file's is added
  from += has_minimum ? 4 : 2;
  if (format == Format::q8_0) {
    for (int i = 0; i < 32; ++i) to.values[i] = from[i] ^ 128;
    return;
  }
  const bool five = format == Format::q5_0 || format == Format::q5_1;
  split_halves(from + (five ? 4 : 0), to.values, 16);
  if (five) add_fifth_bits(from, to.values);
}

// 2^(exponent - 128), as bfloat16.
void decode_mxfp4(const std::uint8_t* from, Decoded& to) {
  to.scale = from[0] < 2 ? static_cast<std::uint16_t>(0x20 << from[0]) : static_cast<std::uint16_t>((from[0] - 1) << 7);
  split_halves(from + 1, to.values, 16);
}

void decode(Format format, const std::uint8_t* from, Decoded& to) {
  switch (format) {
    case Format::q2_k: return decode_q2_k(from, to);
    case Format::q3_k: return decode_q3_k(from, to);
    case Format::q4_k: return decode_q4_k(from, to);
    case Format::q5_k: return decode_q5_k(from, to);
    case Format::q6_k: return decode_q6_k(from, to);
    case Format::iq4_xs: return decode_iq4_xs(from, to);
    case Format::mxfp4: return decode_mxfp4(from, to);
    default: return decode_short(format, from, to);
  }
}

// Block `block` of output `row`, wherever it comes from.
void read_block(const Source& source, std::ptrdiff_t row, std::ptrdiff_t block, Decoded& to) {
  const std::ptrdiff_t inputs = block_inputs(layout_of(source.format)), blocks = source.k / inputs;
  const std::ptrdiff_t at = (source.order ? source.order[row] : row) * blocks + block;
  if (source.scales == nullptr && source.singles == nullptr)
    return decode(source.format, source.blocks + at * file_block_bytes(source.format), to);
  std::memcpy(to.values, source.blocks + at * inputs, inputs);
  if (source.singles) return static_cast<void>(to.single = source.singles[at]);
  to.scale = source.scales[at], to.minimum = source.zeros[at];
}

// The bytes of 16 outputs x 32 inputs, [step][output][4], as lines of fewer bits.
void write_lines(const Layout& of, const std::uint8_t* bytes, std::uint8_t* to) {
  if (of.bits == 8) return static_cast<void>(std::memcpy(to, bytes, kSteps * kLine));
  std::memset(to, 0, of.bits * kLine);
  const int low = of.bits < 4 ? 2 : 4, mask = (1 << low) - 1, a_line = 8 / low, high = of.bits - low;
  for (int step = 0; step < kSteps; ++step, bytes += kLine) {
    std::uint8_t* line = to + step / a_line * kLine;
    for (int i = 0; i < kLine; ++i) line[i] |= static_cast<std::uint8_t>((bytes[i] & mask) << (step % a_line * low));
    if (high == 0) continue;
    const int in_high = 8 / high;  // steps of a line
    line = to + (low + step / in_high) * kLine;
    for (int i = 0; i < kLine; ++i) line[i] |= static_cast<std::uint8_t>((bytes[i] >> low) << (step % in_high * high));
  }
}

// One block of a strip: `outputs` of it exist, the others are zeros.
void pack_block(const Source& source, std::ptrdiff_t strip, std::ptrdiff_t block, std::uint8_t* to) {
  const Layout of = layout_of(source.format);
  const std::ptrdiff_t outputs = std::min(kStrip, source.n - strip * kStrip), levels = of.groups * of.parts;
  alignas(64) std::uint8_t bytes[kBlockMax * kStrip] = {};  // [group][half][step][output][4]
  std::uint16_t numbers[2][kStrip] = {};
  std::int8_t small[2][16][kStrip] = {};
  Decoded decoded;
  for (std::ptrdiff_t output = 0; output < outputs; ++output) {
    read_block(source, strip * kStrip + output, block, decoded);
    if (of.scale == Scale::single) std::memcpy(numbers[0] + 2 * output, &decoded.single, sizeof decoded.single);
    else numbers[0][output] = decoded.scale, numbers[1][output] = decoded.minimum;
    for (std::ptrdiff_t i = 0; i < levels; ++i)
      small[0][i][output] = decoded.scales[i], small[1][i][output] = decoded.minima[i];
    std::uint8_t* place = bytes + output / kHalfStrip * (kSteps * kLine) + output % kHalfStrip * 4;
    for (std::ptrdiff_t i = 0; i < of.groups * kSteps; ++i)
      std::memcpy(place + i / kSteps * (kStrip * kGroup) + i % kSteps * kLine, decoded.values + i * 4, 4);
  }
  std::memcpy(to, numbers, static_cast<std::size_t>(number_bytes(of)));
  const auto bytes_of_levels = static_cast<std::size_t>(level_bytes(of));
  std::memcpy(to + number_bytes(of), small[0], bytes_of_levels);
  if (of.minimum == Minimum::levels) std::memcpy(to + number_bytes(of) + level_bytes(of), small[1], bytes_of_levels);
  to += header_bytes(of);
  for (std::ptrdiff_t half = 0; half < of.groups * 2; ++half)
    write_lines(of, bytes + half * kSteps * kLine, to + half * half_bytes(of));
}

// Bytes of output `i` of a block, those of output `j` of another one: all that a block has of an output lies apart.
void copy_output(const Layout& of, const std::uint8_t* from, std::ptrdiff_t j, std::uint8_t* to, std::ptrdiff_t i) {
  const auto copy = [&](std::ptrdiff_t begin, std::ptrdiff_t end, std::ptrdiff_t size) {  // arrays of the strip's outputs
    for (std::ptrdiff_t at = begin; at < end; at += kStrip * size)
      std::memcpy(to + at + i * size, from + at + j * size, static_cast<std::size_t>(size));
  };
  copy(0, number_bytes(of), of.scale == Scale::single ? 4 : 2);
  copy(number_bytes(of), header_bytes(of), 1);
  const std::ptrdiff_t i_half = i / kHalfStrip * half_bytes(of), j_half = j / kHalfStrip * half_bytes(of);
  to += header_bytes(of) + i_half + i % kHalfStrip * 4;
  from += header_bytes(of) + j_half + j % kHalfStrip * 4;
  for (std::ptrdiff_t group = 0; group < of.groups; ++group)
    for (std::ptrdiff_t line = 0; line < of.bits; ++line) {
      const std::ptrdiff_t at = group * 2 * half_bytes(of) + line * kLine;
      std::memcpy(to + at, from + at, 4);
    }
}

}  // namespace

std::ptrdiff_t file_block_bytes(Format format) {
  constexpr std::ptrdiff_t bytes[] = {18, 20, 22, 24, 34, 84, 110, 144, 176, 210, 18, 136, 17};
  const auto index = static_cast<std::size_t>(format);
  return index < std::size(bytes) ? bytes[index] : 0;
}

void pack(const Source& source, std::uint8_t* to) {
  const Layout of = layout_of(source.format);
  const std::ptrdiff_t strips = strips_of(source.n), blocks = source.k / block_inputs(of);
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 1)
#endif
  for (std::ptrdiff_t strip = 0; strip < strips; ++strip)
    for (std::ptrdiff_t block = 0; block < blocks; ++block)
      pack_block(source, strip, block, to + (strip * blocks + block) * block_bytes(of));
}

void cut(const Cut& op, std::uint8_t* to) {
  const Layout of = layout_of(op.format);
  const std::ptrdiff_t strips = strips_of(op.n), blocks = op.k / block_inputs(of), bytes = block_bytes(of);
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 1)
#endif
  for (std::ptrdiff_t strip = 0; strip < strips; ++strip) {
    for (std::ptrdiff_t block = 0; block < op.block_count; ++block) {
      std::uint8_t* place = to + (strip * op.block_count + block) * bytes;
      std::memset(place, 0, static_cast<std::size_t>(bytes));
      for (std::ptrdiff_t i = 0; i < std::min(kStrip, op.n - strip * kStrip); ++i) {
        const std::ptrdiff_t row = op.outputs[strip * kStrip + i];
        const std::uint8_t* from = op.from + (row / kStrip * blocks + op.blocks[block]) * bytes;
        copy_output(of, from, row % kStrip, place, i);
      }
    }
  }
}

}  // namespace memserve::quantised
