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

constexpr size_t kClaimBytes = size_t{256} << 10;     // what a thread claims at once
constexpr size_t kParallelBytes = size_t{1} << 20;    // below this, waking a thread costs more than it saves
constexpr int kColumns = 64;                          // of a matrix that are converted together

MEMSERVE_INLINE float from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
MEMSERVE_INLINE uint32_t to_bits(float value) { return std::bit_cast<uint32_t>(value); }

struct Float32 {
  using Bits = uint32_t;
  static constexpr Bits kNan = 0x7FC00000;
  static MEMSERVE_INLINE float wide(Bits bits) { return from_bits(bits); }
  static MEMSERVE_INLINE Bits narrow(float value) { return to_bits(value); }
};

struct Bfloat16 {
  using Bits = uint16_t;
  static constexpr Bits kNan = 0x7FC0;
  static MEMSERVE_INLINE float wide(Bits bits) { return from_bits(uint32_t{bits} << 16); }
  static MEMSERVE_INLINE Bits narrow(float value) {
    const uint32_t bits = to_bits(value);
    return static_cast<Bits>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {
  using Bits = uint16_t;
  static constexpr Bits kNan = 0x7E00;
  static MEMSERVE_INLINE float wide(Bits bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7FFF;
    const float normal = from_bits((magnitude << 13) + ((127 - 15) << 23));
    const float below = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    const uint32_t infinite = magnitude >= 0x7C00 ? 0x7F800000 : 0;  // or no number
    return from_bits(to_bits(magnitude < 0x400 ? below : normal) | sign | infinite);
  }
  static MEMSERVE_INLINE Bits narrow(float value) {
    const uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
    const uint32_t below = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);  // in units of 2^-24
    const uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    return static_cast<Bits>((magnitude < to_bits(0x1p-14f) ? below : normal) | sign);
  }
};

// float16 below 2^-14 has steps that may be wider than those of codes: what comes up may be nearer to another code, and
// that one is the code to keep, since it comes up as the same value.
template <class Type, Scheme S>
MEMSERVE_INLINE uint32_t code_of(float value, float inverse, float scale) {
  const float scaled = inverse != 0 ? value * inverse : 0.0f;
  const uint32_t code = Codes<S>::code(scaled);
  if constexpr (std::is_same_v<Type, Float16>)
    return inverse != 0 ? Codes<S>::code(Type::wide(Type::narrow(Codes<S>::value(code) * scale)) * inverse) : code;
  return code;
}

// Maxima, and what they say, of the groups of neighbouring columns or rows.
struct Groups {
  uint32_t most[kColumns];
  float inverse[kColumns], scale[kColumns];

