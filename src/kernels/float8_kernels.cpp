// Products with weights that are numbers of 8 bits (e4m3) and a float for a block of inputs (see quantised.h), of one
// instruction set (MEMSERVE_ISA).
//
// A block's numbers are multiplied as they are, exactly, and their sum by the block's scale. Few rows: weights are
// decoded in registers, for each tile of rows anew, in the order in which they lie. More rows: a block of a strip is decoded once, into the first cache, and tiles of rows multiply
// it. A row comes out the same either way.
#include "quantised_body.h"

namespace {

using q::Linear;
#define INLINED __attribute__((always_inline))
constexpr int kVectorsOfStrip = q::kStrip / kLanes;

// Steps of 4 inputs and kLanes outputs, of activations of type X: as floats.
template <class X>
struct Steps {
#if defined(__AVX512F__)
  static constexpr int kFewRows = 6, kTileRows = 6;
#elif defined(__AVX2__)
  static constexpr int kFewRows = 2, kTileRows = 2;
#else
  static constexpr int kFewRows = 1, kTileRows = 1;
#endif
  struct Weights {
    Floats inputs[4];
  };
  using Sums = Floats;

  static Weights decode(const std::uint8_t* line) {
    const Words values = load_words(line);
    return {{floats_of_float8(values & 255u), floats_of_float8((values >> 8) & 255u),
             floats_of_float8((values >> 16) & 255u), floats_of_float8(values >> 24)}};
  }
  struct Inputs {
    float values[4];
  };
  static Inputs inputs(const X* x) { return {{to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])}}; }
  static void add(Sums& sums, const Weights& weights, const Inputs& x) {
    for (int i = 0; i < 4; ++i) sums += weights.inputs[i] * x.values[i];
  }
  static Floats total(Sums sums) { return sums; }
};

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define MEMSERVE_HAS_TABLES
// The bytes of e4m3 numbers without their sign, as bfloat16.
struct Tables {
  alignas(64) std::uint8_t upper[128], lower[128];

  constexpr Tables() : upper{}, lower{} {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      if (exponent == 0) {  // small ones: mantissa * 2^-9
        exponent = 1;
        while (mantissa && mantissa < 8) mantissa <<= 1, --exponent;
      }
      const bool zero = (code & 127) == 0;
      const int bits = zero ? 0 : (exponent + 120) << 7 | (mantissa & 7) << 4;
      upper[code] = static_cast<std::uint8_t>(bits >> 8), lower[code] = static_cast<std::uint8_t>(bits & 255);
    }
  }
};
inline constexpr Tables kTables{};

// As bfloat16: pairs of inputs. Of each four outputs, two are in either vector: their first pairs, then their second.
template <>
struct Steps<Bf16> {
  static constexpr int kFewRows = 12, kTileRows = 6;  // 24 sums, 4 weights or tables, 1 broadcast of 32 registers
  struct Weights {
    __m512i low, high;
  };
  struct Sums {
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
  };

  static Weights decode(const std::uint8_t* line) {
    __m512i codes = _mm512_loadu_si512(line);
    const __m512i signs = _mm512_set1_epi8(-128);
    asm("" : "+v"(codes));  // else gcc loads them three times
    const auto found = [&](const std::uint8_t* table) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
    };
    const __m512i lower = found(kTables.lower);
    const __m512i upper = _mm512_ternarylogic_epi32(found(kTables.upper), codes, signs, 0xf8);  // a | (b & c)
    return {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
  }
  static __m512bh inputs(const Bf16* x) {
    long long four;
    std::memcpy(&four, x, sizeof four);
    return (__m512bh)_mm512_set1_epi64(four);
  }
  static void add(Sums& sums, const Weights& weights, __m512bh inputs) {
    sums.low = _mm512_dpbf16_ps(sums.low, (__m512bh)weights.low, inputs);
    sums.high = _mm512_dpbf16_ps(sums.high, (__m512bh)weights.high, inputs);
  }
  static Floats total(const Sums& sums) {
    return (Floats)_mm512_add_ps(_mm512_shuffle_ps(sums.low, sums.high, 0x88),
                                 _mm512_shuffle_ps(sums.low, sums.high, 0xdd));
  }
};
#endif

// While tiles are multiplied, so much of what comes next is fetched.
constexpr std::ptrdiff_t kNextBytes = 4224;

