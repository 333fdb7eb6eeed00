// The products of activations and packed weights as integers, compiled once per instruction set (see quantised.h).
//
// Few rows: the integers of a strip are unpacked into registers and multiplied there. More rows: a chunk of a strip is
// unpacked once, into bytes in the first cache, and tiles of rows multiply it; their float sums wait in memory.
#pragma once
#include "quantised_values.h"

namespace {
using memserve::Dtype;

// Coarse: activations of one byte; fine: of two. tile_rows: of a tile. few_rows: up to so many multiply integers as they
// are unpacked.
#if defined(__AVX512VNNI__)
constexpr int tile_rows(bool fine) { return fine ? 4 : 6; }  // 12 (16) sums of integers, 12 (8) of floats, of 32 registers
constexpr int few_rows_max(bool fine) { return fine ? 4 : 8; }
#elif defined(__AVX512F__)
constexpr int tile_rows(bool fine) { return fine ? 4 : 6; }
constexpr int few_rows_max(bool fine) { return fine ? 2 : 4; }
#elif defined(__AVX2__)
constexpr int tile_rows(bool fine) { return fine ? 2 : 3; }  // 6 (8) and 6 (4), and 2 weights, of 16
constexpr int few_rows_max(bool fine) { return fine ? 2 : 4; }
#else
constexpr int tile_rows(bool) { return 2; }
constexpr int few_rows_max(bool) { return 1; }
#endif
constexpr int kVectors = 2;                           // of outputs in a tile
constexpr std::ptrdiff_t kWidth = kVectors * kLanes;  // outputs of a tile: a strip, or a part of it
constexpr std::ptrdiff_t kPanelRows = 64;             // whose sums wait in memory
constexpr std::ptrdiff_t kChunkGroups = 16;

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
      for (std::ptrdiff_t i = 0; at + i < op.n; ++i)
        put(y + c * kLanes + i, sums[c][i] + (op.bias ? op.bias[at + i] : 0.0f));
    }
  }
}

// Not in line: it is called from hundreds of kernels, and writes little of what they have summed.
static __attribute__((noinline)) void put_sums(const q::Product& op, Dtype dtype, std::ptrdiff_t row,
                                               std::ptrdiff_t strip, const Floats* sums) {
  if (dtype == Dtype::float32) return put_sums<float>(op, row, strip, sums);
  if (dtype == Dtype::bfloat16) return put_sums<Bf16>(op, row, strip, sums);
  put_sums<Fp16>(op, row, strip, sums);
}

// The sums of a group: of one byte of activations a value, or of the upper one (kFine) and the lower one.
template <bool kFine>
struct Sums {
  Ints upper, lower;

  void begin(std::int32_t start) { upper = Ints{} + (kFine ? 0 : start), lower = Ints{} + start; }

  template <bool kWide>
  void add(Words weights, const std::int8_t* x, std::ptrdiff_t tail) {
    upper = dot<kWide>(upper, weights, four_of(x));
    if constexpr (kFine) lower = dot<kWide>(lower, weights, four_of(x + tail));
  }
  Floats total() const {
    if constexpr (kFine) return floats_of((upper << q::kTailBits) + lower);
    return floats_of(upper);
  }
};

