#include "pool/lower_pages.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "pool/workers.h"

// Loops over integers and floats without branches: the compiler makes vectors of them, once for each instruction set.
#define MEMSERVE_INLINE inline __attribute__((always_inline))

namespace memserve {

namespace {

constexpr size_t kAlign = 64;                         // of lower pages
constexpr size_t kUnitBytes = size_t{256} << 10;      // what a thread claims at once
constexpr size_t kParallelBytes = size_t{1} << 20;    // below this, waking a thread costs more than it saves
constexpr uint32_t kLeastBits = (127 - 100) << 23;    // 2^-100
constexpr uint32_t kLimitBits = (127u + 127) << 23;   // 2^127

MEMSERVE_INLINE float from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
MEMSERVE_INLINE uint32_t to_bits(float value) { return std::bit_cast<uint32_t>(value); }

// `kMagnitude`: all bits but the sign. `kLimit`: magnitudes from here on are no numbers.
struct Float32 {
  using Bits = uint32_t;
  static constexpr Bits kMagnitude = 0x7FFFFFFF, kLimit = kLimitBits, kNan = 0x7FC00000;
  static MEMSERVE_INLINE float wide(Bits bits) { return from_bits(bits); }
  static MEMSERVE_INLINE Bits narrow(float value) { return to_bits(value); }
};

struct Bfloat16 {
  using Bits = uint16_t;
  static constexpr Bits kMagnitude = 0x7FFF, kLimit = kLimitBits >> 16, kNan = 0x7FC0;
  static MEMSERVE_INLINE float wide(Bits bits) { return from_bits(uint32_t{bits} << 16); }
  static MEMSERVE_INLINE Bits narrow(float value) {
    const uint32_t bits = to_bits(value);
    return static_cast<Bits>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {
  using Bits = uint16_t;
  static constexpr Bits kMagnitude = 0x7FFF, kLimit = 0x7C00, kNan = 0x7E00;
  static MEMSERVE_INLINE float wide(Bits bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7FFF;
    const float normal = from_bits((magnitude << 13) + ((127 - 15) << 23));
    const float below = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    return from_bits(to_bits(magnitude < 0x400 ? below : normal) | sign);
  }
  static MEMSERVE_INLINE Bits narrow(float value) {
    const uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
    const uint32_t below = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);  // in units of 2^-24
    const uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    return static_cast<Bits>((magnitude < to_bits(0x1p-14f) ? below : normal) | sign);
  }
};

struct Int8 {
  static constexpr float kLargest = 127.0f;
  static constexpr uint8_t kNan = 0x80;
  static MEMSERVE_INLINE uint8_t code(float value) {
    return static_cast<uint8_t>(to_bits(value + 0x1.8p23f));  // the sum's last bit is worth 1: it rounds to even
  }
  static MEMSERVE_INLINE float value(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};

struct Fp8 {
  static constexpr float kLargest = 448.0f;
  static constexpr uint8_t kNan = 0x7F;
  static MEMSERVE_INLINE uint8_t code(float value) {
    const uint32_t bits = to_bits(value), sign = (bits >> 24) & 0x80, magnitude = bits & 0x7FFFFFFF;
    const uint32_t below = to_bits(from_bits(magnitude) + 0x1p14f) - to_bits(0x1p14f);  // in units of 2^-9
    const uint32_t normal = (magnitude - ((127 - 7) << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20;
    return static_cast<uint8_t>((magnitude < to_bits(0x1p-6f) ? below : normal) | sign);
  }
  static MEMSERVE_INLINE float value(uint8_t code) {
    const uint32_t sign = uint32_t(code & 0x80) << 24, magnitude = code & 0x7F;
    const float normal = from_bits((magnitude << 20) + ((127 - 7) << 23));
    const float below = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
    return from_bits(to_bits(magnitude < 8 ? below : normal) | sign);
  }
};

MEMSERVE_INLINE float scale_of(float most, float largest) {
  if (to_bits(most) < kLeastBits) return 0.0f;
  return from_bits((to_bits(most / largest) + 0xFF) & ~0xFFu);
}

// Of the numbers among `values`. Written with vectors, because the compiler makes none of a maximum of 16 bits.
template <class Type, class Bits = typename Type::Bits>
MEMSERVE_INLINE Bits largest_magnitude(const Bits* values, size_t count) {
  using Vector __attribute__((vector_size(64))) = Bits;
  constexpr size_t kLanes = sizeof(Vector) / sizeof(Bits);
  Vector most = {};
  Bits largest = 0;
  size_t first = 0;
  for (; first + kLanes <= count; first += kLanes) {
    Vector magnitudes;
    std::memcpy(&magnitudes, values + first, sizeof(magnitudes));
    magnitudes &= Type::kMagnitude;
    magnitudes = magnitudes < Type::kLimit ? magnitudes : Vector{};
    most = magnitudes > most ? magnitudes : most;
  }
  for (size_t i = 0; i < kLanes; ++i) largest = std::max<Bits>(largest, most[i]);
  for (; first < count; ++first) {
    const Bits magnitude = values[first] & Type::kMagnitude;
    largest = std::max<Bits>(largest, magnitude < Type::kLimit ? magnitude : Bits{0});
  }
  return largest;
}

// float16 below 2^-14 has steps that lie between those of fp8 on both sides of a power of two: there what comes up may
// be nearer to another code, and that one is the code to keep, since it comes up as the same value.
template <class Type, class Code>
MEMSERVE_INLINE uint8_t code_of(float value, float scale, float inverse) {
  const uint8_t code = Code::code(value * inverse);
  if constexpr (std::is_same_v<Type, Float16> && std::is_same_v<Code, Fp8>) {
    return Code::code(Type::wide(Type::narrow(Code::value(code) * scale)) * inverse);
  }
  return code;
}

template <class Type, class Code>
MEMSERVE_INLINE void run_down(const uint8_t* from, uint8_t* codes, uint8_t* scale_at, size_t count) {
  using Bits = typename Type::Bits;
  const auto* values = reinterpret_cast<const Bits*>(from);
  const Bits most = largest_magnitude<Type>(values, count);
  const float scale = scale_of(Type::wide(most), Code::kLargest);
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  for (size_t i = 0; i < count; ++i) {
    const Bits magnitude = values[i] & Type::kMagnitude;
    codes[i] = magnitude < Type::kLimit ? code_of<Type, Code>(Type::wide(values[i]), scale, inverse) : Code::kNan;
  }
  std::memcpy(scale_at, &scale, sizeof(scale));
}

template <class Type, class Code>
MEMSERVE_INLINE void run_up(const uint8_t* codes, const uint8_t* scale_at, uint8_t* to, size_t count) {
  using Bits = typename Type::Bits;
  auto* values = reinterpret_cast<Bits*>(to);
  float scale;
  std::memcpy(&scale, scale_at, sizeof(scale));
  for (size_t i = 0; i < count; ++i) {
    const Bits value = Type::narrow(Code::value(codes[i]) * scale);
    values[i] = codes[i] == Code::kNan ? Type::kNan : value;
  }
}

struct Shape {
  size_t kv_heads, run_values[2], value_bytes, lower_bytes;
};

template <class Type, class Code>
MEMSERVE_INLINE void convert(const Shape& shape, const LowerPages::Piece& piece, bool is_down) {
  const size_t values = shape.kv_heads * (shape.run_values[0] + shape.run_values[1]);
  const size_t padding = values + shape.kv_heads * 2 * sizeof(float);
  size_t at = 0;
  for (size_t run = 0; run < 2 * shape.kv_heads; ++run) {
    const size_t count = shape.run_values[run % 2], scale_at = values + run * sizeof(float);
    if (is_down) {
      run_down<Type, Code>(piece.src + at * shape.value_bytes, piece.dst + at, piece.dst + scale_at, count);
    } else {
      run_up<Type, Code>(piece.src + at, piece.src + scale_at, piece.dst + at * shape.value_bytes, count);
    }
    at += count;
  }
  if (is_down) std::memset(piece.dst + padding, 0, shape.lower_bytes - padding);
}

template <class Code>
MEMSERVE_INLINE void convert_from(const Shape& shape, PageDtype dtype, const LowerPages::Piece& piece, bool is_down) {
  switch (dtype) {
    case PageDtype::float32: return convert<Float32, Code>(shape, piece, is_down);
    case PageDtype::bfloat16: return convert<Bfloat16, Code>(shape, piece, is_down);
    case PageDtype::float16: return convert<Float16, Code>(shape, piece, is_down);
  }
}

#define MEMSERVE_CONVERTER(name, attributes)                                                                    \
  attributes void name(const Shape& shape, PageDtype dtype, LowerDtype lower, const LowerPages::Piece& piece,     \
                       bool is_down) {                                                                           \
    lower == LowerDtype::int8 ? convert_from<Int8>(shape, dtype, piece, is_down)                                 \
                              : convert_from<Fp8>(shape, dtype, piece, is_down);                                 \
  }

MEMSERVE_CONVERTER(convert_anywhere, )
#if defined(__x86_64__)
MEMSERVE_CONVERTER(convert_avx2, __attribute__((target("avx2"))))
MEMSERVE_CONVERTER(convert_avx512,
                   __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))))
#endif

decltype(&convert_anywhere) best_converter() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return &convert_avx512;
  }
  if (__builtin_cpu_supports("avx2")) return &convert_avx2;
#endif
  return &convert_anywhere;
}

}  // namespace

