// Python face of drawing: rows are distributed over threads.
#include <nanobind/nanobind.h>

#include <algorithm>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "isa.h"
#include "sampling.h"

namespace nb = nanobind;

namespace {

using memserve::Isa;
using memserve::sampling::Draw;
using Address = std::uintptr_t;

const memserve::sampling::Kernels& kernels_in_use() {
#if defined(MEMSERVE_X86_ISAS)
  switch (memserve::current_isa()) {
    case Isa::amx:
    case Isa::avx512_bf16: return memserve::avx512_bf16::sampling_kernels;
    case Isa::avx512: return memserve::avx512::sampling_kernels;
    case Isa::avx2: return memserve::avx2::sampling_kernels;
    case Isa::portable: break;
  }
#endif
  return memserve::portable::sampling_kernels;
}

// Rows differ in cost (a filter that keeps much, a flat distribution), so threads claim them one by one.
template <class Work>
void share(std::ptrdiff_t count, Work work) {
#if defined(_OPENMP)
  const int threads = static_cast<int>(std::min<std::ptrdiff_t>(count, omp_get_max_threads()));
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
#endif
  for (std::ptrdiff_t i = 0; i < count; ++i) work(i);
}

void draw(Address logits, std::ptrdiff_t stride, std::ptrdiff_t vocab, Address rows, Address temperature, Address top_k,
          Address top_p, Address min_p, Address uniform, Address tokens, std::ptrdiff_t count) {
  const auto at = [](Address a) { return reinterpret_cast<void*>(a); };
  const Draw op{static_cast<const float*>(at(logits)), stride, vocab, static_cast<const std::int64_t*>(at(rows)),
                static_cast<const float*>(at(temperature)), static_cast<const std::int64_t*>(at(top_k)),
                static_cast<const float*>(at(top_p)), static_cast<const float*>(at(min_p)),
                static_cast<const double*>(at(uniform)), static_cast<std::int64_t*>(at(tokens))};
  nb::gil_scoped_release release;
  const auto& kernels = kernels_in_use();
  share(count, [&](std::ptrdiff_t i) { kernels.draw(op, i, i + 1); });
}

void log_normalisers(Address logits, std::ptrdiff_t stride, std::ptrdiff_t vocab, Address out, std::ptrdiff_t count) {
  nb::gil_scoped_release release;
  const auto& kernels = kernels_in_use();
  share(count, [&](std::ptrdiff_t i) {
    kernels.normalise(reinterpret_cast<const float*>(logits) + i * stride, vocab, reinterpret_cast<float*>(out) + i);
  });
}

void best_logits(Address logits, std::ptrdiff_t stride, std::ptrdiff_t vocab, std::ptrdiff_t best, Address values,
                 Address tokens, std::ptrdiff_t count) {
  nb::gil_scoped_release release;
  const auto& kernels = kernels_in_use();
  share(count, [&](std::ptrdiff_t i) {
    kernels.best(reinterpret_cast<const float*>(logits) + i * stride, vocab, best,
                 reinterpret_cast<float*>(values) + i * best, reinterpret_cast<std::int64_t*>(tokens) + i * best);
  });
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("draw", &draw);
  m.def("log_normalisers", &log_normalisers);
  m.def("best_logits", &best_logits);
}
