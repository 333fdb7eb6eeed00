// The products of activations and packed weights as integers, compiled once per instruction set (see quantised.h).
//
// One row: the integers of a strip are unpacked into registers and multiplied there. More rows: a chunk of a strip is
// unpacked once, into bytes in the first cache, and tiles of rows multiply it; their float sums wait in memory.
#pragma once
#include "quantised_values.h"

namespace {
using memserve::Dtype;

#if defined(__AVX512F__)
constexpr int kTileRows = 6;  // 12 sums of integers, 12 of floats, 2 weights of 32 registers
#elif defined(__AVX2__)
constexpr int kTileRows = 3;  // 6 and 6, and 2, of 16
#else
constexpr int kTileRows = 2;
#endif
constexpr int kVectors = 2;                           // of outputs in a tile
constexpr std::ptrdiff_t kWidth = kVectors * kLanes;  // outputs of a tile: a strip, or a part of it
constexpr std::ptrdiff_t kPanelRows = 64;             // whose sums wait in memory
constexpr std::ptrdiff_t kChunkGroups = 8;

static inline std::int32_t four_of(const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, 4);
  return four;
}

// Writes the sums of one row over a strip.
template <class Y>
static void put_sums(const q::Product& op, std::ptrdiff_t row, std::ptrdiff_t strip, const Floats* sums) {
  Y* y = static_cast<Y*>(op.y) + row * op.stride_y + strip * q::kStrip;
  for (int c = 0; c < q::kStrip / kLanes; ++c) {
    const std::ptrdiff_t at = strip * q::kStrip + c * kLanes;
    if (at + kLanes <= op.n) {
      store(y + c * kLanes, op.bias ? sums[c] + load(op.bias + at) : sums[c]);
    } else {
      for (std::ptrdiff_t i = 0; at + i < op.n; ++i) put(y + c * kLanes + i, sums[c][i] + (op.bias ? op.bias[at + i] : 0.0f));
    }
  }
}

static void put_sums(const q::Product& op, Dtype dtype, std::ptrdiff_t row, std::ptrdiff_t strip, const Floats* sums) {
  if (dtype == Dtype::float32) return put_sums<float>(op, row, strip, sums);
  if (dtype == Dtype::bfloat16) return put_sums<Bf16>(op, row, strip, sums);
  put_sums<Fp16>(op, row, strip, sums);
}

// One row, kWidth outputs of a strip from `output` on.
template <q::Format kFormat>
static inline void row_sums(const q::Product& op, std::ptrdiff_t row, const std::uint8_t* strip, std::ptrdiff_t output,
                            Floats* totals) {
  constexpr Layout of = q::layout_of(kFormat);
  const std::int8_t* x = op.x.values + row * op.k;
  const q::Group* info = op.x.groups + row * (op.k / q::kGroup);
  for (std::ptrdiff_t block = op.k / q::block_inputs(of); block > 0; --block, strip += q::block_bytes(of)) {
    const Header<kFormat> header{strip};
    for (std::ptrdiff_t group = 0; group < of.groups; ++group, x += q::kGroup, ++info) {
      const std::uint8_t* lines[kVectors];
      for (int c = 0; c < kVectors; ++c) lines[c] = header.lines(group, output + c * kLanes);
      each_step<0, of.parts>([&](auto part) {
        constexpr int steps = q::kSteps / of.parts, first = decltype(part)::value * steps;
        Ints sums[kVectors];
        for (int c = 0; c < kVectors; ++c) sums[c] = Ints{} + info->starts[part.value];
        each_step<first, first + steps>([&](auto step) {
          for (int c = 0; c < kVectors; ++c)
            sums[c] = dot<is_wide(of)>(sums[c], values_of<kFormat, decltype(step)::value>(lines[c]), four_of(x + step.value * 4));
        });
        for (int c = 0; c < kVectors; ++c) {
          const Floats scale = header.scale(group, part.value, output + c * kLanes);
          totals[c] += floats_of(sums[c]) * info->scale * scale;
          if constexpr (of.minimum != q::Minimum::none)
            totals[c] -= header.minimum(group, part.value, output + c * kLanes, scale) * info->sums[part.value];
        }
      });
    }
  }
}