LowerPages::LowerPages(int kv_heads, size_t key_values, size_t value_values, PageDtype dtype, LowerDtype lower)
    : kv_heads_(static_cast<size_t>(kv_heads)), key_values_(key_values), value_values_(value_values), dtype_(dtype),
      lower_(lower) {}

size_t LowerPages::lower_page_bytes() const {
  const size_t bytes = kv_heads_ * (key_values_ + value_values_ + 2 * sizeof(float));
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

void LowerPages::down(std::span<const Piece> pieces, int threads) const { run(pieces, threads, true); }

void LowerPages::up(std::span<const Piece> pieces, int threads) const { run(pieces, threads, false); }

void LowerPages::run(std::span<const Piece> pieces, int threads, bool is_down) const {
  static const auto convert_page = best_converter();
  const Shape shape{kv_heads_, {key_values_, value_values_}, value_bytes(), lower_page_bytes()};
  if (threads <= 1 || pieces.size() * page_bytes() < kParallelBytes) {
    for (const Piece& piece : pieces) convert_page(shape, dtype_, lower_, piece, is_down);
    return;
  }
  const size_t each = std::max<size_t>(kUnitBytes / page_bytes(), 1);  // pages of a unit
  run_units((pieces.size() + each - 1) / each, threads, [&](size_t unit) {
    const size_t end = std::min(pieces.size(), (unit + 1) * each);
    for (size_t k = unit * each; k < end; ++k) convert_page(shape, dtype_, lower_, pieces[k], is_down);
  });
}

}  // namespace memserve
