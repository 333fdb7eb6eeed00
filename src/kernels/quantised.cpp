// Distributes the kernels for quantised weights over threads, and chooses among those of the instruction sets.
#include "quantised.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#include "fused.h"
#include "isa.h"

namespace memserve::quantised {
namespace {

// With fewer weights a second thread costs more than it gains.
constexpr std::ptrdiff_t kWeightsPerThread = 32768;
// With so many outputs for each row, one thread makes integers of the rows sooner than several meet again.
constexpr std::ptrdiff_t kOutputsPerRow = 256;
constexpr std::ptrdiff_t kPanelStrips = 2;  // of an exact product: as wide as the tiles that multiply it
// Matrix units read rows once a panel, and wait for them: it fills half of the second cache of such processors.
constexpr std::ptrdiff_t kPanelStripsMax = 16, kMatrixPanelBytes = 1 << 20;
// Two products of bytes take as long as one of numbers for so many rows. Matrix units multiply numbers sooner from 17
// rows on, but up to here a row comes out the same whatever is beside it: of a short prompt, an answer that begins in
// the cache is the one that begins with all of it.
constexpr std::ptrdiff_t kRowsOfIntegers = 128;

std::atomic<int> forced_set{-1};

int threads_for(std::ptrdiff_t weights) {
#if defined(_OPENMP)
  return static_cast<int>(std::clamp<std::ptrdiff_t>(weights / kWeightsPerThread, 1, omp_get_max_threads()));
#else
  return weights < 0 ? 0 : 1;
#endif
}

// Memory in whole lines, not initialised.
struct FreeLines {
  void operator()(std::uint8_t* p) const { ::operator delete(p, std::align_val_t(kLine)); }
};
using Lines = std::unique_ptr<std::uint8_t, FreeLines>;
Lines lines(std::ptrdiff_t bytes) {
  return Lines(static_cast<std::uint8_t*>(::operator new(static_cast<std::size_t>(bytes), std::align_val_t(kLine))));
}

// Memory of a thread that is used again: a new panel for each strip would be new pages each time.
struct Scratch {
  Lines memory;
  std::ptrdiff_t size = 0;