// Some groups of a strip, ready to be multiplied: [group][half][step][16 outputs][4], numbers [group][part][32].
struct Chunk {
  alignas(64) std::uint8_t values[kChunkGroups * q::kStrip * q::kGroup];
  alignas(64) float scales[kChunkGroups * 2 * q::kStrip], minima[kChunkGroups * 2 * q::kStrip];

  const std::uint8_t* lines(std::ptrdiff_t group, std::ptrdiff_t output) const {
    return values + group * q::kStrip * q::kGroup + output / q::kHalfStrip * (q::kSteps * q::kLine) +
           output % q::kHalfStrip * 4;
  }
};

// Groups [begin, end) of the weight's inputs.
template <q::Format kFormat>
static void unpack(Chunk& chunk, const std::uint8_t* strip, std::ptrdiff_t begin, std::ptrdiff_t end) {
  constexpr Layout of = q::layout_of(kFormat);
  float *scales = chunk.scales, *minima = chunk.minima;
  for (std::ptrdiff_t i = begin; i < end; ++i) {
    const Header<kFormat> header{strip + i / of.groups * q::block_bytes(of)};
    const std::ptrdiff_t group = i % of.groups;
    for (std::ptrdiff_t output = 0; output < q::kStrip; output += kLanes) {
      const std::uint8_t* lines = header.lines(group, output);
      auto* to = const_cast<std::uint8_t*>(chunk.lines(i - begin, output));
      each_step<0, q::kSteps>([&](auto step) {
        const Words values = values_of<kFormat, decltype(step)::value>(lines);
        std::memcpy(to + step.value * q::kLine, &values, sizeof values);
      });
      for (int part = 0; part < of.parts; ++part) {
        const Floats scale = header.scale(group, part, output);
        store(scales + part * q::kStrip + output, scale);
        if constexpr (of.minimum != q::Minimum::none)
          store(minima + part * q::kStrip + output, header.minimum(group, part, output, scale));
      }
    }
    scales += of.parts * q::kStrip;
    minima += of.parts * q::kStrip;
  }
}

// R rows from `row` on times a chunk of `groups` groups, the first of which is group `first` of the inputs; added to
// sums [R][32], kWidth outputs from `output` on.
template <int R, int kParts, bool kMinimum, bool kWide>
static void tile(const q::Product& op, const Chunk& chunk, std::ptrdiff_t row, std::ptrdiff_t first, std::ptrdiff_t groups,
                 std::ptrdiff_t output, float* waiting) {
  const std::int8_t* x = op.x.values + row * op.k + first * q::kGroup;
  const std::ptrdiff_t groups_of_row = op.k / q::kGroup;
  const q::Group* info = op.x.groups + row * groups_of_row + first;
  Floats totals[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kVectors; ++c) totals[r][c] = load(waiting + r * q::kStrip + output + c * kLanes);
  for (std::ptrdiff_t group = 0; group < groups; ++group, x += q::kGroup, ++info) {
    each_step<0, kParts>([&](auto part) {
      constexpr int steps = q::kSteps / kParts, begin = decltype(part)::value * steps;
      Ints sums[R][kVectors];
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kVectors; ++c) sums[r][c] = Ints{} + info[r * groups_of_row].starts[part.value];
      const std::uint8_t* lines[kVectors];
      for (int c = 0; c < kVectors; ++c) lines[c] = chunk.lines(group, output + c * kLanes);
      each_step<begin, begin + steps>([&](auto step) {
        Words weights[kVectors];
        for (int c = 0; c < kVectors; ++c) weights[c] = load_words(lines[c] + step.value * q::kLine);
        for (int r = 0; r < R; ++r) {
          const std::int32_t four = four_of(x + r * op.k + step.value * 4);
          for (int c = 0; c < kVectors; ++c) sums[r][c] = dot<kWide>(sums[r][c], weights[c], four);
        }
      });
      const std::ptrdiff_t numbers = (group * kParts + part.value) * q::kStrip + output;
      for (int c = 0; c < kVectors; ++c) {
        const Floats scale = load(chunk.scales + numbers + c * kLanes);
        for (int r = 0; r < R; ++r)
          totals[r][c] += floats_of(sums[r][c]) * info[r * groups_of_row].scale * scale;
        if constexpr (kMinimum) {
          const Floats minimum = load(chunk.minima + numbers + c * kLanes);
          for (int r = 0; r < R; ++r) totals[r][c] -= minimum * info[r * groups_of_row].sums[part.value];
        }
      }
    });
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kVectors; ++c) store(waiting + r * q::kStrip + output + c * kLanes, totals[r][c]);
}

