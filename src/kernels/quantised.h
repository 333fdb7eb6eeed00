// Linears over weights that stay as a file stores them: integers of 2 to 8 bits with a scale a group.
//
// Packed, a weight [n, k] lies in strips of 32 outputs, and a strip in blocks of inputs (32, or 256 where scales have
// two levels): a header with the scales of the block, then its integers, so that a product reads memory in one stream:
//
//   strip 0: | scales [minima] | values | scales [minima] | values | ...    strip 1: | ...
//
// Values lie in lines of 64 bytes: 16 outputs x 4 inputs, a byte each, which is the operand of a dot product of bytes.
// With fewer than 8 bits several lines share one (see quantised_values.h). Integers are never rounded again: they are
// stored without a sign, `zero` above their value, and scales are the file's own.
//
// Numbers of 8 bits (FP8) are multiplied as such (float8_kernels.cpp). Of integers, a few rows and more are computed
// alike: activations become integers of one byte, or of two where a model needs them (15 bits), with a scale for 32 of
// them, and are multiplied as integers (quantised_body.h). For many rows, and for the exact product, panels of the
// weight become numbers (quantised_fill_kernels.cpp), which are multiplied as any other (fused_linear_body.h): see
// takes_numbers. The bodies start no threads: quantised.cpp distributes strips and rows.
#pragma once
#include <cstddef>
#include <cstdint>

#include "page_layout.h"

namespace memserve::quantised {

// The formats of GGUF files, grouped integers with zero points (AWQ, GPTQ) for groups of 32 and of 128 inputs, and
// numbers of 8 bits (e4m3) with a float for as many.
enum class Format : int {
  q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4,
  int4_32, int4_128, int8_32, int8_128, fp8_32, fp8_128
};
inline constexpr int kFormats = 19;
inline constexpr const char* kFormatNames[kFormats] = {"Q4_0", "Q4_1", "Q5_0",   "Q5_1",   "Q8_0",  "Q2_K",
                                                       "Q3_K", "Q4_K", "Q5_K",   "Q6_K",   "IQ4_NL", "IQ4_XS",
                                                       "MXFP4", "INT4_32", "INT4_128", "INT8_32", "INT8_128",
                                                       "FP8_32", "FP8_128"};

inline constexpr std::ptrdiff_t kStrip = 32, kHalfStrip = 16;  // outputs
inline constexpr std::ptrdiff_t kGroup = 32, kSteps = 8;       // inputs with one scale of activations; steps of 4 in it
inline constexpr std::ptrdiff_t kLine = 64;                    // bytes

// half, bfloat, single: a number a block. levels: a half a block, times a small integer for each of its groups.
enum class Scale { half, bfloat, levels, single };
// half, levels: as scales; zero: a half a block that the scale multiplies.
enum class Minimum { none, half, levels, zero };
enum class Table { none, nonlinear, float4, float8 };  // what four bits mean, or eight

// What four bits mean, without a sign: `zero` above the value.
constexpr int kTableSize = 16;
inline constexpr std::uint8_t kNonlinear[kTableSize] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                        129, 141, 153, 166, 181, 197, 217, 241};
inline constexpr std::uint8_t kFloat4[kTableSize] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// weight = (value - zero) * scale - minimum
struct Layout {
  int bits;
  Scale scale;
  Minimum minimum = Minimum::none;
  int zero = 0;
  int groups = 1;  // groups of 32 inputs in a block
  int parts = 1;   // of a group of 32 inputs that have a scale of their own
  Table table = Table::none;
};

constexpr Layout layout_of(Format format) {
  switch (format) {
    case Format::q4_0: return {4, Scale::half, Minimum::none, 8};
    case Format::q4_1: return {4, Scale::half, Minimum::half};
    case Format::q5_0: return {5, Scale::half, Minimum::none, 16};
    case Format::q5_1: return {5, Scale::half, Minimum::half};
    case Format::q8_0: return {8, Scale::half, Minimum::none, 128};
    case Format::q2_k: return {2, Scale::levels, Minimum::levels, 0, 8, 2};
    case Format::q3_k: return {3, Scale::levels, Minimum::none, 4, 8, 2};
    case Format::q4_k: return {4, Scale::levels, Minimum::levels, 0, 8};
    case Format::q5_k: return {5, Scale::levels, Minimum::levels, 0, 8};
    case Format::q6_k: return {6, Scale::levels, Minimum::none, 32, 8, 2};
    case Format::iq4_nl: return {4, Scale::half, Minimum::none, 128, 1, 1, Table::nonlinear};
    case Format::iq4_xs: return {4, Scale::levels, Minimum::none, 128, 8, 1, Table::nonlinear};
    case Format::mxfp4: return {4, Scale::bfloat, Minimum::none, 12, 1, 1, Table::float4};
    case Format::int4_32: return {4, Scale::half, Minimum::zero};
    case Format::int4_128: return {4, Scale::half, Minimum::zero, 0, 4};
    case Format::int8_32: return {8, Scale::half, Minimum::zero};
    case Format::int8_128: return {8, Scale::half, Minimum::zero, 0, 4};
    case Format::fp8_32: return {8, Scale::single, Minimum::none, 0, 1, 1, Table::float8};
    case Format::fp8_128: return {8, Scale::single, Minimum::none, 0, 4, 1, Table::float8};
  }
  return {};
}