// R rows from `row` on, C vectors of outputs from `output` on. Meanwhile weights are fetched: of a strip that is read
// once, a little ahead into the first cache; else a part of the next strip into the second one.
template <q::Format kFormat, bool kFine, int R, int C>
static inline void row_sums(const q::Product& op, std::ptrdiff_t row, const std::uint8_t* strip, std::ptrdiff_t output,
                            Floats (&totals)[R][q::kStrip / kLanes]) {
  constexpr Layout of = q::layout_of(kFormat);
  const std::ptrdiff_t groups_of_row = op.k / q::kGroup;
  const std::int8_t* x = op.x.values + row * op.k;
  const std::ptrdiff_t tail = op.x.tails - op.x.values;
  const q::Group* info = op.x.groups + row * groups_of_row;
  Floats rows[R][C] = {};
  constexpr std::ptrdiff_t passes = q::kStrip / (C * kLanes), shares = passes * of.groups * q::kLine;
  constexpr std::ptrdiff_t lines_ahead = (q::block_bytes(of) + shares - 1) / shares;
  const std::ptrdiff_t bytes_of_pass = groups_of_row * lines_ahead * q::kLine;
  Ahead ahead{strip + (passes == 1 ? kAheadBytes : q::strip_bytes(of, op.k) + output / (C * kLanes) * bytes_of_pass)};
  for (std::ptrdiff_t block = op.k / q::block_inputs(of); block > 0; --block, strip += q::block_bytes(of)) {
    const Header<kFormat> header{strip};
    for (std::ptrdiff_t group = 0; group < of.groups; ++group, x += q::kGroup, ++info) {
      const std::uint8_t* lines[C];
      for (int c = 0; c < C; ++c) lines[c] = header.lines(group, output + c * kLanes);
      if constexpr (passes == 1) ahead.fetch_into_first(lines_ahead);
      else ahead.fetch_into_second(lines_ahead);
      each_step<0, of.parts>([&](auto part) {
        constexpr int steps = q::kSteps / of.parts, first = decltype(part)::value * steps;
        Sums<kFine> sums[R][C];
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c) sums[r][c].begin(info[r * groups_of_row].starts[part.value]);
        for (int c = 0; c < C; ++c) {
          each_step<first, first + steps>([&](auto step) {
            const Words weights = values_of<kFormat, decltype(step)::value>(lines[c]);
            for (int r = 0; r < R; ++r)
              sums[r][c].template add<is_wide(of)>(weights, x + r * op.k + step.value * 4, tail);
          });
        }
        for (int c = 0; c < C; ++c) {
          const Floats scale = header.scale(group, part.value, output + c * kLanes);
          for (int r = 0; r < R; ++r)
            rows[r][c] += sums[r][c].total() * info[r * groups_of_row].scale * scale;
          if constexpr (of.minimum != q::Minimum::none) {
            const Floats minimum = header.minimum(group, part.value, output + c * kLanes, scale);
            for (int r = 0; r < R; ++r) rows[r][c] -= minimum * info[r * groups_of_row].sums[part.value];
          }
        }
      });
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) totals[r][output / kLanes + c] = rows[r][c];
}

