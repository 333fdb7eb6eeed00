#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "transfer/seal_sums.h"
#include "transfer/sealed_copy.h"
#include "scheduling/sequence.h"

namespace memserve {

namespace {

using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Seals = nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>;

size_t valid_offset(int64_t offset) {
  if (offset < 0) throw nb::value_error("offsets must not be negative");
  return static_cast<size_t>(offset);
}

Seals sealed(const std::vector<SealedPiece>& pieces, int64_t range_bytes, int threads) {
  auto seals = std::make_unique<uint64_t[]>(pieces.size());
  {
    const nb::gil_scoped_release unlocked;
    seal_pieces(pieces, static_cast<size_t>(range_bytes), seals.get(), threads);
  }
  uint64_t* const data = seals.release();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<uint64_t*>(array); });
  return Seals(data, {pieces.size()}, owner);
}

void check_range(int64_t range_bytes) {
  if (range_bytes < 1) throw nb::value_error("range_bytes must be positive");
}

Seals seal_ranges(uintptr_t base, Offsets offsets, int64_t range_bytes, int threads) {
  check_range(range_bytes);
  std::vector<SealedPiece> pieces(offsets.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = {nullptr, reinterpret_cast<const uint8_t*>(base) + valid_offset(offsets.data()[i])};
  }
  return sealed(pieces, range_bytes, threads);
}

Seals copy_ranges_sealed(uintptr_t dst_base, Offsets dst_offsets, uintptr_t src_base, Offsets src_offsets,
                         int64_t range_bytes, int threads) {
  check_range(range_bytes);
  if (dst_offsets.size() != src_offsets.size()) throw nb::value_error("dst_offsets and src_offsets differ in length");
  std::vector<SealedPiece> pieces(dst_offsets.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = {reinterpret_cast<uint8_t*>(dst_base) + valid_offset(dst_offsets.data()[i]),
                 reinterpret_cast<const uint8_t*>(src_base) + valid_offset(src_offsets.data()[i])};
  }
  return sealed(pieces, range_bytes, threads);
}

void force_isa(const std::optional<std::string>& name) {
  if (!force_seal_isa(name.value_or(""))) throw nb::value_error("no such instruction set here: use one of seal_isas()");
}

}  // namespace

void bind_sealed_copy(nb::module_& m) {
  m.def("seal_ranges", &seal_ranges, nb::arg("base"), nb::arg("offsets"), nb::arg("range_bytes"),
        nb::arg("threads") = 1);
  m.def("copy_ranges_sealed", &copy_ranges_sealed, nb::arg("dst_base"), nb::arg("dst_offsets"), nb::arg("src_base"),
        nb::arg("src_offsets"), nb::arg("range_bytes"), nb::arg("threads") = 1);
  m.def("seal_isas", &seal_isas);
  m.def("force_seal_isa", &force_isa, nb::arg("name").none());
}

}  // namespace memserve