  template <Scheme S>
  MEMSERVE_INLINE void close(int count, uint8_t* maxima) {
    for (int i = 0; i < count; ++i) {
      const uint32_t maximum = maximum_of(most[i]);
      inverse[i] = inverse_of<S>(maximum);
      scale[i] = scale_of<S>(maximum);
      const auto bits = static_cast<uint16_t>(maximum);
      std::memcpy(maxima + i * sizeof(bits), &bits, sizeof(bits));
    }
  }
};

MEMSERVE_INLINE uint32_t magnitude(float value) { return to_bits(value) & 0x7FFFFFFF; }

// K: a group is a column of some rows.
template <class Type, Scheme S, class Bits = typename Type::Bits>
MEMSERVE_INLINE void keys_down(const CodedHead& head, const Bits* values, uint8_t* lower) {
  for (int first = 0; first < head.tokens; first += kColumns) {
    const int columns = std::min(kColumns, head.tokens - first);
    for (int row = 0; row < head.dim_k;) {
      const int end = std::min(row + Codes<S>::kGroup, head.dim_k);
      Groups groups{};
      for (int d = row; d < end; ++d)
        for (int t = 0; t < columns; ++t)
          groups.most[t] = std::max(groups.most[t], magnitude(Type::wide(values[size_t(d) * head.tokens + first + t])));
      groups.close<S>(columns, lower + head.key_maximum(row / Codes<S>::kGroup, first));
      for (; row < end; row += Codes<S>::kDepth) {
        uint32_t units[kColumns] = {};
        for (int i = 0; i < Codes<S>::kDepth && row + i < end; ++i)
          for (int t = 0; t < columns; ++t)
            units[t] |= code_of<Type, S>(Type::wide(values[size_t(row + i) * head.tokens + first + t]), groups.inverse[t],
                                         groups.scale[t]) << unit_shift<S>(i);
        std::memcpy(lower + head.key_unit(row, first), units, columns * sizeof(uint32_t));
      }
    }
  }
}

// V: a group is some columns of a row.
template <class Type, Scheme S, class Bits = typename Type::Bits>
MEMSERVE_INLINE void values_down(const CodedHead& head, const Bits* values, uint8_t* lower) {
  for (int first = 0; first < head.tokens; first += Codes<S>::kDepth) {
    const int rows = std::min(Codes<S>::kDepth, head.tokens - first);
    for (int column = 0; column < head.dim_v;) {
      const int end = std::min(column + Codes<S>::kGroup, head.dim_v), group = column / Codes<S>::kGroup;
      Groups groups{};
      for (int i = 0; i < rows; ++i)
        for (int d = column; d < end; ++d)
          groups.most[i] = std::max(groups.most[i], magnitude(Type::wide(values[size_t(first + i) * head.dim_v + d])));
      groups.close<S>(rows, lower + head.value_maximum(group, first));
      for (; column < end; column += kColumns) {
        uint32_t units[kColumns] = {};
        const int columns = std::min(kColumns, end - column);
        for (int i = 0; i < rows; ++i)
          for (int d = 0; d < columns; ++d)
            units[d] |= code_of<Type, S>(Type::wide(values[size_t(first + i) * head.dim_v + column + d]),
                                         groups.inverse[i], groups.scale[i]) << unit_shift<S>(i);
        std::memcpy(lower + head.value_unit(first, column), units, columns * sizeof(uint32_t));
      }
      column = end;
    }
  }
}

template <class Type, Scheme S>
MEMSERVE_INLINE typename Type::Bits value_of(const uint8_t* unit_at, int place, uint16_t maximum) {
  uint32_t unit;
  std::memcpy(&unit, unit_at, sizeof(unit));
  const uint32_t code = (unit >> unit_shift<S>(place)) & (S == Scheme::int4 ? 0xF : 0xFF);
  const auto bits = Type::narrow(Codes<S>::value(code) * scale_of<S>(maximum));
  return maximum < 0x7F80 ? bits : Type::kNan;
}

template <class Type, Scheme S>
MEMSERVE_INLINE void head_up(const CodedHead& head, const uint8_t* lower, typename Type::Bits* values) {
  const auto maximum = [&](size_t at) {
    uint16_t bits;
    std::memcpy(&bits, lower + at, sizeof(bits));
    return bits;
  };
  for (int d = 0; d < head.dim_k; ++d) {
    const size_t units = head.key_unit(d, 0), maxima = head.key_maximum(d / Codes<S>::kGroup, 0);
    const int place = d % Codes<S>::kDepth;
    for (int t = 0; t < head.tokens; ++t)
      values[size_t(d) * head.tokens + t] =
          value_of<Type, S>(lower + units + size_t(t) * kUnitBytes, place, maximum(maxima + t * sizeof(uint16_t)));
  }
  values += size_t(head.dim_k) * head.tokens;
  for (int t = 0; t < head.tokens; ++t, values += head.dim_v) {
    const int place = t % Codes<S>::kDepth;
    for (int first = 0; first < head.dim_v; first += Codes<S>::kGroup) {
      const uint16_t bits = maximum(head.value_maximum(first / Codes<S>::kGroup, t));
      const size_t units = head.value_unit(t, 0);
      for (int d = first; d < std::min(first + Codes<S>::kGroup, head.dim_v); ++d)
        values[d] = value_of<Type, S>(lower + units + size_t(d) * kUnitBytes, place, bits);
    }
  }
}

struct Shape {
  size_t kv_heads;
  CodedHead head;
};

template <class Type, Scheme S>
MEMSERVE_INLINE void convert(const Shape& shape, const LowerPages::Piece& piece, bool is_down) {
  using Bits = typename Type::Bits;
  const CodedHead& head = shape.head;
  const size_t values = size_t(head.tokens) * (head.dim_k + head.dim_v);
  for (size_t h = 0; h < shape.kv_heads; ++h) {
    if (!is_down) {
      head_up<Type, S>(head, piece.src + h * head.bytes(), reinterpret_cast<Bits*>(piece.dst) + h * values);
      continue;
    }
    const Bits* from = reinterpret_cast<const Bits*>(piece.src) + h * values;
    uint8_t* to = piece.dst + h * head.bytes();
    keys_down<Type, S>(head, from, to);
    values_down<Type, S>(head, from + size_t(head.dim_k) * head.tokens, to);
    const size_t end = head.value_maximum(head.groups(head.dim_v), 0);
    std::memset(to + end, 0, head.bytes() - end);
  }
}

template <Scheme S>
MEMSERVE_INLINE void convert_from(const Shape& shape, PageDtype dtype, const LowerPages::Piece& piece, bool is_down) {
  switch (dtype) {
    case PageDtype::float32: return convert<Float32, S>(shape, piece, is_down);
    case PageDtype::bfloat16: return convert<Bfloat16, S>(shape, piece, is_down);
    case PageDtype::float16: return convert<Float16, S>(shape, piece, is_down);
  }
}

#define MEMSERVE_CONVERTER(name, attributes)                                                                       \
  attributes void name(const Shape& shape, PageDtype dtype, Scheme scheme, const LowerPages::Piece& piece,          \
                       bool is_down) {                                                                              \
    switch (scheme) {                                                                                               \
      case Scheme::int8: return convert_from<Scheme::int8>(shape, dtype, piece, is_down);                           \
      case Scheme::fp8: return convert_from<Scheme::fp8>(shape, dtype, piece, is_down);                             \
      case Scheme::int4: return convert_from<Scheme::int4>(shape, dtype, piece, is_down);                           \
      case Scheme::as_computed: return;                                                                             \
    }                                                                                                               \
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

LowerPages::LowerPages(int kv_heads, const CodedHead& head, PageDtype dtype, Scheme scheme)
    : kv_heads_(static_cast<size_t>(kv_heads)), head_(head), dtype_(dtype), scheme_(scheme) {}

void LowerPages::down(std::span<const Piece> pieces, int threads) const { run(pieces, threads, true); }

void LowerPages::up(std::span<const Piece> pieces, int threads) const { run(pieces, threads, false); }

void LowerPages::run(std::span<const Piece> pieces, int threads, bool is_down) const {
  static const auto convert_page = best_converter();
  const Shape shape{kv_heads_, head_};
  if (threads <= 1 || pieces.size() * page_bytes() < kParallelBytes) {
    for (const Piece& piece : pieces) convert_page(shape, dtype_, scheme_, piece, is_down);
    return;
  }
  const size_t each = std::max<size_t>(kClaimBytes / page_bytes(), 1);  // pages of a unit of work
  run_units((pieces.size() + each - 1) / each, threads, [&](size_t unit) {
    const size_t end = std::min(pieces.size(), (unit + 1) * each);
    for (size_t k = unit * each; k < end; ++k) convert_page(shape, dtype_, scheme_, pieces[k], is_down);
  });
}

}  // namespace memserve
