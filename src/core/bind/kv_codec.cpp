#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "codec/kv_codec.h"
#include "scheduling/sequence.h"

namespace memserve {

namespace {

using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Seals = nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>;

constexpr struct {
  const char* name;
  codec::Floats floats;
} kFloats[] = {{"bfloat16", codec::Floats::bfloat16},
               {"float16", codec::Floats::float16},
               {"float32", codec::Floats::float32}};

codec::Floats floats_of(const std::string& name) {
  for (const auto& known : kFloats) {
    if (name == known.name) return known.floats;
  }
  throw nb::value_error("floats are bfloat16, float16 or float32");
}

size_t valid_bytes(int64_t range_bytes) {
  if (range_bytes < 1) throw nb::value_error("range_bytes must be positive");
  return static_cast<size_t>(range_bytes);
}

void check_offsets(const Offsets& offsets) {
  for (size_t i = 0; i < offsets.size(); ++i) {
    if (offsets.data()[i] < 0) throw nb::value_error("offsets must not be negative");
  }
}

size_t encoded_bytes_max(int64_t range_bytes, int64_t ranges) {
  if (ranges < 0) throw nb::value_error("ranges must not be negative");
  return codec::encoded_bytes_max(valid_bytes(range_bytes), static_cast<size_t>(ranges));
}

size_t encode_ranges(uintptr_t base, Offsets offsets, int64_t range_bytes, const std::optional<std::string>& name,
                     uintptr_t out, size_t out_bytes) {
  const size_t bytes = valid_bytes(range_bytes);
  check_offsets(offsets);
  if (out_bytes < encoded_bytes_max(range_bytes, static_cast<int64_t>(offsets.size()))) {
    throw nb::value_error("the memory for the encoding is shorter than kv_encoded_bytes_max");
  }
  std::optional<codec::Floats> floats;
  if (name) floats = floats_of(*name);
  const nb::gil_scoped_release unlocked;
  uint8_t* to = reinterpret_cast<uint8_t*>(out);
  for (size_t i = 0; i < offsets.size(); ++i) {
    const uint8_t* const src = reinterpret_cast<const uint8_t*>(base) + offsets.data()[i];
    if (!floats && !(floats = codec::detect(src, bytes))) return 0;
    const size_t encoded = codec::encode(src, bytes, *floats, to);
    if (encoded == 0) return 0;
    to += encoded;
  }
  return static_cast<size_t>(to - reinterpret_cast<uint8_t*>(out));
}

std::optional<Seals> decode_ranges(uintptr_t src, size_t src_bytes, uintptr_t base, Offsets offsets,
                                   int64_t range_bytes) {
  const size_t bytes = valid_bytes(range_bytes);
  check_offsets(offsets);
  auto seals = std::make_unique<uint64_t[]>(offsets.size());
  {
    const nb::gil_scoped_release unlocked;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(src);
    for (size_t i = 0; i < offsets.size(); ++i) {
      const auto decoded = codec::decode(from, src_bytes, reinterpret_cast<uint8_t*>(base) + offsets.data()[i], bytes);
      if (decoded.encoded_bytes == 0) return std::nullopt;
      seals[i] = decoded.seal;
      from += decoded.encoded_bytes;
      src_bytes -= decoded.encoded_bytes;
    }
  }
  const size_t count = offsets.size();
  uint64_t* const data = seals.release();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<uint64_t*>(array); });
  return Seals(data, {count}, owner);
}

std::optional<std::string> detect_floats(uintptr_t base, int64_t range_bytes) {
  const auto floats = codec::detect(reinterpret_cast<const uint8_t*>(base), valid_bytes(range_bytes));
  for (const auto& known : kFloats) {
    if (floats == known.floats) return known.name;
  }
  return std::nullopt;
}

void force_isa(const std::optional<std::string>& name) {
  if (!codec::force_isa(name.value_or(""))) throw nb::value_error("no such instruction set here: use one of codec_isas()");
}

}  // namespace

void bind_kv_codec(nb::module_& m) {
  m.attr("KV_CODEC_VERSION") = static_cast<int>(codec::kVersion);
  m.def("kv_encoded_bytes_max", &encoded_bytes_max, nb::arg("range_bytes"), nb::arg("ranges") = 1);
  m.def("kv_encode_ranges", &encode_ranges, nb::arg("base"), nb::arg("offsets"), nb::arg("range_bytes"),
        nb::arg("floats").none(), nb::arg("out"), nb::arg("out_bytes"));
  m.def("kv_decode_ranges", &decode_ranges, nb::arg("src"), nb::arg("src_bytes"), nb::arg("base"), nb::arg("offsets"),
        nb::arg("range_bytes"));
  m.def("detect_floats", &detect_floats, nb::arg("base"), nb::arg("range_bytes"));
  m.def("kv_codec_isas", &codec::isas);
  m.def("force_kv_codec_isa", &force_isa, nb::arg("name").none());
}

}  // namespace memserve
