// Activations to integers and rows of embeddings to numbers, compiled once per instruction set (see quantised.h).
#include "quantised_body.h"

namespace {

// The nearest integers, the even one of two. An addition that rounds would be joined with the product before it by some
// compilers, and a row would be another one elsewhere.
static inline Words nearest(Floats v) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtps_epi32((__m256)v);
#else
  Words bits{};
  for (std::ptrdiff_t i = 0; i < kLanes; ++i)
    bits[i] = static_cast<std::uint32_t>(static_cast<int>(__builtin_rintf(v[i])));
  return bits;
#endif
}

// Of 16 integers.
static inline std::int32_t sum_of_bytes(const std::int8_t* p) {
#if defined(__AVX2__)
  const __m128i biased = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
  const __m128i sums = _mm_sad_epu8(biased, _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
#else
  std::int32_t sum = 0;
  for (int i = 0; i < q::kGroup / 2; ++i) sum += p[i];
  return sum;
#endif
}

static inline float largest_of(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float most = v[0];
  for (std::ptrdiff_t i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

static inline void put_bytes(std::int8_t* to, Ints integers) {
  const SmallUnsigned bytes = __builtin_convertvector((Words)integers & 255u, SmallUnsigned);
  std::memcpy(to, &bytes, sizeof bytes);
}

// 32 activations of one row; `tail`: from a first byte to the second, if any (kFine).
template <bool kFine, class X>
static inline void quantise_group(const X* x, std::int8_t* to, std::ptrdiff_t tail, q::Group& group, const Layout& of) {
  constexpr float most_integer = kFine ? 127 << q::kTailBits : 127;
  constexpr int vectors = q::kGroup / kLanes;
  Floats values[vectors], largest{};
  for (int i = 0; i < vectors; ++i) {
    values[i] = load(x + i * kLanes);
    const Floats size = values[i] < 0.0f ? -values[i] : values[i];
    largest = size > largest ? size : largest;
  }
  const float most = largest_of(largest);
  const float inverse = most > 0 ? most_integer / most : 0.0f;
  group.scale = most / most_integer;
  for (int i = 0; i < vectors; ++i) {
    const Ints integers = (Ints)nearest(values[i] * inverse);
    const Ints upper = kFine ? (integers + (1 << (q::kTailBits - 1))) >> q::kTailBits : integers;
    put_bytes(to + i * kLanes, upper);
    if constexpr (kFine) put_bytes(to + tail + i * kLanes, integers - (upper << q::kTailBits));
  }
  std::int32_t sums[2];
  for (int half = 0; half < 2; ++half) {
    const std::int8_t* bytes = to + half * (q::kGroup / 2);
    sums[half] = kFine ? (sum_of_bytes(bytes) << q::kTailBits) + sum_of_bytes(bytes + tail) : sum_of_bytes(bytes);
  }
  if (of.parts == 1) sums[0] += sums[1];
  for (int part = 0; part < 2; ++part) {
    group.starts[part] = -of.zero * sums[part];
    group.sums[part] = static_cast<float>(sums[part]) * group.scale;
  }
}

template <bool kFine, class X>
static void quantise_rows(const q::Quantise& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  const Layout of = q::layout_of(op.format);
  const std::ptrdiff_t groups = op.k / q::kGroup, tail = op.to.tails - op.to.values;
  for (std::ptrdiff_t row = begin; row < end; ++row) {
    const X* x = static_cast<const X*>(op.x) + row * op.stride;
    std::int8_t* to = op.to.values + row * op.k;
    for (std::ptrdiff_t i = 0; i < groups; ++i)
      quantise_group<kFine>(x + i * q::kGroup, to + i * q::kGroup, tail, op.to.groups[row * groups + i], of);
  }
}

template <class X>
static void quantise_rows(const q::Quantise& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (op.to.is_fine()) return quantise_rows<true, X>(op, begin, end);
  quantise_rows<false, X>(op, begin, end);
}

static void quantise(const q::Quantise& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (dtype == Dtype::float32) return quantise_rows<float>(op, begin, end);
  if (dtype == Dtype::bfloat16) return quantise_rows<Bf16>(op, begin, end);
  quantise_rows<Fp16>(op, begin, end);
}

// Of one value, without a scale.
template <q::Format kFormat>
static inline float number_of(std::uint8_t value) {
  constexpr Layout of = q::layout_of(kFormat);
  if constexpr (q::is_float(of)) return floats_of_float8(Words{} + value)[0];
  return static_cast<float>(value - of.zero);
}

// One output: its integers are picked from unpacked groups.
template <q::Format kFormat, class T>
static void gather_rows(const q::Gather& op, std::ptrdiff_t begin, std::ptrdiff_t end) {
  constexpr Layout of = q::layout_of(kFormat);
  Chunk chunk;
  for (std::ptrdiff_t id = begin; id < end; ++id) {
    const std::ptrdiff_t output = op.ids[id] % q::kStrip, groups = op.k / q::kGroup;
    const std::uint8_t* strip = op.w + op.ids[id] / q::kStrip * q::strip_bytes(of, op.k);
    T* y = static_cast<T*>(op.y) + id * op.k;
    for (std::ptrdiff_t first = 0; first < groups; first += kChunkGroups) {
      const std::ptrdiff_t count = groups - first < kChunkGroups ? groups - first : kChunkGroups;
      unpack<kFormat>(chunk, strip, first, first + count);
      for (std::ptrdiff_t i = 0; i < count * q::kGroup; ++i) {
        const std::ptrdiff_t group = i / q::kGroup, within = i % q::kGroup;
        const std::uint8_t value = chunk.lines(group, output)[within / 4 * q::kLine + within % 4];
        const std::ptrdiff_t numbers = (group * of.parts + within * of.parts / q::kGroup) * q::kStrip + output;
        const float product = number_of<kFormat>(value) * chunk.scales[numbers];
        put(y + first * q::kGroup + i, of.minimum == q::Minimum::none ? product : product - chunk.minima[numbers]);
      }
    }
  }
}

static void gather(const q::Gather& op, Dtype dtype, std::ptrdiff_t begin, std::ptrdiff_t end) {
  with_format(op.format, [&](auto format) {
    constexpr q::Format kFormat = decltype(format)::value;
    if (dtype == Dtype::float32) gather_rows<kFormat, float>(op, begin, end);
    else if (dtype == Dtype::bfloat16) gather_rows<kFormat, Bf16>(op, begin, end);
    else gather_rows<kFormat, Fp16>(op, begin, end);
  });
}

}  // namespace

namespace memserve::MEMSERVE_ISA {
extern const quantised::Kernels quantised_kernels;
const quantised::Kernels quantised_kernels{&quantise, &gather};
}  // namespace memserve::MEMSERVE_ISA