  void* of(std::ptrdiff_t bytes) {
    if (bytes > size) memory = lines(bytes), size = bytes;
    return memory.get();
  }
};

// This thread's part of [0, count), among those of its team.
struct Part {
  std::ptrdiff_t begin, end;
};
Part part_of(std::ptrdiff_t count) {
#if defined(_OPENMP)
  const std::ptrdiff_t n = omp_get_num_threads(), i = omp_get_thread_num();
#else
  const std::ptrdiff_t n = 1, i = 0;
#endif
  return {count * i / n, count * (i + 1) / n};
}

// `count` numbers in a dtype, rounded to nearest; no NaN is among them.
void narrow(const float* from, void* to, std::ptrdiff_t count, Dtype dtype) {
  if (dtype == Dtype::float32) return static_cast<void>(std::memcpy(to, from, static_cast<std::size_t>(count) * 4));
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    static_cast<std::uint16_t*>(to)[i] = static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

// Whether numbers of a dtype are multiplied by matrix units.
bool has_matrices(Dtype of_x) { return of_x == Dtype::bfloat16 && current_isa() == Isa::amx; }

const FillKernels& fill_kernels_in_use() {
#if defined(MEMSERVE_X86_ISAS)
  const int set = set_in_use();
  if (set >= 3) return current_isa() >= Isa::avx512_bf16 ? avx512_bf16::fill_kernels : avx512::fill_kernels;
  if (set >= 1) return avx2::fill_kernels;
#endif
  return portable::fill_kernels;
}

const FloatKernels& float_kernels_in_use(Dtype of_x) {
#if defined(MEMSERVE_X86_ISAS)
  static const bool has_tables = best_isa() >= Isa::avx512_bf16 && __builtin_cpu_supports("avx512vbmi");
  const Isa isa = current_isa();
  if (isa >= Isa::avx512_bf16 && has_tables && of_x == Dtype::bfloat16) return avx512_bf16_vbmi::float8_kernels;
  if (isa >= Isa::avx512) return avx512::float8_kernels;
  if (isa == Isa::avx2) return avx2::float8_kernels;
#endif
  return portable::float8_kernels;
}

void fill_and_multiply(const Linear& op, Dtype of_x, bool wide, Part strips) {
  const auto fill = fill_kernels_in_use().fill;
  const auto multiply = fused::kernels_in_use().linear;
  const std::ptrdiff_t item = of_x == Dtype::float32 ? 4 : 2, item_y = wide ? 4 : item;
  const std::ptrdiff_t bytes = strip_bytes(layout_of(op.format), op.k);
  const std::ptrdiff_t fitting = has_matrices(of_x) ? kMatrixPanelBytes / (kStrip * op.k * item) : kPanelStrips;
  const std::ptrdiff_t width = std::clamp(fitting, kPanelStrips, kPanelStripsMax);
  static thread_local Scratch scratch;
  void* panel = scratch.of(width * kStrip * op.k * item);
  for (std::ptrdiff_t strip = strips.begin; strip < strips.end; strip += width) {
    const std::ptrdiff_t count = std::min(width, strips.end - strip), first = strip * kStrip;
    const std::ptrdiff_t outputs = std::min(count * kStrip, op.n - first);
    float bias[kPanelStripsMax * kStrip];
    if (op.bias) narrow(op.bias + first, bias, outputs, of_x);
    fill(Panel{op.w + strip * bytes, panel, op.k, op.format}, of_x, 0, count);
    multiply(fused::Linear{op.x, panel, op.bias ? bias : nullptr, static_cast<char*>(op.y) + first * item_y,
                           op.rows, op.k, op.k, outputs, kStrip, op.stride_x, op.stride_y, wide},
             of_x, 0, outputs);
  }
}

}  // namespace

bool supports_set(int set) {
#if defined(MEMSERVE_X86_ISAS)
  const Isa best = best_isa();
  if (set == 4) return best >= Isa::avx512 && __builtin_cpu_supports("avx512vnni");
  if (set == 3) return best >= Isa::avx512;
  if (set == 2) return best >= Isa::avx2 && has_avx_vnni();
  if (set == 1) return best >= Isa::avx2;
#endif
  return set == 0;
}

void force_set(int set) { forced_set.store(set, std::memory_order_relaxed); }

int set_in_use() {
  static const bool able[kSets] = {true, supports_set(1), supports_set(2), supports_set(3), supports_set(4)};
  const int forced = forced_set.load(std::memory_order_relaxed);
  if (forced >= 0) return forced;
  const Isa isa = current_isa();
  if (isa >= Isa::avx512) return able[4] ? 4 : 3;
  if (isa == Isa::avx2) return able[2] ? 2 : 1;
  return 0;
}

const Kernels& kernels_in_use() {
#if defined(MEMSERVE_X86_ISAS)
  if (set_in_use() >= 3) return avx512::quantised_kernels;
  if (set_in_use() >= 1) return avx2::quantised_kernels;
#endif
  return portable::quantised_kernels;
}

const ProductKernels& product_kernels_in_use() {
#if defined(MEMSERVE_X86_ISAS)
  switch (set_in_use()) {
    case 4: return avx512_vnni::product_kernels;
    case 3: return avx512::product_kernels;
    case 2: return avx2_vnni::product_kernels;
    case 1: return avx2::product_kernels;
    default: break;
  }
#endif
  return portable::product_kernels;
}

bool takes_numbers(Format format, std::ptrdiff_t rows, bool fine, Dtype of_x) {
  if (is_float(layout_of(format))) return true;
  if (of_x == Dtype::float16) return false;
  return fine && rows > kRowsOfIntegers;
}

void multiply_numbers(const Linear& op, Dtype of_x, Dtype of_y, std::ptrdiff_t begin, std::ptrdiff_t end) {
  if (begin >= end) return;
  if (is_float(layout_of(op.format)) && op.rows <= kRowsOfFloats)
    return float_kernels_in_use(of_x).multiply(op, of_x, of_y, begin, end);
  fill_and_multiply(op, of_x, of_y == Dtype::float32 && of_x != Dtype::float32, {begin, end});
}

void run(const Linear& op, Dtype of_x, Dtype of_y) {
  const Kernels& kernels = kernels_in_use();
  const ProductKernels& products = product_kernels_in_use();
  if (takes_numbers(op.format, op.rows, op.fine, of_x)) return run_exact(op, of_x, of_y);
  if (op.rows <= 0) return;
  const Lines memory = lines(activation_bytes(op.rows, op.k, op.fine));
  const Activations x = activations_in(memory.get(), op.rows, op.k, op.fine);
  const Quantise first{op.x, x, op.k, op.stride_x, op.format};
  const Product second{x, op.w, op.bias, op.y, op.rows, op.k, op.n, op.stride_y, op.format};
  const int threads = threads_for(op.n * op.k);
  const bool alone = threads <= 1 || op.rows * kOutputsPerRow <= op.n;
  if (alone) kernels.quantise(first, of_x, 0, op.rows);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
#endif
  {
    const Part rows = part_of(op.rows), strips = part_of(strips_of(op.n));
    if (!alone) {
      kernels.quantise(first, of_x, rows.begin, rows.end);
#if defined(_OPENMP)
#pragma omp barrier
#endif
    }
    products.multiply(second, of_y, strips.begin, strips.end);
  }
}

void run_exact(const Linear& op, Dtype of_x, Dtype of_y) {
  const std::ptrdiff_t panels = (strips_of(op.n) + kPanelStrips - 1) / kPanelStrips;
  if (op.rows <= 0) return;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads_for(op.n * op.k))
#endif
  {
    const Part part = part_of(panels);
    multiply_numbers(op, of_x, of_y, part.begin * kPanelStrips, std::min(part.end * kPanelStrips, strips_of(op.n)));
  }
}

void run(const Gather& op, Dtype dtype, std::ptrdiff_t count) {
  const Kernels& kernels = kernels_in_use();
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads_for(count * op.k * kStrip))
#endif
  {
    const Part part = part_of(count);
    kernels.gather(op, dtype, part.begin, part.end);
  }
}

}  // namespace memserve::quantised