// Up to few_rows_max rows of some strips.
template <q::Format kFormat, bool kFine, int R = few_rows_max(kFine)>
static void few_rows(const q::Product& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  constexpr int C = R > 2 ? 1 : 2;
  if constexpr (R > 1) {
    if (op.rows < R) return few_rows<kFormat, kFine, R - 1>(op, dtype, begin, end);
  }
  for (std::ptrdiff_t strip = begin; strip < end; ++strip) {
    Floats totals[R][q::kStrip / kLanes];
    for (std::ptrdiff_t output = 0; output < q::kStrip; output += C * kLanes)
      row_sums<kFormat, kFine, R, C>(op, 0, op.w + strip * q::strip_bytes(q::layout_of(kFormat), op.k), output, totals);
    for (int r = 0; r < R; ++r) put_sums(op, dtype, r, strip, totals[r]);
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

// Groups [begin, end) of the weight's inputs. Not in line: five kernels of a format call it, once a chunk.
template <q::Format kFormat>
static __attribute__((noinline)) void unpack(Chunk& chunk, const std::uint8_t* strip, std::ptrdiff_t begin, std::ptrdiff_t end) {
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
// sums [R][32], kWidth outputs from `output` on. Meanwhile a part of the next strip is fetched.
template <int R, int kParts, bool kMinimum, bool kWide, bool kFine>
static void tile(const q::Product& op, const Chunk& chunk, std::ptrdiff_t row, std::ptrdiff_t first,
                 std::ptrdiff_t groups, std::ptrdiff_t output, float* waiting, Ahead& ahead,
                 std::ptrdiff_t lines_ahead) {
  const std::int8_t* x = op.x.values + row * op.k + first * q::kGroup;
  const std::ptrdiff_t groups_of_row = op.k / q::kGroup, tail = op.x.tails - op.x.values;
  const q::Group* info = op.x.groups + row * groups_of_row + first;
  Floats totals[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kVectors; ++c) totals[r][c] = load(waiting + r * q::kStrip + output + c * kLanes);
  for (std::ptrdiff_t group = 0; group < groups; ++group, x += q::kGroup, ++info) {
    ahead.fetch_into_second(lines_ahead);
    each_step<0, kParts>([&](auto part) {
      constexpr int steps = q::kSteps / kParts, begin = decltype(part)::value * steps;
      Sums<kFine> sums[R][kVectors];
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kVectors; ++c) sums[r][c].begin(info[r * groups_of_row].starts[part.value]);
      const std::uint8_t* lines[kVectors];
      for (int c = 0; c < kVectors; ++c) lines[c] = chunk.lines(group, output + c * kLanes);
      each_step<begin, begin + steps>([&](auto step) {
        Words weights[kVectors];
        for (int c = 0; c < kVectors; ++c) weights[c] = load_words(lines[c] + step.value * q::kLine);
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < kVectors; ++c)
            sums[r][c].template add<kWide>(weights[c], x + r * op.k + step.value * 4, tail);
      });
      const std::ptrdiff_t numbers = (group * kParts + part.value) * q::kStrip + output;
      for (int c = 0; c < kVectors; ++c) {
        const Floats scale = load(chunk.scales + numbers + c * kLanes);
        for (int r = 0; r < R; ++r)
          totals[r][c] += sums[r][c].total() * info[r * groups_of_row].scale * scale;
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

template <int kParts, bool kMinimum, bool kWide, bool kFine, int R = tile_rows(kFine)>
static void tile_of(int rows, const q::Product& op, const Chunk& chunk, std::ptrdiff_t row, std::ptrdiff_t first,
                    std::ptrdiff_t groups, float* waiting, Ahead& ahead, std::ptrdiff_t lines_ahead) {
  if constexpr (R > 1) {
    if (rows < R)
      return tile_of<kParts, kMinimum, kWide, kFine, R - 1>(rows, op, chunk, row, first, groups, waiting, ahead,
                                                            lines_ahead);
  }
  for (std::ptrdiff_t output = 0; output < q::kStrip; output += kWidth)
    tile<R, kParts, kMinimum, kWide, kFine>(op, chunk, row, first, groups, output, waiting, ahead, lines_ahead);
}

// Rows [begin, end), at most kPanelRows, of one strip, in tiles of about equal height.
template <q::Format kFormat, bool kFine>
static void panel(const q::Product& op, Dtype dtype, std::ptrdiff_t strip, std::ptrdiff_t begin, std::ptrdiff_t end,
                  Chunk& chunk) {
  constexpr Layout of = q::layout_of(kFormat);
  const std::uint8_t* w = op.w + strip * q::strip_bytes(of, op.k);
  const std::ptrdiff_t groups = op.k / q::kGroup;
  alignas(64) float waiting[kPanelRows * q::kStrip];
  Ahead ahead{w + q::strip_bytes(of, op.k)};
  const std::ptrdiff_t tiles_of_rows = (end - begin + tile_rows(kFine) - 1) / tile_rows(kFine);
  const std::ptrdiff_t lines_of_group = q::block_bytes(of) / of.groups / q::kLine + 1;
  const std::ptrdiff_t lines_ahead = (lines_of_group * kWidth / q::kStrip + tiles_of_rows - 1) / tiles_of_rows;
  std::memset(waiting, 0, sizeof(float) * q::kStrip * (end - begin));
  for (std::ptrdiff_t first = 0; first < groups; first += kChunkGroups) {
    const std::ptrdiff_t count = groups - first < kChunkGroups ? groups - first : kChunkGroups;
    unpack<kFormat>(chunk, w, first, first + count);
    std::ptrdiff_t tiles = tiles_of_rows;
    for (std::ptrdiff_t row = begin; tiles > 0; --tiles) {
      const std::ptrdiff_t height = (end - row + tiles - 1) / tiles;
      tile_of<of.parts, of.minimum != q::Minimum::none, is_wide(of), kFine>(
          static_cast<int>(height), op, chunk, row, first, count, waiting + (row - begin) * q::kStrip, ahead,
          lines_ahead);
      row += height;
    }
  }
  for (std::ptrdiff_t row = begin; row < end; ++row) {
    Floats sums[q::kStrip / kLanes];
    std::memcpy(sums, waiting + (row - begin) * q::kStrip, sizeof sums);
    put_sums(op, dtype, row, strip, sums);
  }
}

template <q::Format kFormat, bool kFine>
static void multiply_strips(const q::Product& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (op.rows <= few_rows_max(kFine)) return few_rows<kFormat, kFine>(op, dtype, begin, end);
  Chunk chunk;
  for (std::ptrdiff_t row = 0; row < op.rows; row += kPanelRows) {
    const std::ptrdiff_t last = op.rows - row < kPanelRows ? op.rows : row + kPanelRows;
    for (std::ptrdiff_t strip = begin; strip < end; ++strip) panel<kFormat, kFine>(op, dtype, strip, row, last, chunk);
  }
}

}  // namespace