// The numbers of a block of a strip.
template <q::Format kFormat, class X>
struct Decoded {
  typename Steps<X>::Weights of[q::layout_of(kFormat).groups * kVectorsOfStrip * q::kSteps];
};

template <q::Format kFormat, class X>
static void decode(const Header<kFormat>& header, Decoded<kFormat, X>& to) {
  auto* place = to.of;
  for (std::ptrdiff_t group = 0; group < q::layout_of(kFormat).groups; ++group, place += q::kSteps * kVectorsOfStrip)
    for (int c = 0; c < kVectorsOfStrip; ++c)
      for (int step = 0; step < q::kSteps; ++step) {
        const std::uint8_t* line = header.lines(group, c * kLanes) + step * q::kLine;
        if (c * kLanes % q::kHalfStrip == 0) __builtin_prefetch(line + kNextBytes, 0, 3);
        place[step * kVectorsOfStrip + c] = Steps<X>::decode(line);
      }
}

// R rows times a block; `ready`: its numbers, unless they are decoded here (kDecodes): then some are fetched ahead.
// Places are constants, so that compilers keep all of it in registers.
template <q::Format kFormat, class X, int R, bool kDecodes>
static inline void multiply_block(const Header<kFormat>& header, const Decoded<kFormat, X>* ready, const X* x,
                                  std::ptrdiff_t stride, Floats (&totals)[R][kVectorsOfStrip]) {
  using Own = Steps<X>;
  typename Own::Sums sums[R][kVectorsOfStrip] = {};
  for (std::ptrdiff_t group = 0; group < q::layout_of(kFormat).groups; ++group, x += q::kGroup) {
    if constexpr (kDecodes) {  // in the order in which the weights lie: they come from memory
      each_step<0, kVectorsOfStrip>([&](auto c) INLINED {
        const std::uint8_t* lines = header.lines(group, c.value * kLanes);
        each_step<0, q::kSteps>([&](auto step) INLINED {
          const std::uint8_t* line = lines + step.value * q::kLine;
          if constexpr (R > 2 && c.value * kLanes % q::kHalfStrip == 0) __builtin_prefetch(line + kAheadBytes, 0, 3);
          const auto weights = Own::decode(line);
          each_step<0, R>([&](auto r) INLINED {
            Own::add(sums[r.value][c.value], weights, Own::inputs(x + r.value * stride + step.value * 4));
          });
        });
      });
    } else {  // so that all of a strip meets the inputs as they are read
      const auto* weights = ready->of + group * q::kSteps * kVectorsOfStrip;
      each_step<0, q::kSteps>([&](auto step) INLINED {
        each_step<0, R>([&](auto r) INLINED {
          const auto inputs = Own::inputs(x + r.value * stride + step.value * 4);
          each_step<0, kVectorsOfStrip>([&](auto c) INLINED {
            Own::add(sums[r.value][c.value], weights[step.value * kVectorsOfStrip + c.value], inputs);
          });
        });
      });
    }
  }
  each_step<0, kVectorsOfStrip>([&](auto c) INLINED {
    const Floats scale = header.scale(0, 0, c.value * kLanes);
    each_step<0, R>(
        [&](auto r) INLINED { totals[r.value][c.value] += Own::total(sums[r.value][c.value]) * scale; });
  });
}

static q::Product results_of(const Linear& op) {
  return {{}, op.w, op.bias, op.y, op.rows, op.k, op.n, op.stride_y, op.format};
}

// Calls body(first, count) for tiles of rows of about equal height.
template <class X, class Body>
static void each_tile(std::ptrdiff_t rows, Body body) {
  std::ptrdiff_t tiles = (rows + Steps<X>::kTileRows - 1) / Steps<X>::kTileRows;
  for (std::ptrdiff_t row = 0; tiles > 0; --tiles) {
    const std::ptrdiff_t height = (rows - row + tiles - 1) / tiles;
    body(row, height);
    row += height;
  }
}

