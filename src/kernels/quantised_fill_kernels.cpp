// Packed weights to numbers in the layout of packed linears, compiled once per instruction set (see quantised.h).
#include "quantised_values.h"

namespace {
using memserve::Dtype;

// The weights of one input, kLanes outputs: byte `byte` of each of `values`.
template <q::Format kFormat>
static inline Floats numbers_of(Words values, int byte, Floats scale, Floats minimum) {
  constexpr Layout of = q::layout_of(kFormat);
  if constexpr (q::is_float(of)) return floats_of_float8((values >> (8 * byte)) & 255u) * scale;
  // A float of 2^23 and an integer has the integer in its last bits, and the difference is exact.
  constexpr float of_zero = 0x1p23f + of.zero;
  const Floats integers = as_floats(((values >> (8 * byte)) & 255u) | 0x4b000000u) - splat(of_zero);
  if constexpr (of.minimum == q::Minimum::none) return integers * scale;
  return integers * scale - minimum;
}

static inline void put_four(float* to, const Floats* numbers) {
  for (int i = 0; i < 4; ++i) store(to + i * q::kStrip, numbers[i]);
}

// Two inputs of an output lie side by side.
static inline void put_four(Bf16* to, const Floats* numbers) {
  for (int pair = 0; pair < 2; ++pair) {
#if defined(__AVX512BF16__)
    const __m512i in_turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                             21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const auto rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)numbers[2 * pair + 1], (__m512)numbers[2 * pair]);
    const Words both = (Words)_mm512_permutexvar_epi16(in_turn, rounded);
#else
    const Words both = bf16_bits(numbers[2 * pair]) | bf16_bits(numbers[2 * pair + 1]) << 16;
#endif
    std::memcpy(to + pair * 2 * q::kStrip, &both, sizeof both);
  }
}

template <q::Format kFormat, class T>
static void fill_strip(const std::uint8_t* strip, std::ptrdiff_t k, T* to) {
  constexpr Layout of = q::layout_of(kFormat);
  constexpr std::ptrdiff_t pack = sizeof(T) == 2 ? 2 : 1, shares = of.groups * (q::kStrip / kLanes) * q::kLine;
  constexpr std::ptrdiff_t lines_ahead = (q::block_bytes(of) + shares - 1) / shares;
  Ahead ahead{strip + kAheadBytes};
  for (std::ptrdiff_t i = 0; i < k / q::kGroup; ++i) {
    const Header<kFormat> header{strip + i / of.groups * q::block_bytes(of)};
    const std::ptrdiff_t group = i % of.groups;
    T* place = to + i * q::kGroup * q::kStrip;
    for (std::ptrdiff_t output = 0; output < q::kStrip; output += kLanes) {
      const std::uint8_t* lines = header.lines(group, output);
      ahead.fetch_into_first(lines_ahead);
      Floats scales[2], minima[2] = {};
      for (int part = 0; part < of.parts; ++part) {
        scales[part] = header.scale(group, part, output);
        if constexpr (of.minimum != q::Minimum::none) minima[part] = header.minimum(group, part, output, scales[part]);
      }
      each_step<0, q::kSteps>([&](auto step) {
        constexpr int part = decltype(step)::value * of.parts / q::kSteps;
        const Words values = values_of<kFormat, decltype(step)::value>(lines);
        Floats numbers[4];
        for (int byte = 0; byte < 4; ++byte)
          numbers[byte] = numbers_of<kFormat>(values, byte, scales[part], minima[part]);
        put_four(place + step.value * 4 * q::kStrip + output * pack, numbers);
      });
    }
  }
}

template <q::Format kFormat, class T>
static void fill_strips(const q::Panel& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  constexpr Layout of = q::layout_of(kFormat);
  for (std::ptrdiff_t strip = begin; strip < end; ++strip)
    fill_strip<kFormat>(op.w + strip * q::strip_bytes(of, op.k), op.k,
                        static_cast<T*>(op.to) + (strip - begin) * q::kStrip * op.k);
}

static void fill(const q::Panel& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  with_format(op.format, [&](auto format) {
    constexpr q::Format kFormat = decltype(format)::value;
    if (dtype == Dtype::float32) fill_strips<kFormat, float>(op, begin, end);
    else fill_strips<kFormat, Bf16>(op, begin, end);
  });
}

}  // namespace

namespace memserve::MEMSERVE_ISA {
extern const quantised::FillKernels fill_kernels;
const quantised::FillKernels fill_kernels{&fill};
}  // namespace memserve::MEMSERVE_ISA