// Bytes of a block of one strip: its numbers first (scale, minimum), then the small scales and minima of its groups.
constexpr std::ptrdiff_t number_bytes(const Layout& of) {
  return kStrip * 2 * (of.minimum == Minimum::none && of.scale != Scale::single ? 1 : 2);
}
// Whether weights are no integers: activations stay numbers then.
constexpr bool is_float(const Layout& of) { return of.table == Table::float8; }
constexpr std::ptrdiff_t level_bytes(const Layout& of) {
  return of.scale == Scale::levels ? kStrip * of.groups * of.parts : 0;
}
constexpr std::ptrdiff_t header_bytes(const Layout& of) {
  return number_bytes(of) + level_bytes(of) * (of.minimum == Minimum::levels ? 2 : 1);
}
constexpr std::ptrdiff_t half_bytes(const Layout& of) { return of.bits * kLine; }  // a group of 16 outputs
constexpr std::ptrdiff_t block_bytes(const Layout& of) { return header_bytes(of) + of.groups * 2 * half_bytes(of); }
constexpr std::ptrdiff_t block_inputs(const Layout& of) { return of.groups * kGroup; }
constexpr std::ptrdiff_t strip_bytes(const Layout& of, std::ptrdiff_t k) {
  return k / block_inputs(of) * block_bytes(of);
}
constexpr std::ptrdiff_t strips_of(std::ptrdiff_t n) { return (n + kStrip - 1) / kStrip; }

// A group of 32 activations of a row: value = scale * integer. `starts` are the sums of the integers times -zero, `sums`
// those of the values; for each part of the group that has a scale of its own.
struct Group {
  float scale;
  std::int32_t starts[2];
  float sums[2];
};

// Rows of activations as integers: int8 [rows, k], and Group [rows, k / 32]. Fine ones have two bytes: an integer is
// values << kTailBits, plus tails; `values` are all of the others, whose `tails` are where `values` are.
inline constexpr int kTailBits = 7;
struct Activations {
  std::int8_t *values, *tails;
  Group* groups;

  bool is_fine() const { return tails != values; }
};
constexpr std::ptrdiff_t activation_bytes(std::ptrdiff_t rows, std::ptrdiff_t k, bool fine) {
  return rows * k * (fine ? 2 : 1) + rows * (k / kGroup) * static_cast<std::ptrdiff_t>(sizeof(Group));
}
// In memory of so many bytes.
inline Activations activations_in(std::uint8_t* memory, std::ptrdiff_t rows, std::ptrdiff_t k, bool fine) {
  auto* values = reinterpret_cast<std::int8_t*>(memory);
  std::int8_t* tails = values + (fine ? rows * k : 0);
  return {values, tails, reinterpret_cast<Group*>(tails + rows * k)};
}

// x [rows, k], `stride` elements between rows, becomes activations for weights of a format.
struct Quantise {
  const void* x;
  Activations to;
  std::ptrdiff_t k, stride;
  Format format;
};

// y[r, n] = sum_k x[r, k] * w[n, k] + bias[n]; bias is float32 or null; y has rows of `stride_y` elements.
struct Product {
  Activations x;
  const std::uint8_t* w;
  const float* bias;
  void* y;
  std::ptrdiff_t rows, k, n, stride_y;
  Format format;
};

// Weights of whole strips as numbers: [k][32] float32 or [k / 2][32][2] bfloat16, the layout of packed linears.
struct Panel {
  const std::uint8_t* w;
  void* to;
  std::ptrdiff_t k;
  Format format;
};

// y[i] = the weights of output ids[i]: rows of an embedding; dense [.., k].
struct Gather {
  const std::uint8_t* w;
  const std::int64_t* ids;
  void* y;
  std::ptrdiff_t k;
  Format format;
};