// Rows from `row` on, at most R, of one strip.
template <q::Format kFormat, class X, int R = Steps<X>::kTileRows>
static void few_floats(std::ptrdiff_t rows, const Linear& op, Dtype of_y, std::ptrdiff_t row, std::ptrdiff_t strip) {
  constexpr Layout of = q::layout_of(kFormat);
  if constexpr (R > 1) {
    if (rows < R) return few_floats<kFormat, X, R - 1>(rows, op, of_y, row, strip);
  }
  const std::uint8_t* w = op.w + strip * q::strip_bytes(of, op.k);
  const X* x = static_cast<const X*>(op.x) + row * op.stride_x;
  Floats totals[R][kVectorsOfStrip] = {};
  for (std::ptrdiff_t block = op.k / q::block_inputs(of); block > 0; --block) {
    multiply_block<kFormat, X, R, true>(Header<kFormat>{w}, nullptr, x, op.stride_x, totals);
    w += q::block_bytes(of), x += q::block_inputs(of);
  }
  for (int r = 0; r < R; ++r) put_sums(results_of(op), of_y, row + r, strip, totals[r]);
}

template <q::Format kFormat, class X, int R = Steps<X>::kTileRows>
static void tile_of_floats(std::ptrdiff_t rows, const Header<kFormat>& header, const Decoded<kFormat, X>& ready,
                           const X* x, std::ptrdiff_t stride, float* waiting) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of_floats<kFormat, X, R - 1>(rows, header, ready, x, stride, waiting);
  }
  Floats totals[R][kVectorsOfStrip];
  std::memcpy(totals, waiting, sizeof totals);
  multiply_block<kFormat, X, R, false>(header, &ready, x, stride, totals);
  std::memcpy(waiting, totals, sizeof totals);
}

template <q::Format kFormat, class X>
static void many_floats(const Linear& op, Dtype of_y, std::ptrdiff_t begin, std::ptrdiff_t end) {
  constexpr Layout of = q::layout_of(kFormat);
  Decoded<kFormat, X> ready;
  alignas(64) float waiting[kPanelRows * q::kStrip];
  for (std::ptrdiff_t first = 0; first < op.rows; first += kPanelRows) {
    const std::ptrdiff_t rows = op.rows - first < kPanelRows ? op.rows - first : kPanelRows;
    for (std::ptrdiff_t strip = begin; strip < end; ++strip) {
      std::memset(waiting, 0, sizeof(float) * q::kStrip * rows);
      for (std::ptrdiff_t block = 0; block < op.k / q::block_inputs(of); ++block) {
        const Header<kFormat> header{op.w + strip * q::strip_bytes(of, op.k) + block * q::block_bytes(of)};
        decode<kFormat, X>(header, ready);
        const X* x = static_cast<const X*>(op.x) + first * op.stride_x + block * q::block_inputs(of);
        each_tile<X>(rows, [&](std::ptrdiff_t row, std::ptrdiff_t height) {
          tile_of_floats<kFormat, X>(height, header, ready, x + row * op.stride_x, op.stride_x,
                                     waiting + row * q::kStrip);
        });
      }
      for (std::ptrdiff_t row = 0; row < rows; ++row) {
        Floats sums[kVectorsOfStrip];
        std::memcpy(sums, waiting + row * q::kStrip, sizeof sums);
        put_sums(results_of(op), of_y, first + row, strip, sums);
      }
    }
  }
}

template <q::Format kFormat, class X>
static void multiply(const Linear& op, Dtype of_y, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (op.rows <= Steps<X>::kFewRows) {
    for (std::ptrdiff_t strip = begin; strip < end; ++strip)
      each_tile<X>(op.rows, [&](std::ptrdiff_t row, std::ptrdiff_t height) {
        few_floats<kFormat, X>(height, op, of_y, row, strip);
      });
    return;
  }
  many_floats<kFormat, X>(op, of_y, begin, end);
}

// In the set with tables activations are bfloat16: others are multiplied by the set without.
template <q::Format kFormat>
static void multiply(const Linear& op, [[maybe_unused]] Dtype of_x, Dtype of_y, std::ptrdiff_t begin,
                     std::ptrdiff_t end) {
#if !defined(MEMSERVE_HAS_TABLES)
  if (of_x == Dtype::float32) return multiply<kFormat, float>(op, of_y, begin, end);
#endif
  multiply<kFormat, Bf16>(op, of_y, begin, end);
}

static void multiply(const Linear& op, Dtype of_x, Dtype of_y, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (op.format == q::Format::fp8_128) return multiply<q::Format::fp8_128>(op, of_x, of_y, begin, end);
  multiply<q::Format::fp8_32>(op, of_x, of_y, begin, end);
}

}  // namespace

namespace memserve::MEMSERVE_ISA {
extern const quantised::FloatKernels float8_kernels;
const quantised::FloatKernels float8_kernels{&multiply};
}  // namespace memserve::MEMSERVE_ISA
