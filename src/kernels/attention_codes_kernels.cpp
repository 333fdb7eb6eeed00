// Paged attention over pages of codes, compiled once per instruction set.
#include "attention_codes_decode.h"
#include "attention_tile.h"

namespace memserve::MEMSERVE_ISA {
namespace {

// Exact products where a float32 model is compared with another; else the fastest.
template <Scheme S, class T>
struct Decode {
#if defined(__AVX512VNNI__)
  static constexpr bool kBytes = S != Scheme::fp8 && !std::is_same_v<T, float>;
  using Math = std::conditional_t<kBytes, ByteMath<kBytes ? S : Scheme::int8>, FloatMath<S>>;
#else
  using Math = FloatMath<S>;
#endif
  using Kernel = CodedDecodeKernel<S, T, Math>;
};

template <class T>
struct FormatOf {
  using Type = Floats;
};
#if defined(__AVX512BF16__)
template <>
struct FormatOf<BFloat16> {
  using Type = Pairs;
};
#endif

template <Scheme S, class T>
void attend_tile(const TileJob& job) {
  using Format = typename FormatOf<T>::Type;
  using Decoding = typename Decode<S, T>::Kernel;
  if (Decoding::fits(job))
    Decoding(job).run();
  else
    TileKernel<Format, T, CodedPanels<S, Format, T>>(job).run();
}

}  // namespace

#define MEMSERVE_BY_DTYPE(function, scheme) \
  {&function<scheme, float>, &function<scheme, BFloat16>, &function<scheme, Float16>}

extern const CodedKernels coded_kernels = {
    {MEMSERVE_BY_DTYPE(attend_tile, Scheme::int8), MEMSERVE_BY_DTYPE(attend_tile, Scheme::fp8),
     MEMSERVE_BY_DTYPE(attend_tile, Scheme::int4)},
    {MEMSERVE_BY_DTYPE(write_codes, Scheme::int8), MEMSERVE_BY_DTYPE(write_codes, Scheme::fp8),
     MEMSERVE_BY_DTYPE(write_codes, Scheme::int4)},
};

}  // namespace memserve::MEMSERVE_ISA