struct Kernels {
  void (*quantise)(const Quantise&, Dtype of_x, std::ptrdiff_t begin, std::ptrdiff_t end);  // rows
  void (*gather)(const Gather&, Dtype, std::ptrdiff_t begin, std::ptrdiff_t end);           // ids
};

// Apart from the others: there are further ones where a processor rounds to bfloat16, or has dot products of bytes.
struct FillKernels {
  void (*fill)(const Panel&, Dtype, std::ptrdiff_t begin, std::ptrdiff_t end);  // strips
};
struct ProductKernels {
  void (*multiply)(const Product&, Dtype of_y, std::ptrdiff_t begin, std::ptrdiff_t end);  // strips
};

// The sets of kernels that this processor can run, narrowest first. Forced by tests: null is what suits isa.h's choice.
inline constexpr int kSets = 5;
inline constexpr const char* kSetNames[kSets] = {"portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni"};
bool supports_set(int set);
void force_set(int set);  // -1: what suits the instruction set in use
int set_in_use();
const Kernels& kernels_in_use();
const ProductKernels& product_kernels_in_use();

// A linear as a caller has it: x [rows, k] and y [rows, n] dense within rows.
struct Linear {
  const void* x;
  const std::uint8_t* w;
  const float* bias;
  void* y;
  std::ptrdiff_t rows, k, n, stride_x, stride_y;
  Format format;
  bool fine;
};

// Rows times numbers of 8 bits as they are, which become no panel: up to so many rows.
inline constexpr std::ptrdiff_t kRowsOfFloats = 128;
struct FloatKernels {
  void (*multiply)(const Linear&, Dtype of_x, Dtype of_y, std::ptrdiff_t begin, std::ptrdiff_t end);  // strips
};

// Whether activations stay numbers, and panels of the weight become such. A row that is multiplied so comes out a
// little otherwise than as integers, as it would with packed bfloat16 weights.
bool takes_numbers(Format format, std::ptrdiff_t rows, bool fine, Dtype of_x);

// Some strips of a product with the weights as numbers, by one thread: float32 or bfloat16.
void multiply_numbers(const Linear& op, Dtype of_x, Dtype of_y, std::ptrdiff_t begin, std::ptrdiff_t end);

// Several threads share rows and strips; no Python state is touched.
void run(const Linear& op, Dtype of_x, Dtype of_y);
void run_exact(const Linear& op, Dtype of_x, Dtype of_y);  // float32 or bfloat16: arithmetic on the weights as numbers
void run(const Gather& op, Dtype dtype, std::ptrdiff_t count);

// A tensor of a GGUF file, rows of blocks, packed; `order`: which row of it each output is, null: the same.
// Groups of integers: values [n, k] a byte each, scales and zeros float16 [n, k / group].
struct Source {
  const std::uint8_t* blocks;
  const std::int64_t* order;
  const std::uint16_t *scales, *zeros;  // of grouped integers, else null
  const float* singles;                 // of numbers of 8 bits, else null
  std::ptrdiff_t n, k;
  Format format;
};
void pack(const Source& source, std::uint8_t* to);
std::ptrdiff_t file_block_bytes(Format format);  // of a GGUF file; 0: of no such file

// Some outputs and blocks of inputs of a packed weight [.., k], packed: outputs[i] is row i, blocks[j] block j.
struct Cut {
  const std::uint8_t* from;
  const std::int64_t *outputs, *blocks;
  std::ptrdiff_t k, n, block_count;
  Format format;
};
void cut(const Cut& op, std::uint8_t* to);

}  // namespace memserve::quantised

namespace memserve {
namespace portable {
extern const quantised::Kernels quantised_kernels;
extern const quantised::FillKernels fill_kernels;
extern const quantised::ProductKernels product_kernels;
extern const quantised::FloatKernels float8_kernels;
}
#if defined(MEMSERVE_X86_ISAS)
namespace avx2 {
extern const quantised::Kernels quantised_kernels;
extern const quantised::FillKernels fill_kernels;
extern const quantised::ProductKernels product_kernels;
extern const quantised::FloatKernels float8_kernels;
}
namespace avx512_bf16 { extern const quantised::FillKernels fill_kernels; }
namespace avx512_bf16_vbmi { extern const quantised::FloatKernels float8_kernels; }
namespace avx2_vnni { extern const quantised::ProductKernels product_kernels; }
namespace avx512 {
extern const quantised::Kernels quantised_kernels;
extern const quantised::FillKernels fill_kernels;
extern const quantised::ProductKernels product_kernels;
extern const quantised::FloatKernels float8_kernels;
}
namespace avx512_vnni { extern const quantised::ProductKernels product_kernels; }
#endif
}  // namespace memserve