template <int kParts, bool kMinimum, bool kWide, int R = kTileRows>
static void tile_of(int rows, const q::Product& op, const Chunk& chunk, std::ptrdiff_t row, std::ptrdiff_t first,
                    std::ptrdiff_t groups, float* waiting) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of<kParts, kMinimum, kWide, R - 1>(rows, op, chunk, row, first, groups, waiting);
  }
  for (std::ptrdiff_t output = 0; output < q::kStrip; output += kWidth)
    tile<R, kParts, kMinimum, kWide>(op, chunk, row, first, groups, output, waiting);
}

// Rows [begin, end), at most kPanelRows, of one strip, in tiles of about equal height.
template <q::Format kFormat>
static void panel(const q::Product& op, Dtype dtype, std::ptrdiff_t strip, std::ptrdiff_t begin, std::ptrdiff_t end,
                  Chunk& chunk) {
  constexpr Layout of = q::layout_of(kFormat);
  const std::uint8_t* w = op.w + strip * q::strip_bytes(of, op.k);
  const std::ptrdiff_t groups = op.k / q::kGroup;
  alignas(64) float waiting[kPanelRows * q::kStrip];
  std::memset(waiting, 0, sizeof(float) * q::kStrip * (end - begin));
  for (std::ptrdiff_t first = 0; first < groups; first += kChunkGroups) {
    const std::ptrdiff_t count = groups - first < kChunkGroups ? groups - first : kChunkGroups;
    unpack<kFormat>(chunk, w, first, first + count);
    std::ptrdiff_t tiles = (end - begin + kTileRows - 1) / kTileRows;
    for (std::ptrdiff_t row = begin; tiles > 0; --tiles) {
      const std::ptrdiff_t height = (end - row + tiles - 1) / tiles;
      tile_of<of.parts, of.minimum != q::Minimum::none, is_wide(of)>(static_cast<int>(height), op, chunk, row, first, count,
                                                                     waiting + (row - begin) * q::kStrip);
      row += height;
    }
  }
  for (std::ptrdiff_t row = begin; row < end; ++row) {
    Floats sums[q::kStrip / kLanes];
    std::memcpy(sums, waiting + (row - begin) * q::kStrip, sizeof sums);
    put_sums(op, dtype, row, strip, sums);
  }
}

template <q::Format kFormat>
static void multiply_strips(const q::Product& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  constexpr Layout of = q::layout_of(kFormat);
  if (op.rows == 1) {
    for (std::ptrdiff_t strip = begin; strip < end; ++strip) {
      Floats totals[q::kStrip / kLanes] = {};
      for (std::ptrdiff_t output = 0; output < q::kStrip; output += kWidth)
        row_sums<kFormat>(op, 0, op.w + strip * q::strip_bytes(of, op.k), output, totals + output / kLanes);
      put_sums(op, dtype, 0, strip, totals);
    }
    return;
  }
  Chunk chunk;
  for (std::ptrdiff_t row = 0; row < op.rows; row += kPanelRows) {
    const std::ptrdiff_t last = op.rows - row < kPanelRows ? op.rows : row + kPanelRows;
    for (std::ptrdiff_t strip = begin; strip < end; ++strip) panel<kFormat>(op, dtype, strip, row, last, chunk);
  }
}

}  // namespace
